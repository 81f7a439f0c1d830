"""Samples that a learner takes, and its place in them."""
