"""Papers of a run's members as they are signed, kept and handed on: notices of its owner, and invites.

A clock is asked at the door only (`daemon.admission.Register`). `Invite` is a grant with its key as text, in
one word that survives copying (`LinkFormat`, which run links use, too).
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import logging
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, structs

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.config.values import check_peer_address
from p2pdiloco.core.api.config import MAX_AMENDMENTS, Amendment, newest
from p2pdiloco.core.api.papers import (
    MAX_USES,
    THE_OWNER,
    Admission,
    Grant,
    Number,
    Word,
    owner_of,
    paper_bytes,
)
from p2pdiloco.core.api.types import PeerId, RunId, Signature, Verify, Vouch, Wire
from p2pdiloco.errors import ConfigError, RemoteError, UserError
from p2pdiloco.identity import Identity, peer_of, public_of, verify
from p2pdiloco.util import Frozen, T, read_note

logger = logging.getLogger(__name__)

MAX_LISTED = 1024
"""Entries of each list of a notice."""
MAX_NOTICE_BYTES = 240 * 1024


class Notice(Wire, frozen=True):
    """Living document of a run's owner; the one with the highest sequence holds."""

    run: RunId
    sequence: Number
    banned: Annotated[tuple[PeerId, ...], Meta(max_length=MAX_LISTED)] = ()
    revoked: Annotated[tuple[PeerId, ...], Meta(max_length=MAX_LISTED)] = ()
    """Keys of grants that are void, with all admissions by them."""
    members: Annotated[tuple[PeerId, ...], Meta(max_length=MAX_LISTED)] = ()
    """Peers that are admitted where the manifest says `mode = "list"`."""
    vouch: Annotated[tuple[Vouch, ...], Meta(max_length=MAX_LISTED)] = ()
    """Versions, and members, that newcomers start from."""
    amendments: Annotated[tuple[Amendment, ...], Meta(max_length=MAX_AMENDMENTS)] = ()
    """Changes of the run on its way."""
    seats: Annotated[tuple[Word, ...], Meta(max_length=MAX_LISTED)] = ()
    """Words on seats, one of each peer."""
    signature: Signature = b""


NOTICE_WORDS = (
    "banned %(banned)d, revoked invites %(revoked)d, listed %(listed)d, versions vouched for %(vouched)d, "
    "amendments %(amendments)d, seats %(seats)d"
)


def notice_figures(notice: Notice) -> dict[str, int]:
    """Count what is in a notice, for `NOTICE_WORDS`."""
    return {
        "banned": len(notice.banned),
        "revoked": len(notice.revoked),
        "listed": len(notice.members),
        "vouched": len(notice.vouch),
        "amendments": len(notice.amendments),
        "seats": sum(word.seated for word in notice.seats),
    }


W = TypeVar("W", bound=Wire)
_encoder = msgspec.msgpack.Encoder()


def signed(paper: W, key: Identity) -> W:
    """Sign a paper; a word as the run's owner."""
    signature = key.sign(paper_bytes(paper))
    if isinstance(paper, Word):
        return structs.replace(paper, signatures=((THE_OWNER, signature),))
    return structs.replace(paper, signature=signature)


def grant(run: str, key: str, expires: int, uses: int, owner: Identity) -> Grant:
    """Make a grant, as the run's owner."""
    return signed(Grant(run, key, expires, uses, b""), owner)


def admission(granted: Grant, peer: str, key: Identity) -> Admission:
    """Make an admission with a grant's key."""
    return signed(Admission(granted, peer, b""), key)


def is_true_notice(notice: Notice, run: str, owners: Sequence[str], verify: Verify) -> bool:
    """Tell whether the run's owner made this notice."""
    owner = owner_of(notice.sequence, owners)
    return notice.run == run and verify(owner, paper_bytes(notice), notice.signature)


RATE_STEP, MOST_STEPS = 4.0, 16
"""Factor by which one notice changes the learning rate at most, and notices after which any change may be."""


def may_follow(notice: Notice, before: Notice) -> bool:
    """Tell whether a newer notice changes the learning rate no faster than it may."""
    last = newest(before.amendments)
    most = RATE_STEP ** min(notice.sequence - before.sequence, MOST_STEPS)
    rate = last.rate_factor if last is not None else 1.0
    added = (made.rate_factor for made in notice.amendments if made not in before.amendments)
    return all(rate / most <= factor <= rate * most for factor in added)


def with_word(notice: Notice, peer: str, seated: bool, replaces: str = "") -> Notice:
    """Put a word on a seat into a notice, to be signed with it, in place of an earlier one of that peer.

    Raises: UserError (there are as many as it holds).
    """
    words = [word for word in notice.seats if word.peer != peer]
    if len(words) >= MAX_LISTED:
        raise UserError(f"a notice has {MAX_LISTED} words on seats, and they are taken", "start a new run")
    return structs.replace(notice, seats=(*words, Word(notice.run, peer, 1, seated, replaces)))


