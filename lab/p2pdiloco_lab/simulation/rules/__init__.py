"""Rules of the simulator: what must hold at every instant, and what must come about."""
