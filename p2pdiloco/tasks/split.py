"""What is held out: decided by the hash of a name, on every peer alike."""

from __future__ import annotations

import hashlib


def hash64(text: str) -> int:
    """64 bits of SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def is_heldout(name: str, percent: int) -> bool:
    """Whether what has this name is never trained on."""
    return hash64(f"heldout/{name}") % 100 < percent
