"""Rounds of a syncer: contributions come in, are merged, and become a version."""
