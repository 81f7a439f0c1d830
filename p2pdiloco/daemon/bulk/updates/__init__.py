"""Outer updates: fetched, given out, passed on while they arrive."""
