"""Which members carry offices badly, and who takes them instead."""
