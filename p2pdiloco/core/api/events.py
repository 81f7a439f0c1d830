"""Inputs and outputs of the core: events that can happen to a node, and effects that the core wants done.

`core.node.Core.handle` takes an event and returns effects. The environment (daemon or simulator) carries them
out. It says once what came of an effect inside an `Ask`, by `Answered` with the same token: the core knows by
that what it was for, and drops what the world has moved past. An effect that must wait for durability is
inside a `Persist`'s `then`, never beside it.
"""

from __future__ import annotations

from msgspec import Struct

from p2pdiloco.core.api.evidence import Evidence
from p2pdiloco.core.api.messages import Message
from p2pdiloco.core.api.papers import Paper
from p2pdiloco.core.api.reasons import AuditOutcome, CastOutWhy, FetchFailure, Verdict
from p2pdiloco.core.api.types import (
    NO_LIMITS,
    UNMEASURED,
    WHOLE_RUN,
    Contributor,
    Head,
    MergeLimits,
    Reach,
    Stamp,
    Ticket,
    Vouch,
    Watermark,
)
from p2pdiloco.core.api.versions import Mean, MemberList, PartOfTree, SignedOffer, SignedVersion


class Effect(Struct, frozen=True):
    """Base of all outputs."""


class Ask(Effect, frozen=True):
    """Carry out an effect, and answer once with what came of it: `Answered(token, answer)`. Each such effect
    says what its answers are."""

    token: int
    effect: Effect


class CutShort(Effect, frozen=True):
    """End an asked effect that fetches an update. It is answered all the same: `FetchFailed` (SLOW), if what
    came of it was not on its way."""

    token: int


class Undone(Struct, frozen=True):
    """Answer: nothing came of it."""

    reason: str
    unusable: tuple[tuple[Ticket, Verdict], ...] = ()
    """Inputs because of which a merge failed, each with its fault; the others can be merged. Empty: it failed
    for reasons of ours."""


class Send(Effect, frozen=True):
    """Deliver a control message; on failure `SendFailed(peer)`. May be dropped, delayed, repeated."""

    peer: str
    message: Message


# --- durable -----------------------------------------------------------------------------------------


class VoteRecord(Struct, frozen=True):
    """Vote to be remembered for ever: in this term of this fragment ours went to this candidate. Of what we
    attested (`MILESTONES`), the term is the target's number, and the candidate the digest of the link."""

    fragment: int
    term: int
    candidate: str
    group: str = WHOLE_RUN
    source: int = 0
    """Number of the source that we attested."""


MILESTONES = "milestones"
"""Group of the votes that are attestations (`core.finality`)."""


class UpdateRecord(Struct, frozen=True):
    """Outer update that we are about to announce; to be remembered while it is in the log."""

    version: SignedVersion
    ticket: Ticket


class Persist(Effect, frozen=True):
    """Make a record durable, and carry out `then`. Answers: None; `Undone` (the disk is full, or gone, and
    nothing of `then` was carried out)."""

    record: VoteRecord | UpdateRecord
    then: tuple[Effect, ...]


class KeepProofs(Effect, frozen=True):
    """Save these proofs, and statements of our own, in the place of those before, soon. Where that fails,
    others tell them again."""

    proofs: tuple[Evidence, ...]


# --- contributions: learner side ----------------------------------------------------------------------


class RequestFragment(Effect, frozen=True):
    """Ask the learner to copy this fragment out now, or at its next step boundary (a closing call).

    Answered by `ContributionReady` with due false, or `NothingToContribute`."""

    fragment: int


class Offer(Effect, frozen=True):
    """Stream a contribution to the syncer, or our group's partial merge to the syncer of the group above.

    Answers: `OfferAnswered`; `Undone` (the stream broke, or the peer could not be reached). The receiver's
    core gets `Offered`, and decides with `AcceptTransfer` and `AnswerTransfer`.
    """

    peer: str
    signed: SignedOffer
    ticket: Ticket


class OfferAnswered(Struct, frozen=True):
    """Last word of the receiver on what we offered."""

    verdict: Verdict
    head: Head | None
    """Newest version of the receiver."""


