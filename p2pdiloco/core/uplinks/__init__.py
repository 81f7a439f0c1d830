"""Uplinks: what a node's link carries, and whether that is enough for an office."""
