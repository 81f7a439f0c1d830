"""Guided commands: questions at a terminal, whose answers become settings or a run.toml."""
