"""Audits: merges of others made again, and what follows if one was false."""
