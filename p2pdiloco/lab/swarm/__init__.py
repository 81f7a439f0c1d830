"""Real nodes as processes, and what their event logs say."""
