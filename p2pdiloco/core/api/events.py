"""Inputs of the core: everything that can happen to a node.

`core.node.Core.handle` takes them. Whatever completes later carries the (fragment, term, number) or stamp in
which it was started, so that the core can drop what the world has moved past.
"""

from __future__ import annotations

from msgspec import Struct

from p2pdiloco.core.api.effects import Offer
from p2pdiloco.core.api.messages import Message
from p2pdiloco.core.api.reasons import AuditOutcome, FetchFailure, Verdict
from p2pdiloco.core.api.types import UNMEASURED, WHOLE_RUN, Head, Reach, Stamp, Ticket, Vouch, Watermark
from p2pdiloco.core.api.versions import Roster, SignedOffer, SignedVersion


class Event(Struct, frozen=True):
    """Base of all inputs."""


class Tick(Event, frozen=True):
    """Time has passed; sent when `next_deadline()` is reached."""


# --- peers -------------------------------------------------------------------------------------------


class PresenceSeen(Event, frozen=True):
    """Members whose unexpired presence records the DHT holds (self may be among them)."""

    members: Roster
    """Listed members with their incarnations. One object may serve many readers."""
    unreached: int = 0
    """Number of further listed members that could not be dialled yet."""


class Guided(Event, frozen=True):
    """Word on whom a node with nothing is to believe; it replaces what was said before."""

    anchors: tuple[str, ...] = ()
    """Members that the node's person named to join through."""
    vouches: tuple[Vouch, ...] = ()
    """Versions and members that the run's owner vouched for."""


class MessageReceived(Event, frozen=True):
    """Control message, decoded, from an authenticated peer."""

    sender: str
    message: Message


class SendFailed(Event, frozen=True):
    """Failure to deliver a control message: the peer is unreachable at this moment."""

    peer: str


class ReachChanged(Event, frozen=True):
    """Change of how others can reach us, as peers told us."""

    reach: Reach


class UplinkMeasured(Event, frozen=True):
    """Rate that our uplink carries, or is permitted to; infinite: not known."""

    bits_per_s: float


class Miscalculates(Event, frozen=True):
    """Finding that merges or outer steps of this machine have other bits than all others'."""


# --- contributions: learner side ----------------------------------------------------------------------


class ContributionReady(Event, frozen=True):
    """Fragment copied out by the learner, and encoded: it may go to the syncer."""

    fragment: int
    ticket: Ticket
    tokens: int
    inner_steps: int
    payload_digest: bytes
    payload_bytes: int
    due: bool
    length: float = 0.0
    """Length (L2) of the displacement; 0: not known."""


class Combined(Event, frozen=True):
    """Sum of several contributions of ours, encoded, in a new ticket."""

    fragment: int
    attempt: int
    ticket: Ticket
    payload_digest: bytes
    payload_bytes: int


class CombineFailed(Event, frozen=True):
    """Failure to add contributions up: one of the payloads cannot be read back."""

    fragment: int
    attempt: int
    reason: str


class NothingToContribute(Event, frozen=True):
    """Answer to `RequestFragment`: the learner has made no inner step since its last contribution."""

    fragment: int


class OfferAnswered(Event, frozen=True):
    """Last word of the receiver on a contribution or partial merge that we sent."""

    offer: Offer
    verdict: Verdict
    head: Head | None
    """Newest version of the receiver."""


class ContributionSent(Event, frozen=True):
    """Notice that the end of a payload of ours goes out now. The peer may have all of it from here on,
    whatever we hear."""

    fragment: int
    stamp: Stamp


class OfferUndelivered(Event, frozen=True):
    """Broken stream of a contribution or partial merge of ours, or a peer that could not be reached."""

    offer: Offer


class LearnerApplied(Event, frozen=True):
    """Notice that the learner's parameters of this fragment are now measured against this version."""

    fragment: int
    number: int
    inner_step: int


class LearnerStatus(Event, frozen=True):
    """Progress of the learner. `running` false: it crashed or has not started yet."""

    running: bool
    inner_step: int
    tokens_total: int
    tokens_per_s: float
    step_time_s: float
    loss: float | None


class LearnerLost(Event, frozen=True):
    """Death of the learner process. Its unsent work is gone; contributions already copied out are not."""


# --- contributions: syncer side -----------------------------------------------------------------------


class Offered(Event, frozen=True):
    """Wish of a peer to stream a contribution (a learner) or a partial merge (the syncer of a group below) to
    us.

    Only the header has been read. After `AcceptTransfer` comes `PayloadReceived` or `PayloadBroken`.
    """

    transfer: int
    sender: str
    signed: SignedOffer


class PayloadReceived(Event, frozen=True):
    """Payload of an accepted transfer, complete, with sound digest and content."""

    transfer: int
    ticket: Ticket


