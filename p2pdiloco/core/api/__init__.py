"""What crosses the border of the core: events, effects, messages, values."""
