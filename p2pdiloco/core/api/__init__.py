"""Values that cross the border of the core: events, effects, messages, reasons."""
