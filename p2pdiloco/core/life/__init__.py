"""A node's life in a run: joining, heartbeats, leaving."""
