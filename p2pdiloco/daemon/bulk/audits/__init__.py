"""Audits of versions: contributions given to whoever asks, fetched, and merged again."""
