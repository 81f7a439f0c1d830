"""Life of a node in a run: joining, heartbeats, leaving."""
