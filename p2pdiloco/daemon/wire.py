"""What daemons say to each other outside the core's control messages: bulk headers and queries.

A control payload starts with one byte: a core message or a query. Bulk streams start with one of the
tagged headers below. Everything is strict, positional msgpack with bounded fields.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from p2pdiloco.core.api.messages import Message
from p2pdiloco.core.api.messages import encode as encode_message
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import (
    MAX_WATERMARKS,
    Count,
    Digest,
    Head,
    PeerId,
    RunId,
    SignedContribution,
    SignedPartial,
    SignedVersion,
    Watermark,
    Wire,
)
from p2pdiloco.errors import RemoteError
from p2pdiloco.learner.channel_messages import MAX_EPOCH, MAX_SHARDS
from p2pdiloco.ports import Refusal

MESSAGE, QUERY = b"m", b"q"
MAX_RUNS = 64
MAX_PROBE_BYTES = 8 * 1024 * 1024
"""In each direction, of all that one measurement of a link moves."""
MAX_NAMED = 8
"""Peers in an `Elsewhere`."""
Text = Annotated[str, Meta(max_length=200)]
MAX_PORTS = 4
Port = Annotated[int, Meta(ge=1, le=65535)]
Ip = Annotated[str, Meta(max_length=45)]
Probed = Annotated[int, Meta(ge=0, le=MAX_PROBE_BYTES)]


class PushContribution(Wire, frozen=True, tag=True):
    """Header of a contribution's stream."""

    signed: SignedContribution


class PushPartial(Wire, frozen=True, tag=True):
    """Header of the stream of a group's partial merge. Names every contribution: up to about 2 MiB."""

    signed: SignedPartial


class Answer(Wire, frozen=True, tag=True):
    """The receiver's word on a contribution or a partial merge, before or after its payload."""

    verdict: Verdict
    head: Head | None


class PullUpdate(Wire, frozen=True, tag=True):
    """Give me this version's outer update."""

    run: RunId
    fragment: Count
    number: Count
    have_bytes: Count = 0
    """So much of the payload with the digest `have` is here already, from a stream that was cut."""
    have: Annotated[bytes, Meta(max_length=64)] = b""
    version: Annotated[bytes, Meta(max_length=64)] = b""
    """Not empty: a holder named you. Only the version with this digest, and a part of the update will do."""
    relays: bool = False
    """Whoever asks can give it to others."""
    insist: bool = False
    """Those who were named did not deliver."""


class PullState(Wire, frozen=True, tag=True):
    """Give me this fragment's newest state, at least this version."""

    run: RunId
    fragment: Count
    number: Count
    have_bytes: Count = 0
    """As in `PullUpdate`; `have` is the state's digest."""
    have: Annotated[bytes, Meta(max_length=64)] = b""
    most_bytes: Count = 0
    """No more than so many; 0: all the rest."""
    exact: bool = False
    """Nothing but the rest of `have` will do."""


class PullManifest(Wire, frozen=True, tag=True):
    """Give me the signed manifest of this run."""

    run: RunId


class PullInitial(Wire, frozen=True, tag=True):
    """Give me the parameters that version 0 of this run is, from this byte on
    (`daemon.run_files.initial`)."""

    run: RunId
    offset: Count = 0


class InitialHeader(Wire, frozen=True, tag=True):
    """Header of their stream: fp32 little-endian, in the order of the model's parameters."""

    offset: Count


class PullTokenizer(Wire, frozen=True, tag=True):
    """Give me the tokenizer file of this run (`daemon.run_files.tokenizers`)."""

    run: RunId


class PullProbe(Wire, frozen=True, tag=True):
    """Give me so many bytes of nothing: I measure the link (`daemon.links.probing`)."""

    size_bytes: Probed


class PushProbe(Wire, frozen=True, tag=True):
    """Take so many bytes and forget them."""

    size_bytes: Probed


class UpdateHeader(Wire, frozen=True, tag=True):
    """Header of an outer update's stream."""

    version: SignedVersion
    offset: Count = 0
    """The payload begins there: what comes before is with the asker."""
    total: Count = 0
    """Size of the whole update; more than offset and payload: this is a part, the rest is still on its way to
    whoever serves it. 0: no part."""
    waited_ms: Annotated[int, Meta(ge=0, le=600_000)] = 0
    """So long it was not there yet to be served: that says nothing about the way to whoever serves it."""


