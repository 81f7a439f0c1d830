"""Signatures that cost a hash: nobody in the simulated world forges one, but mixing them up is caught."""

from __future__ import annotations

import hashlib


class HashCrypto:
    """Implements `core.types.Crypto` for one peer."""

    def __init__(self, peer: str) -> None:
        self._peer = peer.encode()

    def sign(self, message: bytes) -> bytes:
        """The signature of this peer."""
        return hashlib.blake2b(message, digest_size=16, key=self._peer).digest()

    def verify(self, peer: str, message: bytes, signature: bytes) -> bool:
        """Whether `peer` signed `message`."""
        return hashlib.blake2b(message, digest_size=16, key=peer.encode()).digest() == signature
