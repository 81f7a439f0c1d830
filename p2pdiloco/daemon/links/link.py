"""Link of a node to the others, as it was measured or told. Needs no torch."""

from __future__ import annotations

from msgspec import Struct

LINK_OVERHEAD = 1.04
"""Factor from payload bytes to bytes on the link: encryption, multiplexing, TCP and IP headers."""


class Link(Struct, frozen=True):
    """Rates and latency of one node's link to the others."""

    upload_bits_per_s: float
    download_bits_per_s: float
    latency_s: float = 0.05
    """Latency one way, half a round trip."""
