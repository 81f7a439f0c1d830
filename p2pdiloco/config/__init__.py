"""The manifest of a run, and the settings of a node."""