class DiscardContribution(Effect, frozen=True):
    """Drop the payload of a contribution of ours: it is merged beyond doubt."""

    fragment: int
    ticket: Ticket


class Spill(Effect, frozen=True):
    """Permit the disk to take the payload of a merged contribution, which is kept for the unlikely case of a
    fork. The ticket stays valid; where the disk refuses, the payload stays in memory."""

    fragment: int
    ticket: Ticket


class Combine(Effect, frozen=True):
    """Add these contributions of ours up to one and encode it as a contribution (of one: a copy). The
    tickets stay valid. Answers: `Combined`; `Undone` (one of the payloads cannot be read back)."""

    fragment: int
    tickets: tuple[Ticket, ...]


class Combined(Struct, frozen=True):
    """Sum of several contributions of ours, encoded, in a new ticket."""

    ticket: Ticket
    payload_digest: bytes
    payload_bytes: int


class RetireSlot(Effect, frozen=True):
    """Free the learner's slot: its last contribution of this fragment will never be merged as it stands.
    Counters stay, so that the work is in the next contribution."""

    fragment: int
    ticket: Ticket


# --- contributions: syncer side -----------------------------------------------------------------------


class AcceptTransfer(Effect, frozen=True):
    """Read the payload of an offer; `PayloadReceived` or `PayloadBroken`."""

    transfer: int
    fragment: int
    payload_bytes: int


class AnswerTransfer(Effect, frozen=True):
    """Answer an offer for the last time, with our head. If its payload was not read yet, it never is."""

    transfer: int
    fragment: int
    verdict: Verdict


Decision = AcceptTransfer | AnswerTransfer
"""Word of the core on what a peer pushes: on the offer, and at the end. There is none by default: an
environment that is left without one has found a bug of ours."""


class Release(Effect, frozen=True):
    """Free a received contribution or fetched update."""

    ticket: Ticket


class MergeInput(Struct, frozen=True):
    """Contribution of a merge; the worker computes its weight, tokens^2 / inner steps as in the paper, times
    its trust weight."""

    contributor: Contributor
    ticket: Ticket
    mean: Mean = Mean()
    """Agreement of its learner so far."""


class PartialInput(Struct, frozen=True):
    """Partial merge of a merge."""

    ticket: Ticket
    payload_digest: bytes


class Merge(Effect, frozen=True):
    """Merge in this order, encode the outer update, make the outer step into the spare copy.

    Answers: `Merged`; `Undone`."""

    fragment: int
    number: int
    inputs: tuple[MergeInput, ...]
    partials: tuple[PartialInput, ...]
    """Partial merges of groups, added after the inputs as if their contributions were inputs."""
    longest_steps: int
    """Inner steps of the longest of all these contributions, those of the groups too."""
    limits: MergeLimits = NO_LIMITS
    seed: bytes = b""
    """Seed by which the sample is drawn on which contributions are compared."""
    repairs: SignedVersion | None = None
    """False version whose true update was made again here: that is added to the merge, and the false one
    subtracted, if both are still here. `Merged` says whether."""


class Measured(Struct, frozen=True):
    """Findings of a merge about one of its contributions."""

    length: float
    """Length (L2) before it was cut."""
    score: int = UNMEASURED
    """Agreement with the others (`tensors.merge`)."""


class Merged(Struct, frozen=True):
    """Result of a merge: update encoded, outer step made into the spare copy."""

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
    """Findings about its inputs, in their order; empty: nothing was measured."""
    repaired: bool = False
    """True: what was to be repaired is."""


class MergePartial(Effect, frozen=True):
    """Merge contributions and partials of one group, in this order, into one partial: sums, no outer step,
    no spare copy. Answers: `PartialMerged`; `Undone`."""

    fragment: int
    inputs: tuple[MergeInput, ...]
    partials: tuple[PartialInput, ...]
    limits: MergeLimits = NO_LIMITS
    seed: bytes = b""
    """Seed, as of `Merge`."""


