"""Signatures that cost a hash: nobody in the simulated world forges one, but mixing them up is caught."""

from __future__ import annotations

import hashlib

LONG_BYTES = 4096
_LAST: list[tuple[bytes, str, bytes, bool] | None] = [None]


class HashCrypto:
    """Implements `core.api.types.Crypto` for one peer."""

    def __init__(self, peer: str) -> None:
        self._peer = peer.encode()

    def sign(self, message: bytes) -> bytes:
        """The signature of this peer."""
        return hashlib.blake2b(message, digest_size=16, key=self._peer).digest()

    def verify(self, peer: str, message: bytes, signature: bytes) -> bool:
        """Check that `peer` signed `message`. Thousands of nodes look at the same long one."""
        if len(message) < LONG_BYTES:
            return self._right(peer, message, signature)
        known = _LAST[0]
        if known is None or known[0] is not message or known[1:3] != (peer, signature):
            known = _LAST[0] = (message, peer, signature, self._right(peer, message, signature))
        return known[3]

    def _right(self, peer: str, message: bytes, signature: bytes) -> bool:
        return hashlib.blake2b(message, digest_size=16, key=peer.encode()).digest() == signature
