"""What must hold at every instant, and what must come about."""
