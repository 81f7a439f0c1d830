"""Membership: which peers are here, and whether to count on them."""
