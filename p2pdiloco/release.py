"""Versions of this release: its own, and that of the wire."""

VERSION = "0.3.0"

WIRE_VERSION = 33
"""Version of the wire, raised when two builds can no longer read each other's messages or checkpoints."""
