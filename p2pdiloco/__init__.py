"""p2pdiloco: peer-to-peer decentralized training with Decoupled DiLoCo (arXiv 2604.21428)."""

__version__ = "0.1.0"

WIRE_VERSION = 8
"""Raised whenever two builds can no longer understand each other's messages or checkpoints."""
