"""Control messages between the daemons of a run, and their one encoding.

Every message is a tagged msgpack array inside an `Envelope` that names protocol and run. Decoding
anything that is not exactly such a message raises `RemoteError`; nothing else can come out of
`decode`. Tensors never travel here: contributions, updates and states are bulk streams (ports.Transport).
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdiloco.core.api.reach import Reach
from p2pdiloco.core.api.reasons import VoteRefusal
from p2pdiloco.core.api.types import (
    MAX_FRAGMENTS,
    Certificate,
    Count,
    GroupId,
    Head,
    PeerId,
    RunId,
    Vote,
    Wire,
)
from p2pdiloco.errors import RemoteError
from p2pdiloco.release import WIRE_VERSION

MAX_MESSAGE_BYTES = 256 * 1024
MAX_OFFICES = 2 * MAX_FRAGMENTS
"""More offices than one peer holds, on all levels of all fragments."""
Words = Annotated[str, Meta(max_length=200)]


class Message(Wire, tag=True, frozen=True):
    """Base of the control messages; the class name is the tag."""


class Progress(Message, frozen=True):
    """Heartbeat to the members of our groups: I am alive, this is what I hold."""

    incarnation: Count
    step_time_s: float
    inner_step: Count
    tokens_total: Count
    tokens_per_s: float
    loss: float | None
    learning: bool
    """A learner is running: closing calls expect something of this member."""
    confirmed: bool
    """Holds versions that peers confirm: may vote, stand, and give state to others (design 5.1)."""
    stands: bool
    """Willing to be a syncer."""
    heads: Annotated[tuple[tuple[Count, Head], ...], Meta(max_length=MAX_FRAGMENTS)]
    """(fragment, head), by rising fragment: those that may be news. The others are as last heard."""
    offices: Annotated[tuple[tuple[GroupId, Count, Count], ...], Meta(max_length=MAX_OFFICES)]
    """(group, fragment, term) of every group whose syncer the sender is."""
    saved: bool
    """Not confirmed, but these heads are of a state that it saved: the whole swarm may be returning."""
    reach: Reach
    """Who cannot be dialled is no syncer while somebody else can be, and gives nothing that others have."""
    thin: bool
    """Its uplink carries less than an office asks (`core.uplinks.uplink`)."""
    votes: bool
    """It can save a vote. Who cannot, counts in no majority."""


class Leaving(Message, frozen=True):
    """The sender goes away on purpose: out of the view at once, its offices are open."""

    incarnation: Count
    heads: Annotated[tuple[Head, ...], Meta(max_length=MAX_FRAGMENTS)] = ()
    """With which it goes and may come back, by fragment; empty if a version of its own was in the making."""


class Closing(Message, frozen=True):
    """From a syncer whose quorum is complete: send what you have, the round closes in this many seconds."""

    group: GroupId
    fragment: Count
    term: Count
    number: Count
    closes_in_s: float


class Pass(Message, frozen=True):
    """Answer to `Closing`: do not wait for me this time."""

    group: GroupId
    fragment: Count
    term: Count
    number: Count


class Announce(Message, frozen=True):
    """A new version exists and the sender can give it."""

    fragment: Count
    head: Head
    syncer: PeerId
    """Who made it."""


class VoteRequest(Message, frozen=True):
    """A candidate asks for a vote."""

    group: GroupId
    fragment: Count
    term: Count
    head: Head
    reason: Words
    """For people."""


class VoteGranted(Message, frozen=True):
    """The voter's signed vote."""

    vote: Vote


class VoteRefused(Message, frozen=True):
    """Why not, and what the voter knows that the candidate may not."""

    group: GroupId
    fragment: Count
    term: Count
    known_term: Count
    head: Head | None
    reason: VoteRefusal


class Elected(Message, frozen=True):
    """The candidate is in office; the certificate proves it."""

    certificate: Certificate


class OfficeQuery(Message, frozen=True):
    """Send me the certificate of this fragment's syncer, if you know one above this term."""

    group: GroupId
    fragment: Count
    above_term: Count


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
)


class Envelope(Wire, frozen=True):
    """What travels: protocol version first, so that another version is told apart before all else. Whose it
    is says the authenticated connection on which it comes."""

    wire_version: Count
    run: RunId
    message: msgspec.Raw


_encoder = msgspec.msgpack.Encoder()
_envelope = msgspec.msgpack.Decoder(Envelope)
_message = msgspec.msgpack.Decoder(AnyMessage)
_version_only = msgspec.msgpack.Decoder(list[msgspec.Raw])
MALFORMED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""All that the decoder raises on foreign bytes; deep nesting ends in a `RecursionError`."""


def encode(run: str, message: Message) -> bytes:
    """The wire bytes of a message."""
    raw = msgspec.Raw(_encoder.encode(message))
    return _encoder.encode(Envelope(WIRE_VERSION, run, raw))


def decode(run: str, data: bytes) -> Message:
    """The message in `data`.

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
    """If an undecodable envelope starts with another protocol version, say that instead of garbage."""
    try:
        parts = _version_only.decode(data)
        theirs = msgspec.msgpack.decode(parts[0], type=int) if parts else WIRE_VERSION
    except MALFORMED:
        return
    if theirs != WIRE_VERSION:
        raise RemoteError("wire-version", f"theirs {theirs}, ours {WIRE_VERSION}")
