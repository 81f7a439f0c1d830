"""Contributions, updates and states on their way between peers."""
