"""What can happen to a node: the inputs of `core.node.Core.handle`.

Everything that completes later carries the (fragment, term, number) or stamp in which it was started,
so that the core can drop what the world has moved past.
"""

from __future__ import annotations

from msgspec import Struct

from p2pdiloco.core.api.effects import Offer
from p2pdiloco.core.api.grouping import Roster
from p2pdiloco.core.api.messages import Message
from p2pdiloco.core.api.reach import Reach
from p2pdiloco.core.api.reasons import FetchFailure, Verdict
from p2pdiloco.core.api.types import (
    Head,
    SignedOffer,
    SignedVersion,
    Stamp,
    Ticket,
    Watermark,
)


class Event(Struct, frozen=True):
    """Base of all inputs."""


class Tick(Event, frozen=True):
    """Time passed; sent when `next_deadline()` is reached."""


# --- peers -------------------------------------------------------------------------------------------


class PresenceSeen(Event, frozen=True):
    """The members whose unexpired presence records the DHT holds (self may be among them)."""

    members: Roster
    """With their incarnations. One object may serve many readers."""
    unreached: int = 0
    """How many more are listed that could not be dialled yet."""


class MessageReceived(Event, frozen=True):
    """A decoded control message from an authenticated peer."""

    sender: str
    message: Message


class SendFailed(Event, frozen=True):
    """A control message could not be delivered: the peer is unreachable at this moment."""

    peer: str


class ReachChanged(Event, frozen=True):
    """How others can reach us, as peers told us."""

    reach: Reach


class UplinkMeasured(Event, frozen=True):
    """What our uplink carries, or is permitted to; infinite: not known."""

    bits_per_s: float


# --- contributions: learner side ----------------------------------------------------------------------


class ContributionReady(Event, frozen=True):
    """The learner copied a fragment out and it has been encoded: it may go to the syncer."""

    fragment: int
    ticket: Ticket
    tokens: int
    inner_steps: int
    payload_digest: bytes
    payload_bytes: int
    due: bool


class Combined(Event, frozen=True):
    """The sum of several contributions of ours, encoded, in a new ticket."""

    fragment: int
    attempt: int
    ticket: Ticket
    payload_digest: bytes
    payload_bytes: int


class CombineFailed(Event, frozen=True):
    """One of the payloads cannot be read back."""

    fragment: int
    attempt: int
    reason: str


class NothingToContribute(Event, frozen=True):
    """Answer to `RequestFragment`: the learner has made no inner step since its last contribution."""

    fragment: int


class OfferAnswered(Event, frozen=True):
    """The receiver's last word on a contribution or partial that we sent."""

    offer: Offer
    verdict: Verdict
    head: Head | None
    """The receiver's."""


class ContributionSent(Event, frozen=True):
    """The end of a payload of ours goes out now: whatever we hear, the peer may have all of it."""

    fragment: int
    stamp: Stamp


class OfferUndelivered(Event, frozen=True):
    """The stream of a contribution or partial of ours broke, or the peer could not be reached."""

    offer: Offer


class LearnerApplied(Event, frozen=True):
    """The learner's parameters of this fragment are now measured against this version."""

    fragment: int
    number: int
    inner_step: int


class LearnerStatus(Event, frozen=True):
    """Where the learner is. `running` false: it crashed or has not started yet."""

    running: bool
    inner_step: int
    tokens_total: int
    tokens_per_s: float
    step_time_s: float
    loss: float | None


class LearnerLost(Event, frozen=True):
    """The learner process died: its unsent work is gone, contributions already copied out are not."""


# --- contributions: syncer side -----------------------------------------------------------------------


class Offered(Event, frozen=True):
    """A learner wants to stream a contribution to us, or the syncer of a group below its partial merge; only
    the header has been read. After `AcceptTransfer`: `PayloadReceived` or `PayloadBroken`."""

    transfer: int
    sender: str
    signed: SignedOffer


class PayloadReceived(Event, frozen=True):
    """The payload of an accepted transfer is here, its digest and content are sound."""

    transfer: int
    ticket: Ticket


class PayloadBroken(Event, frozen=True):
    """An accepted transfer ended without a sound payload, and why."""

    transfer: int
    verdict: Verdict


class PartialMerged(Event, frozen=True):
    """The merge worker added up our group's contributions."""

    fragment: int
    group: str
    attempt: int
    ticket: Ticket
    payload_digest: bytes
    payload_bytes: int


class PartialFailed(Event, frozen=True):
    """Nothing could be added up."""

    fragment: int
    group: str
    attempt: int
    reason: str


class Merged(Event, frozen=True):
    """The merge worker is done: update encoded, outer step made into the spare copy."""

    fragment: int
    term: int
    number: int
    ticket: Ticket
    """The encoded outer update."""
    update_digest: bytes
    update_bytes: int
    state_digest: bytes


class MergeFailed(Event, frozen=True):
    """Nothing could be merged (every contribution turned out unusable)."""

    fragment: int
    term: int
    number: int
    reason: str


class Persisted(Event, frozen=True):
    """A `Persist` effect is durable and its continuation has been carried out."""

    token: int


class PersistFailed(Event, frozen=True):
    """The disk refused (full, gone): the continuation was not carried out."""

    token: int
    reason: str


# --- updates and states ------------------------------------------------------------------------------


class UpdateFetched(Event, frozen=True):
    """A holder gave us an outer update; the payload matches the header's update digest."""

    fragment: int
    peer: str
    version: SignedVersion
    ticket: Ticket


class FetchFailed(Event, frozen=True):
    """A holder did not give what `FetchUpdate` or `FetchState` asked for."""

    fragment: int
    number: int
    peer: str
    failure: FetchFailure
    detail: str = ""
    """What was wrong with the answer, in a word."""


class UpdateApplied(Event, frozen=True):
    """The outer step of a fetched update was made into the spare copy; this is the resulting digest."""

    fragment: int
    number: int
    ticket: Ticket
    state_digest: bytes


class StateFetched(Event, frozen=True):
    """A donor gave us a whole fragment; it is in the spare copy and matches `version`'s state digest."""

    fragment: int
    peer: str
    version: SignedVersion
    watermarks: tuple[Watermark, ...]


# --- life --------------------------------------------------------------------------------------------


class LeaveRequested(Event, frozen=True):
    """The operator wants this node to leave: finish what is in flight, hand over, say good-bye."""
