"""What is held out: decided by the hash of a name, on every peer alike."""

from __future__ import annotations

import hashlib

ANY_NAME = "surrogatepass"
"""How text is encoded that may be a file's name: not all of those are UTF-8."""


def hash64(text: str) -> int:
    """64 bits of SHA-256."""
    return int.from_bytes(hashlib.sha256(text.encode(errors=ANY_NAME)).digest()[:8], "little")


def is_heldout(name: str, percent: int) -> bool:
    """Whether what has this name is never trained on."""
    return hash64(f"heldout/{name}") % 100 < percent
