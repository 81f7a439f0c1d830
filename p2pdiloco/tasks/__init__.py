"""What is trained: the built-in tasks, and the interface for others."""
