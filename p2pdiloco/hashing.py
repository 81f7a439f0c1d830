"""Digest of payloads and states: BLAKE3, 32 bytes.

As strong as SHA-256 and two to three times as fast; hashing every new state (8 bytes a parameter) and every
payload was a fifth of a node's processor time. Small things (headers, manifests, votes) stay with SHA-256.
"""

from __future__ import annotations

from blake3 import blake3

from p2pdiloco.ports import Buffer

DIGEST_BYTES = 32
Hash = blake3
"""Hash to update with buffers, then `digest()`. It lets go of the interpreter's lock meanwhile."""


def content_digest(*buffers: Buffer) -> bytes:
    """Digest of the concatenated buffers."""
    found = Hash()
    for buffer in buffers:
        found.update(buffer)
    return found.digest()