def encode_notice(notice: Notice) -> bytes:
    """Encode a notice. Raises: UserError (it is larger than members take)."""
    data = _encoder.encode(notice)
    if len(data) > MAX_NOTICE_BYTES:
        raise UserError(
            f"the notice has {len(data)} bytes, and may have {MAX_NOTICE_BYTES}",
            "take entries out of it that are not needed any more: p2pdiloco unban, or a new run",
        )
    return data


def decode_notice(data: bytes) -> Notice:
    """Decode a notice; who signed it is another question. Raises: RemoteError ("notice-garbage")."""
    if len(data) > MAX_NOTICE_BYTES:
        raise RemoteError("notice-garbage", f"{len(data)} bytes")
    try:
        return msgspec.msgpack.decode(data, type=Notice)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteError("notice-garbage", str(error)[:120]) from error


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


class LinkFormat(Frozen):
    """Format of a link or an invite: a structure as text, in one word that survives copying.

        <prefix><base32 of msgpack and 5 bytes of its SHA-256, small letters, no padding>

    Base32 because it is one word to a mouse, has no letters that look alike but in case, and makes small QR
    codes.
    """

    noun: str
    """Noun for people, with its article."""
    prefix: str
    domain: bytes
    """Beginning of what is summed: the sum of another format never fits."""
    hint: str

    def fits(self, word: str) -> bool:
        """Tell whether this is meant as one of this format, whole or not."""
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


INVITE = LinkFormat(
    noun="an invite",
    prefix="p2pdiloco1",
    domain=b"p2pdiloco/1/invite\0",
    hint="copy the whole word, which begins with p2pdiloco1",
)


class Right(Wire, frozen=True):
    """A grant and its key, without the run."""

    seed: Key
    expires: Annotated[int, Meta(ge=0, le=1 << 53)]
    uses: Annotated[int, Meta(ge=1, le=MAX_USES)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


class _PackedInvite(Wire, frozen=True):
    """Form in which an invite is written."""

    run: Key
    seed: Key
    expires: Annotated[int, Meta(ge=0, le=1 << 53)]
    uses: Annotated[int, Meta(ge=1, le=MAX_USES)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]
    peers: Peers


class Invite(Frozen):
    """Invite to a run. Secret: whoever has it can join."""

    grant: Grant
    key: Identity
    """The grant's key."""
    addresses: tuple[str, ...]
    """Multiaddrs, with /p2p/ID, of peers to join through."""

    @classmethod
    def of(cls, run: str, right: Right, addresses: tuple[str, ...]) -> Invite:
        """Make it of its parts."""
        key = Identity.from_seed(right.seed)
        granted = Grant(run, key.peer_id, right.expires, right.uses, right.signature)
        return cls(granted, key, addresses)

    @property
    def run(self) -> str:
        """Id of the run."""
        return self.grant.run

    @property
    def right(self) -> Right:
        """Grant and key as they are written."""
        granted = self.grant
        return Right(self.key.seed, granted.expires, granted.uses, granted.signature)

    def admit(self, peer: str) -> Admission:
        """Make the admission of a peer."""
        return admission(self.grant, peer, self.key)


def decode_invite(text: str) -> Invite:
    """Read an invite as earlier releases wrote it. Raises: ConfigError (it is none, or damaged)."""
    return INVITE.decode(text, _PackedInvite, _unpacked)


def _unpacked(packed: _PackedInvite) -> Invite:
    right = Right(packed.seed, packed.expires, packed.uses, packed.signature)
    return Invite.of(packed.run.hex(), right, unpack_peers(packed.peers))


NAME = "notice"


def load_notice(folder: Path, run: str, owners: Sequence[str]) -> Notice | None:
    """Load the run's notice from its folder, `<data_dir>/runs/<run id, 16>/notice`; None: there is none
    that the owner made."""

    def decode(content: bytes) -> Notice:
        try:
            notice = decode_notice(content)
        except RemoteError as error:
            raise ValueError(str(error)) from error
        if not is_true_notice(notice, run, owners, verify):
            raise ValueError("the run's owner did not sign it")
        return notice

    return read_note(folder / NAME, decode, logger.warning)


def save_notice(folder: Path, notice: Notice) -> None:
    """Save a notice durably. Raises: StorageError, UserError (it is too large)."""
    data = encode_notice(notice)
    Files().make_folder(folder)
    Files().save(folder / NAME, [data], durable=True)
