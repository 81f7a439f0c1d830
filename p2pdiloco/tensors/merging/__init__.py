"""Merging: weights, sums, agreement of contributions, and partial merges of groups."""
