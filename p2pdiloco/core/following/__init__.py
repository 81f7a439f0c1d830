"""Keeping up with a fragment's chain."""
