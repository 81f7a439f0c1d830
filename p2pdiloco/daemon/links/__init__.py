"""Link to the others: what it carries, and what a run asks of it."""