class PayloadBroken(Event, frozen=True):
    """End of an accepted transfer without a sound payload, and why."""

    transfer: int
    verdict: Verdict


class Measured(Struct, frozen=True):
    """Findings of a merge about one of its contributions."""

    length: float
    """Length (L2) before it was cut."""
    score: int = UNMEASURED
    """Agreement with the others (`tensors.merge`)."""


class PartialMerged(Event, frozen=True):
    """Sum of our group's contributions, made by the merge worker."""

    fragment: int
    group: str
    attempt: int
    ticket: Ticket
    payload_digest: bytes
    payload_bytes: int
    cut: tuple[str, ...] = ()
    """Learners whose contributions were cut, as they were too long."""
    measured: tuple[Measured, ...] = ()
    """Findings about its inputs, in their order; empty: nothing was measured."""


class PartialFailed(Event, frozen=True):
    """Failure of the merge worker: nothing was added up."""

    fragment: int
    group: str
    attempt: int
    reason: str
    unusable: tuple[tuple[Ticket, Verdict], ...] = ()
    """Inputs because of which it failed, each with its fault; the others can be merged. Empty: it failed for
    reasons of ours."""


class Merged(Event, frozen=True):
    """Result of the merge worker: update encoded, outer step made into the spare copy."""

    fragment: int
    term: int
    number: int
    ticket: Ticket
    """Encoded outer update."""
    update_digest: bytes
    update_bytes: int
    state_digest: bytes
    norm: float = 0.0
    """Length (L2) of the update."""
    cut: tuple[str, ...] = ()
    """Learners whose contributions were cut, as they were too long."""
    measured: tuple[Measured, ...] = ()
    """Findings about its inputs, as of `PartialMerged`."""
    repaired: bool = False
    """True: what was to be repaired is."""


class MergeFailed(Event, frozen=True):
    """Failure of the merge worker: no version was made."""

    fragment: int
    term: int
    number: int
    reason: str
    unusable: tuple[tuple[Ticket, Verdict], ...] = ()
    """Inputs because of which it failed, as of `PartialFailed`."""


class Persisted(Event, frozen=True):
    """Success of a `Persist` effect: durable, and its continuation carried out."""

    token: int


class PersistFailed(Event, frozen=True):
    """Refusal of the disk (full, gone): the continuation of a `Persist` was not carried out."""

    token: int
    reason: str


# --- updates and states ------------------------------------------------------------------------------


class UpdateFetched(Event, frozen=True):
    """Outer update that a holder gave us; the payload matches the header's update digest."""

    fragment: int
    peer: str
    version: SignedVersion
    ticket: Ticket


class FetchFailed(Event, frozen=True):
    """Failure of a holder to give what `FetchUpdate` or `FetchState` asked for."""

    fragment: int
    number: int
    peer: str
    failure: FetchFailure
    detail: str = ""
    """Fault found in the answer, in a word."""


class UpdateApplied(Event, frozen=True):
    """Outer step of a fetched update, made into the spare copy, with the resulting digest."""

    fragment: int
    number: int
    ticket: Ticket
    state_digest: bytes
    unsound: bool = False
    """True: there is no step to make, since the update is no update, or not as long as its syncer states."""
    cosine: float | None = None
    """Cosine of our own contribution with the update; None: it was not asked for, or cannot be told."""
    certain: bool = False
    """True: the digest is not the stated one, by no fault of ours. State and update have their own digests
    still, this machine calculates as others do, and a second step had the same result."""


class Audited(Event, frozen=True):
    """Outcome of an `Audit`."""

    fragment: int
    number: int
    digest: bytes
    """Digest of the version's header."""
    outcome: AuditOutcome
    remade: bool = False
    """True: the update is another one, and the true one is kept here."""
    group: str = WHOLE_RUN
    """Group whose partial merge was audited; `WHOLE_RUN`: the version was."""
    withheld: bool = False
    """True: its syncer, which had time and is connected, did not give what it merged."""


class LossAudited(Event, frozen=True):
    """Outcome of a `LossAudit`: by how much, in nats, each of the two contributions makes the loss of each
    batch smaller; empty: nothing was measured."""

    fragment: int
    digest: bytes
    """Digest of the version's header."""
    theirs: tuple[float, ...] = ()
    ours: tuple[float, ...] = ()
    same_data: bool = False
    """True: one batch was of that learner's own share of the data that it and we read."""
    took_s: float = 0.0
    """Seconds in which our learner made no inner step."""


class StateFetched(Event, frozen=True):
    """Whole fragment that a donor gave us; it is in the spare copy and matches `version`'s state digest."""

    fragment: int
    peer: str
    version: SignedVersion
    watermarks: tuple[Watermark, ...]


# --- life --------------------------------------------------------------------------------------------


class LeaveRequested(Event, frozen=True):
    """Operator's wish that this node leave: finish what is in flight, hand over, say good-bye."""
