"""What the link to the others carries, and what a run asks of it."""