class PartialMerged(Struct, frozen=True):
    """Sum of our group's contributions."""

    ticket: Ticket
    payload_digest: bytes
    payload_bytes: int
    cut: tuple[str, ...] = ()
    """Learners whose contributions were cut, as they were too long."""
    measured: tuple[Measured, ...] = ()
    """Findings about its inputs, as of `Merged`."""


# --- updates and states ------------------------------------------------------------------------------


class FetchUpdate(Effect, frozen=True):
    """Pull version `number` from a peer's log. Answers: `UpdateFetched`; `FetchFailed`."""

    fragment: int
    number: int
    peer: str


class UpdateFetched(Struct, frozen=True):
    """Outer update that a holder gave us; the payload matches the header's update digest."""

    version: SignedVersion
    ticket: Ticket


class FetchState(Effect, frozen=True):
    """Pull a fragment's newest state, at least version `number`, into the spare copy. Answers:
    `StateFetched`; `FetchFailed`."""

    fragment: int
    number: int
    peer: str


class StateFetched(Struct, frozen=True):
    """Whole fragment that a donor gave us; it is in the spare copy and matches `version`'s state digest."""

    version: SignedVersion
    watermarks: tuple[Watermark, ...]


class TryStates(Effect, frozen=True):
    """Measure on this node's held-out data whether what is in the spare copies of these fragments is worse
    than its own states, all together. Answers: `Tried`; `Undone` (nothing can be measured here)."""

    fragments: tuple[int, ...]


class Tried(Struct, frozen=True):
    """Outcome of `TryStates`."""

    passed: bool
    """True: they are no worse than ours."""
    words: str
    """Losses, for people."""


class FetchFailed(Struct, frozen=True):
    """Failure of a holder to give what `FetchUpdate` or `FetchState` asked for."""

    failure: FetchFailure
    detail: str = ""
    """Fault found in the answer, in a word."""


class ApplyUpdate(Effect, frozen=True):
    """Make the outer step of a fetched update into the spare copy. Answer: `UpdateApplied`."""

    fragment: int
    number: int
    ticket: Ticket
    longest_steps: int
    """Inner steps of its longest contribution (`VersionHeader.longest_steps`)."""
    norm: float | None = None
    """Length that its syncer states; None: not to be compared."""
    own: Ticket | None = None
    """Contribution of ours that is in it, to be compared with the update; None: there is none."""
    stated: bytes = b""
    """State digest that the header states; with another result all is looked at again
    (`UpdateApplied.certain`). Empty: it is not compared."""
    update_digest: bytes = b""
    """Digest of the update."""


class UpdateApplied(Struct, frozen=True):
    """Digest of the state in the spare copy after that step."""

    state_digest: bytes
    unsound: bool = False
    """True: there is no step to make, since the update is no update, or not as long as its syncer states."""
    cosine: float | None = None
    """Cosine of our own contribution with the update; None: it was not asked for, or cannot be told."""
    certain: bool = False
    """True: the digest is not the stated one, by no fault of ours. State and update have their own digests
    still, this machine calculates as others do, and a second step had the same result."""


class Audit(Effect, frozen=True):
    """Get the contributions that a version names, from their learners or else from its syncer, merge them
    again by the limits and trust weights that it states, and compare the update. Answer: `Audited`.

    Or do so with the partial merge of one of its groups. Neither state nor spare is touched. Of versions with
    a dense codec."""

    fragment: int
    version: SignedVersion
    givers: tuple[str, ...] = ()
    """Members that may have its contributions, too: they made the merge again, and say that it is false."""
    repairs: SignedVersion | None = None
    """Version that it repairs, by the true update that is kept here (or else missing), and the false one."""
    part: PartOfTree | None = None
    """Partial merge that is made again; None: the version is."""
    below: tuple[PartOfTree, ...] = ()
    """Partial merges that were added up for it, in that order; none: contributions were."""


class Audited(Struct, frozen=True):
    """Outcome of an `Audit`."""

    outcome: AuditOutcome
    remade: bool = False
    """True: the update is another one, and the true one is kept here."""
    withheld: bool = False
    """True: its syncer, which had time and is connected, did not give what it merged."""


