"""A node's way to the others, as it was measured or told. Needs no torch."""

from __future__ import annotations

from msgspec import Struct

LINK_OVERHEAD = 1.04
"""Encryption, multiplexing, TCP and IP headers."""


class Link(Struct, frozen=True):
    """One node's way to the others."""

    upload_bits_per_s: float
    download_bits_per_s: float
    latency_s: float = 0.05
    """One way."""
