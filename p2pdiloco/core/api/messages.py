"""Control messages between the daemons of a run, and their one encoding.

Every message is a tagged msgpack array inside an `Envelope` that names protocol and run. Decoding anything
else raises `RemoteError`, and nothing but that. Tensors never travel here: contributions, updates and states
are bulk streams (`ports.Transport`).

Listed in docs/reference/wire.md, section 1.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdiloco.core.api.evidence import Statement
from p2pdiloco.core.api.papers import Proof, Word
from p2pdiloco.core.api.reasons import VoteRefusal
from p2pdiloco.core.api.types import (
    MAX_FRAGMENTS,
    Certificate,
    Count,
    GroupId,
    Head,
    PeerId,
    Reach,
    RunId,
    Vote,
    Wire,
)
from p2pdiloco.errors import RemoteError
from p2pdiloco.release import WIRE_VERSION

MAX_MESSAGE_BYTES = 256 * 1024
MAX_OFFICES = 2 * MAX_FRAGMENTS
"""Limit of offices in one heartbeat: more than one peer holds, on all levels of all fragments."""
Words = Annotated[str, Meta(max_length=200)]


class Message(Wire, tag=True, frozen=True):
    """Base of the control messages; the class name is the tag."""


class Progress(Message, frozen=True):
    """Heartbeat to the members of our groups: the sender is alive, and holds this."""

    incarnation: Count
    step_time_s: float
    inner_step: Count
    tokens_total: Count
    tokens_per_s: float
    loss: float | None
    learning: bool
    """True: a learner is running, so closing calls expect something of this member."""
    confirmed: bool
    """True: it holds versions that peers confirm, so it may vote, stand, and give state to others
    (docs/protocol/belief.md, section 5)."""
    stands: bool
    """True: it is willing to be a syncer."""
    heads: Annotated[tuple[tuple[Count, Head], ...], Meta(max_length=MAX_FRAGMENTS)]
    """(fragment, head), by rising fragment, of those that may be news. The others are as last heard."""
    offices: Annotated[tuple[tuple[GroupId, Count, Count], ...], Meta(max_length=MAX_OFFICES)]
    """(group, fragment, term) of every group whose syncer the sender is."""
    saved: bool
    """True: not confirmed, but these heads are of a state that it saved; the whole swarm may be returning."""
    reach: Reach
    """Reachability. A hidden member leaves offices to those that can be dialled, and gives nothing that
    others have."""
    thin: bool
    """True: its uplink carries less than an office asks (`core.capacity`)."""
    votes: bool
    """True: it can save a vote. A member that cannot counts in no majority."""
    proofs: Count = 0
    """Number that says whom it excludes (`core.api.evidence.fingerprint`); 0: nobody."""


class Leaving(Message, frozen=True):
    """Good-bye of a member that goes away on purpose: out of the view at once, its offices are open."""

    incarnation: Count
    heads: Annotated[tuple[Head, ...], Meta(max_length=MAX_FRAGMENTS)] = ()
    """Heads by fragment with which it goes and may come back; empty if a version of its own was in the
    making."""


class Closing(Message, frozen=True):
    """Call of a syncer whose quorum is complete: send what you have, the round closes in this many
    seconds."""

    group: GroupId
    fragment: Count
    term: Count
    number: Count
    closes_in_s: float


class Pass(Message, frozen=True):
    """Answer to `Closing`: do not wait for the sender this time."""

    group: GroupId
    fragment: Count
    term: Count
    number: Count


class Announce(Message, frozen=True):
    """Announcement of a new version that the sender can give."""

    fragment: Count
    head: Head
    syncer: PeerId
    """Member that made the version."""


class VoteRequest(Message, frozen=True):
    """Request of a candidate for a vote."""

    group: GroupId
    fragment: Count
    term: Count
    head: Head
    reason: Words
    """Reason to stand, for people."""


class VoteGranted(Message, frozen=True):
    """Signed vote of the voter."""

    vote: Vote


class VoteRefused(Message, frozen=True):
    """Refusal of a vote, with its reason and what the voter knows that the candidate may not."""

    group: GroupId
    fragment: Count
    term: Count
    known_term: Count
    head: Head | None
    reason: VoteRefusal


class Elected(Message, frozen=True):
    """Notice of a candidate that it is in office; the certificate proves it."""

    certificate: Certificate


class OfficeQuery(Message, frozen=True):
    """Question for the certificate of this fragment's syncer, if the receiver knows one above this term."""

    group: GroupId
    fragment: Count
    above_term: Count


class Proven(Message, frozen=True):
    """Proof that a member lied. Whoever sends it has no part in it: it holds by itself, or not at all."""

    proof: Proof


class Stated(Message, frozen=True):
    """Statement of a member, mostly the sender, on a merge that it made again. Nobody has to believe it."""

    statement: Statement


class Said(Message, frozen=True):
    """Word of a seat on a seat. It holds by its signature, and its sender has no part in it."""

    word: Word


AnyMessage = (
    Progress
    | Leaving
    | Closing
    | Pass
    | Announce
    | VoteRequest
    | VoteGranted
    | VoteRefused
    | Elected
    | OfficeQuery
    | Proven
    | Said
    | Stated
)


class Envelope(Wire, frozen=True):
    """Frame of every message: protocol version first, so that another version is told apart before all else.

    The authenticated connection on which it comes says whose it is.
    """

    wire_version: Count
    run: RunId
    message: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_envelope = msgspec.msgpack.Decoder(Envelope)
_message = msgspec.msgpack.Decoder(AnyMessage)
_version_only = msgspec.msgpack.Decoder(list[msgspec.Raw])
MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""Errors that the decoder raises on foreign bytes; deep nesting ends in a `RecursionError`."""


def encode(run: str, message: Message) -> bytes:
    """Encode a message into its wire bytes."""
    raw = msgspec.Raw(_encoder.encode(message))
    return _encoder.encode(Envelope(WIRE_VERSION, run, raw))


def decode(run: str, data: bytes) -> Message:
    """Decode the message in `data`.

    Raises:
        RemoteError: oversized, garbage, another protocol version, or another run.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise RemoteError("oversized", f"{len(data)} bytes of at most {MAX_MESSAGE_BYTES}")
    try:
        envelope = _envelope.decode(data)
    except MALFORMED as error:
        _refuse_other_version(data)
        raise RemoteError("garbage", str(error)) from error
    if envelope.wire_version != WIRE_VERSION:
        raise RemoteError("wire-version", f"theirs {envelope.wire_version}, ours {WIRE_VERSION}")
    if envelope.run != run:
        raise RemoteError("other-run", envelope.run[:16])
    try:
        message: Message = _message.decode(envelope.message)
    except MALFORMED as error:
        raise RemoteError("garbage", str(error)) from error
    return message


def _refuse_other_version(data: bytes) -> None:
    """Say so, instead of garbage, if an undecodable envelope starts with another protocol version."""
    try:
        parts = _version_only.decode(data)
        theirs = msgspec.msgpack.decode(parts[0], type=int) if parts else WIRE_VERSION
    except MALFORMED:
        return
    if theirs != WIRE_VERSION:
        raise RemoteError("wire-version", f"theirs {theirs}, ours {WIRE_VERSION}")
