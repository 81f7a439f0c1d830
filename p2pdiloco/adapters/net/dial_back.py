"""Check that a certain peer answers at a certain address, by a TCP connection of our own.

The connection lies beside those of p2pd. libp2p's handshake goes on it as far as the peer's proof of its
identity.

p2pd reuses an open connection to a peer, so it cannot tell whether a new one could be made. An open port
alone proves nothing: behind one NAT it may be forwarded to another node. So the first two messages of
Noise XX are exchanged: in the second the peer signs the key of this handshake with that of its peer id.
Then the connection is closed; nothing is sent that the peer had to store.

Why by ourselves: p2pd has no call for it, and no kept library does it without much else. py-libp2p brings
trio and a networking stack of its own; noiseprotocol has had no release for years, and does not know what
libp2p puts into the handshake.
The arithmetic is `cryptography`'s; what is here is the order of one handshake, tested against p2pd.
Sources: https://github.com/libp2p/specs/tree/master/noise, https://noiseprotocol.org/noise.html
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from p2pdiloco.adapters.net.multiaddrs import varint
from p2pdiloco.identity import verify

MULTISTREAM, NOISE = b"\x13/multistream/1.0.0\n", b"\x07/noise\n"
PROTOCOL = b"Noise_XX_25519_ChaChaPoly_SHA256"
SIGNED_PREFIX = b"noise-libp2p-static-key:"
KEY_BYTES, TAG_BYTES = 32, 16
MAX_PAYLOAD_BYTES = 4096


async def answers(peer: str, ip: str, port: int, timeout_s: float) -> bool:
    """Tell whether that peer, and nobody else, answers there. Never raises for what the other side does."""
    writer: asyncio.StreamWriter | None = None
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(ip, port, limit=MAX_PAYLOAD_BYTES)
            return await _proves(peer, reader, writer)
    except (OSError, TimeoutError, EOFError, InvalidTag, ValueError):
        return False  # nobody there, somebody else, or no libp2p
    finally:
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.transport.abort()


async def _proves(peer: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    noise = Initiator()
    writer.write(MULTISTREAM + NOISE)
    for expected in (MULTISTREAM, NOISE):
        if await reader.readexactly(len(expected)) != expected:
            return False
    first = noise.first()
    writer.write(len(first).to_bytes(2, "big") + first)
    size = int.from_bytes(await reader.readexactly(2), "big")
    if size > MAX_PAYLOAD_BYTES:
        return False
    static, payload = noise.second(await reader.readexactly(size))
    return verify(peer, SIGNED_PREFIX + static, _field(payload, 2))


class Initiator:
    """Noise XX from the side of whoever dialled, the first two of its three messages."""

    def __init__(self) -> None:
        self._chaining = self._hash = PROTOCOL  # exactly as long as a hash
        self._key = bytes(KEY_BYTES)
        self._count = 0
        self._ephemeral = X25519PrivateKey.generate()
        self._mix_hash(b"")  # no prologue

    def first(self) -> bytes:
        """Write message 1: our ephemeral key, and an empty payload in the clear."""
        key = self._ephemeral.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self._mix_hash(key)
        self._mix_hash(b"")
        return key

    def second(self, message: bytes) -> tuple[bytes, bytes]:
        """Read message 2: (the other side's static key, its payload). Raises: InvalidTag, ValueError (no
        answer to our first message)."""
        sealed = KEY_BYTES + KEY_BYTES + TAG_BYTES
        if len(message) < sealed + TAG_BYTES:
            raise ValueError("too short")
        ephemeral = message[:KEY_BYTES]
        self._mix_hash(ephemeral)
        self._mix_key(ephemeral)
        static = self._open(message[KEY_BYTES:sealed])
        self._mix_key(static)
        return static, self._open(message[sealed:])

    def _mix_hash(self, data: bytes) -> None:
        self._hash = hashlib.sha256(self._hash + data).digest()

    def _mix_key(self, theirs: bytes) -> None:
        shared = self._ephemeral.exchange(X25519PublicKey.from_public_bytes(theirs))
        secret = hmac.digest(self._chaining, shared, "sha256")
        self._chaining = hmac.digest(secret, b"\x01", "sha256")
        self._key = hmac.digest(secret, self._chaining + b"\x02", "sha256")
        self._count = 0

    def _open(self, sealed: bytes) -> bytes:
        nonce = bytes(4) + self._count.to_bytes(8, "little")
        plain = ChaCha20Poly1305(self._key).decrypt(nonce, sealed, self._hash)
        self._count += 1
        self._mix_hash(sealed)
        return plain


def _field(message: bytes, wanted: int) -> bytes:
    """Find the bytes of a length-delimited protobuf field; those of the payload are all of that kind.

    Raises:
        ValueError: not such a message, or the field is missing.
    """
    at = 0
    while at < len(message):
        tag, at = varint(message, at)
        size, at = varint(message, at)
        if tag & 7 != 2 or at + size > len(message):
            raise ValueError("not a payload")
        if tag >> 3 == wanted:
            return message[at : at + size]
        at += size
    raise ValueError("no signature")
