"""The models of the built-in tasks."""
