"""Contributions of this node's learner, until they are merged beyond doubt."""
