"""Who is here, and whether to count on them."""
