"""Rests of this machine: why this node's learner makes no inner steps, by its owner's wish."""