class StateHeader(Wire, frozen=True, tag=True):
    """Header of a stream of a state, or of a piece of it: Theta, then outer momentum, fp32 little-endian."""

    version: SignedVersion
    watermarks: Annotated[tuple[Watermark, ...], Meta(max_length=MAX_WATERMARKS)]
    offset: Count = 0


class Refused(Wire, frozen=True, tag=True):
    """Why a pull is not served."""

    reason: Text


class Elsewhere(Wire, frozen=True, tag=True):
    """A pull of an update is not served here: these have it, or are getting it."""

    version: Digest
    """Of the version whose update it is."""
    patience_ms: Annotated[int, Meta(ge=0, le=600_000)]
    """After so long without all of it, come back and insist."""
    peers: Annotated[tuple[PeerId, ...], Meta(max_length=MAX_NAMED)]


class RunsQuery(Wire, frozen=True, tag=True):
    """Which runs do you know?"""


class StatusQuery(Wire, frozen=True, tag=True):
    """How is this run doing?"""

    run: RunId


class ReachQuery(Wire, frozen=True, tag=True):
    """Can you dial me at these ports, where you see me?"""

    ports: Annotated[tuple[Port, ...], Meta(min_length=1, max_length=MAX_PORTS)]


class ReachAnswer(Wire, frozen=True, tag=True):
    """Answer to `ReachQuery`."""

    reached: Annotated[tuple[tuple[Ip, Port], ...], Meta(max_length=MAX_PORTS * MAX_PORTS)]
    """Where it proved to be itself."""


class RunSummary(Wire, frozen=True):
    """A run as it is listed."""

    run: RunId
    name: Annotated[str, Meta(max_length=63)]
    owner: PeerId


class RunList(Wire, frozen=True, tag=True):
    """Answer to `RunsQuery`; also the record on the DHT."""

    runs: Annotated[tuple[RunSummary, ...], Meta(max_length=MAX_RUNS)]


class HeldoutLoss(Wire, frozen=True):
    """Held-out loss of the global parameters that a member has measured."""

    merges: Count
    """Versions of all fragments together that they were made of, at most."""
    loss: Annotated[float, Meta(ge=-1e30, le=1e30)]
    tokens: Count
    """Held-out ones that it is a mean over."""


class Presence(Wire, frozen=True, tag=True):
    """A member's record on the DHT, under its run's key."""

    wire_version: Count
    incarnation: Count
    name: Annotated[str, Meta(max_length=63)]
    addresses: Annotated[tuple[Annotated[str, Meta(max_length=256)], ...], Meta(max_length=16)]
    dialable: bool = True
    """False: others need not try for long. It dials them."""
    heldout: HeldoutLoss | None = None
    """The newest that it has measured itself."""


class Reading(Wire, frozen=True, tag=True):
    """A member's record on the DHT of what of the run's data is begun (`learner.reading.shards`)."""

    data: Annotated[str, Meta(max_length=64)]
    epoch: Annotated[int, Meta(ge=0, le=MAX_EPOCH)]
    taken: Annotated[bytes, Meta(max_length=MAX_SHARDS // 8)]


Push = PushContribution | PushPartial
Pull = PullUpdate | PullState | PullManifest | PullInitial | PullTokenizer | PullProbe
Query = RunsQuery | StatusQuery | ReachQuery
T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


def encode(value: Wire) -> bytes:
    """The wire bytes of a header, query or record."""
    return _encoder.encode(value)


def decode(data: bytes, expected: type[T]) -> T:
    """Strictly decode one of the types above (or a union of them).

    Raises:
        RemoteError: "garbage".
    """
    try:
        return msgspec.msgpack.decode(data, type=expected)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise RemoteError("garbage", str(error)[:120]) from error


def members_key(run: str) -> str:
    """DHT key of a run's presence records."""
    return f"p2pdiloco/{run}/members"


def reading_key(run: str) -> str:
    """DHT key of what the members of a run read."""
    return f"p2pdiloco/{run}/reading"


RUNS_KEY = "p2pdiloco/runs"
"""DHT key of the list of runs; every member and bootstrap has a record under it."""


def message(run: str, content: Message) -> bytes:
    """A core message as a control payload."""
    return MESSAGE + encode_message(run, content)


def refuse(reason: str) -> Refusal:
    """A pull's refusal, encoded."""
    return Refusal(encode(Refused(reason)))
