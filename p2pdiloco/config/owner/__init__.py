"""Limits that a machine's owner sets a node, also while it runs."""