class LossAudit(Effect, frozen=True):
    """Get a learner's contribution to a version, and let our learner measure what it does to the loss, and
    what ours does. Answer: `LossAudited`."""

    fragment: int
    version: SignedVersion
    theirs: Contributor
    ours: Contributor


class LossAudited(Struct, frozen=True):
    """Outcome of a `LossAudit`: by how much, in nats, each of the two contributions makes the loss of each
    batch smaller; empty: nothing was measured."""

    theirs: tuple[float, ...] = ()
    ours: tuple[float, ...] = ()
    same_data: bool = False
    """True: one batch was of that learner's own share of the data that it and we read."""
    took_s: float = 0.0
    """Seconds in which our learner made no inner step."""


class DropSpare(Effect, frozen=True):
    """Discard what was prepared in the spare copy of this fragment."""

    fragment: int


class CommitVersion(Effect, frozen=True):
    """Make the spare copy the fragment's state: it is this version now.

    The learner is told. If `merged_ticket` is set, that contribution of its own is in the version; else it
    rebases (docs/protocol/exactly-once.md, section 4). `update` is kept in the log; None: the state was
    fetched.
    """

    version: SignedVersion
    update: Ticket | None
    merged_ticket: Ticket | None
    watermarks: tuple[Watermark, ...]
    """Complete watermarks of the fragment after this version."""
    after: Stamp
    """Stamp of our own last contribution that is merged in this chain."""
    overwrite: bool
    """True: the learner's unmerged displacement is in the chain already, so the parameters are taken as they
    are."""


# --- records -----------------------------------------------------------------------------------------


class Record(Effect, frozen=True):
    """Write a line for people: events.jsonl, status and live view. docs/reference/events.md describes `kind`
    and the keys of `fields`."""

    kind: str
    fragment: int | None
    reason: str
    fields: tuple[tuple[str, str | int | float | bool | None], ...] = ()


class Confirmed(Effect, frozen=True):
    """The node is a full member from now on: its learner may begin. Comes once."""


class CastOut(Effect, frozen=True):
    """Report that there is a proof against this node itself: it may not go on under its identity."""

    words: str
    """Words on what it did, for people."""
    why: CastOutWhy
    """Cause that this may have; its text is the advice for people."""


class Left(Effect, frozen=True):
    """Report that leaving is complete: the node may stop."""


class Event(Struct, frozen=True):
    """Base of all inputs."""


class Answered(Event, frozen=True):
    """Answer to the `Ask` of that token; None: it is done, and there is nothing to tell."""

    token: int
    answer: Struct | None


class Tick(Event, frozen=True):
    """Time has passed; sent when `next_deadline()` is reached."""


# --- peers -------------------------------------------------------------------------------------------


class PresenceSeen(Event, frozen=True):
    """Members whose unexpired presence records the DHT holds (self may be among them)."""

    members: MemberList
    """Listed members with their incarnations. One object may serve many readers."""
    unreached: int = 0
    """Number of further listed members that could not be dialled yet."""


class Guided(Event, frozen=True):
    """Word on whom a node with nothing is to believe; it replaces what was said before."""

    anchors: tuple[str, ...] = ()
    """Members that the node's person named to join through."""
    vouches: tuple[Vouch, ...] = ()
    """Versions and members that the run's owner vouched for."""
    papers: tuple[Paper, ...] = ()
    """Papers on seats that this node holds; they are added to those told before."""


class SayWord(Event, frozen=True):
    """Wish of this node's person: it says as a deputy, or of itself, that a peer has a seat or has none."""

    peer: str
    seated: bool
    replaces: str = ""


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


class NothingToContribute(Event, frozen=True):
    """Answer to `RequestFragment`: the learner has made no inner step since its last contribution."""

    fragment: int


class ContributionSent(Event, frozen=True):
    """Notice that the end of a payload of ours goes out now. The peer may have all of it from here on,
    whatever we hear."""

    fragment: int
    stamp: Stamp


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


# --- life --------------------------------------------------------------------------------------------


class LeaveRequested(Event, frozen=True):
    """Operator's wish that this node leave: finish what is in flight, hand over, say good-bye."""
