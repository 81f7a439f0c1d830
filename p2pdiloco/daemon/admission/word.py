"""Words: structures as text in one word that survives copying, which invites and run links are.

    <prefix><base32 of msgpack and 5 bytes of its SHA-256, small letters, no padding>

Base32 because it is one word to a mouse, has no letters that look alike but in case, and makes small QR
codes.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import re
from collections.abc import Callable, Sequence
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from p2pdiloco.config.values import check_peer_address
from p2pdiloco.core.api.types import Wire
from p2pdiloco.errors import ConfigError
from p2pdiloco.identity import peer_of, public_of

MAX_TEXT = 4096
MAX_PEERS = 4
MAX_ADDRESSES = 4
SUM_BYTES = 5
_TEXT = re.compile(r"[a-z2-7]+")
Key = Annotated[bytes, Meta(min_length=32, max_length=32)]
Peers = Annotated[
    tuple[
        tuple[
            Key, Annotated[tuple[Annotated[str, Meta(max_length=128)], ...], Meta(max_length=MAX_ADDRESSES)]
        ],
        ...,
    ],
    Meta(max_length=MAX_PEERS),
]
"""Public keys of peers to dial, with their addresses without `/p2p/ID`."""
W = TypeVar("W", bound=Wire)
T = TypeVar("T")


class Kind(Struct, frozen=True):
    """Kind of word."""

    noun: str
    """Noun for people, with its article."""
    prefix: str
    domain: bytes
    """Beginning of what is summed: the sum of another kind never fits."""
    hint: str

    def fits(self, word: str) -> bool:
        """Tell whether this is meant as one of this kind, whole or not."""
        return "".join(word.split()).lower().startswith(self.prefix)

    def encode(self, packed: Wire) -> str:
        """Encode a structure as a word."""
        data = msgspec.msgpack.encode(packed)
        return self.prefix + base64.b32encode(data + self.checksum(data)).decode().rstrip("=").lower()

    def decode(self, text: str, form: type[W], build: Callable[[W], T]) -> T:
        """Read a word; blanks and line breaks inside it, and capital letters, do not matter.

        `build` makes of what it says what is wanted.

        Raises: ConfigError (it is none, or damaged).
        """
        if len(text) > MAX_TEXT:
            raise ConfigError(f"this is too long for {self.noun}", self.hint)
        word = "".join(text.split()).lower()
        if not word.startswith(self.prefix):
            raise ConfigError(f'{self.noun} begins with {self.prefix}, not "{word[:16]}"', self.hint)
        body = word.removeprefix(self.prefix)
        try:
            if not _TEXT.fullmatch(body):
                raise ValueError(f"a letter that is in none, or too few of them ({len(body)})")
            return build(msgspec.msgpack.decode(self._checked(body), type=form))
        except (msgspec.MsgspecError, ValueError, RecursionError, ConfigError) as error:
            what = self.noun.partition(" ")[2]
            raise ConfigError(f"the {what} cannot be read: {error}", self.hint) from error

    def _checked(self, body: str) -> bytes:
        """Decode the letters, and check the sum. Raises: ValueError."""
        with contextlib.suppress(binascii.Error):  # its words are about padding
            data = base64.b32decode(body.upper() + "=" * (-len(body) % 8))
            if data[-SUM_BYTES:] == self.checksum(data[:-SUM_BYTES]):
                return data[:-SUM_BYTES]
        raise ValueError("mistyped, or not all of it")

    def checksum(self, data: bytes) -> bytes:
        """Sum these bytes up."""
        return hashlib.sha256(self.domain + data).digest()[:SUM_BYTES]


def pack_peers(addresses: Sequence[str], noun: str) -> Peers:
    """Pack addresses by peer, as many as there is room for. Raises: ConfigError (one cannot be held)."""
    peers: dict[bytes, list[str]] = {}
    for address in addresses:
        check_peer_address(address)
        where, _, peer = address.rpartition("/p2p/")
        public = public_of(peer)
        if public is None or len(where) > 128:
            raise ConfigError(f'{noun} cannot hold the address "{address}"', "name another with --join")
        if public in peers or len(peers) < MAX_PEERS:
            peers.setdefault(public, []).append(where)
    return tuple((public, tuple(found[:MAX_ADDRESSES])) for public, found in peers.items())


def unpack_peers(peers: Peers) -> tuple[str, ...]:
    """List the addresses of packed peers. Raises: ConfigError (one is malformed)."""
    addresses = tuple(f"{where}/p2p/{peer_of(public)}" for public, found in peers for where in found)
    for address in addresses:
        check_peer_address(address)
    return addresses
