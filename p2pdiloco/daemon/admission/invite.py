"""Invites as text: all that a newcomer needs, in one word that survives copying.

    p2pdiloco1<base32 of msgpack and 5 bytes of its SHA-256, small letters, no padding>

Base32 because it is one word to a mouse, has no letters that look alike but in case, and makes small QR
codes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from p2pdiloco.config.addresses import check_peer_address
from p2pdiloco.core.api.types import Wire
from p2pdiloco.daemon.admission.papers import MAX_USES, Admission, Grant, admission
from p2pdiloco.errors import ConfigError
from p2pdiloco.identity import Identity, peer_of, public_of

PREFIX = "p2pdiloco1"
MAX_TEXT = 4096
MAX_PEERS = 4
MAX_ADDRESSES = 4
SUM_BYTES = 5
_TEXT = re.compile(r"[a-z2-7]+")
Key = Annotated[bytes, Meta(min_length=32, max_length=32)]
_HINT = "copy the whole word that `p2pdiloco invite` printed; it begins with p2pdiloco1"


class _Packed(Wire, frozen=True):
    """Form in which an invite is written."""

    run: Key
    seed: Key
    expires: Annotated[int, Meta(ge=0, le=1 << 53)]
    uses: Annotated[int, Meta(ge=1, le=MAX_USES)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]
    peers: Annotated[
        tuple[
            tuple[
                Key,
                Annotated[tuple[Annotated[str, Meta(max_length=128)], ...], Meta(max_length=MAX_ADDRESSES)],
            ],
            ...,
        ],
        Meta(max_length=MAX_PEERS),
    ]
    """Public keys of peers to dial, with their addresses without `/p2p/ID`."""


class Invite(Struct, frozen=True):
    """Invite to a run. Secret: whoever has it can join."""

    grant: Grant
    key: Identity
    """The grant's key."""
    addresses: tuple[str, ...]
    """Multiaddrs, with /p2p/ID, of peers to join through."""

    @property
    def run(self) -> str:
        """Id of the run."""
        return self.grant.run

    def admit(self, peer: str) -> Admission:
        """Make the admission of a peer."""
        return admission(self.grant, peer, self.key)


def encode_invite(granted: Grant, key: Identity, addresses: Sequence[str]) -> str:
    """Encode an invite as text; of the addresses as many as there is room for. Raises: ConfigError."""
    peers: dict[bytes, list[str]] = {}
    for address in addresses:
        check_peer_address(address)
        where, _, peer = address.rpartition("/p2p/")
        public = public_of(peer)
        if public is None or len(where) > 128:
            raise ConfigError(f'an invite cannot hold the address "{address}"', "name another with --join")
        if public in peers or len(peers) < MAX_PEERS:
            peers.setdefault(public, []).append(where)
    held = tuple((public, tuple(found[:MAX_ADDRESSES])) for public, found in peers.items())
    packed = _Packed(
        bytes.fromhex(granted.run), key.seed, granted.expires, granted.uses, granted.signature, held
    )
    data = msgspec.msgpack.encode(packed)
    text = base64.b32encode(data + _checksum(data)).decode().rstrip("=").lower()
    return PREFIX + text


def is_invite(word: str) -> bool:
    """Tell whether this is meant as an invite, whole or not."""
    return word.strip().lower().startswith(PREFIX)


def decode_invite(text: str) -> Invite:
    """Read an invite; blanks and line breaks inside it, and capital letters, do not matter.

    Raises: ConfigError (it is none, or damaged).
    """
    if len(text) > MAX_TEXT:
        raise ConfigError("this is too long for an invite", _HINT)
    word = "".join(text.split()).lower()
    if not word.startswith(PREFIX):
        raise ConfigError(f'an invite begins with {PREFIX}, not "{word[:16]}"', _HINT)
    body = word.removeprefix(PREFIX)
    try:
        if not _TEXT.fullmatch(body):
            raise ValueError("a letter that is in no invite")
        data = base64.b32decode(body.upper() + "=" * (-len(body) % 8))
        data, checksum = data[:-SUM_BYTES], data[-SUM_BYTES:]
        if checksum != _checksum(data):
            raise ValueError("mistyped, or not all of it")
        packed = msgspec.msgpack.decode(data, type=_Packed)
        key = Identity.from_seed(packed.seed)
        addresses = [f"{a}/p2p/{peer_of(public)}" for public, found in packed.peers for a in found]
        for address in addresses:
            check_peer_address(address)
    except (msgspec.MsgspecError, ValueError, RecursionError, ConfigError) as error:
        raise ConfigError(f"the invite cannot be read: {error}", _HINT) from error
    granted = Grant(packed.run.hex(), key.peer_id, packed.expires, packed.uses, packed.signature)
    return Invite(granted, key, tuple(addresses))


def _checksum(data: bytes) -> bytes:
    return hashlib.sha256(b"p2pdiloco/1/invite\0" + data).digest()[:SUM_BYTES]
