"""Tasks: the built-in kinds of training, and the interface for others."""
