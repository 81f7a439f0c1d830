"""Versions of a fragment, watermarks of its learners, and what other peers have of them."""
