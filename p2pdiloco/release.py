"""Numbers of this release: its own version and that of what it says to others."""

VERSION = "0.2.0"

WIRE_VERSION = 19
"""Raised whenever two builds can no longer understand each other's messages or checkpoints."""
