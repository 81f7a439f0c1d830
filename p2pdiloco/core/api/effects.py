"""What the core wants done: the outputs of `core.node.Core.handle`, in order.

The environment (daemon or simulator) carries them out and answers with events. An effect that must
wait for durability is inside a `Persist`'s `then`, never beside it.
"""

from __future__ import annotations

from msgspec import Struct

from p2pdiloco.core.api.messages import Message
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import (
    WHOLE_RUN,
    Contributor,
    SignedOffer,
    SignedVersion,
    Stamp,
    Ticket,
    Watermark,
)


class Effect(Struct, frozen=True):
    """Base of all outputs."""


class Send(Effect, frozen=True):
    """Deliver a control message; on failure `SendFailed(peer)`. May be dropped, delayed, repeated."""

    peer: str
    message: Message


# --- durable -----------------------------------------------------------------------------------------


class VoteRecord(Struct, frozen=True):
    """To be remembered for ever: in this term of this fragment our vote went to this candidate."""

    fragment: int
    term: int
    candidate: str
    group: str = WHOLE_RUN


class UpdateRecord(Struct, frozen=True):
    """To be remembered while it is in the log: an outer update that we are about to announce."""

    version: SignedVersion
    ticket: Ticket


class Persist(Effect, frozen=True):
    """Make a record durable, carry out `then`, and answer `Persisted(token)` (or `PersistFailed`)."""

    token: int
    record: VoteRecord | UpdateRecord
    then: tuple[Effect, ...]


# --- contributions: learner side ----------------------------------------------------------------------


class RequestFragment(Effect, frozen=True):
    """Ask the learner to copy this fragment out now, or at its next step boundary (a closing call).

    Answered by `ContributionReady` with due false, or `NothingToContribute`."""

    fragment: int


class Offer(Effect, frozen=True):
    """Stream a contribution to the syncer, or our group's partial to the syncer of the group above:
    `OfferAnswered` or `OfferUndelivered`. The receiver hears `Offered`, and answers with `AcceptTransfer`
    and `AnswerTransfer`."""

    peer: str
    signed: SignedOffer
    ticket: Ticket
    attempt: int = 0
    """Of the merge that made a partial."""


class DiscardContribution(Effect, frozen=True):
    """Our contribution's payload is no longer needed (merged beyond doubt)."""

    fragment: int
    ticket: Ticket


class Spill(Effect, frozen=True):
    """A merged contribution is kept for the unlikely case: its payload may go to the disk. The ticket stays
    valid; where the disk refuses, the payload stays in memory."""

    fragment: int
    ticket: Ticket


class Combine(Effect, frozen=True):
    """Add these contributions of ours up to one and encode it as a contribution (of one: a copy). The
    tickets stay valid. Answered by `Combined` or `CombineFailed` with the same (fragment, attempt)."""

    fragment: int
    attempt: int
    tickets: tuple[Ticket, ...]


class RetireSlot(Effect, frozen=True):
    """The learner's copy of its last contribution of this fragment will never be merged as it stands:
    free the slot and leave counters alone, so that the work is in the next contribution."""

    fragment: int
    ticket: Ticket


# --- contributions: syncer side -----------------------------------------------------------------------


class AcceptTransfer(Effect, frozen=True):
    """Read the payload of an offer; `PayloadReceived` or `PayloadBroken`."""

    transfer: int
    fragment: int
    payload_bytes: int


class AnswerTransfer(Effect, frozen=True):
    """The last word on an offer, to its sender, with our head. Before its payload: that is not read."""

    transfer: int
    fragment: int
    verdict: Verdict


Decision = AcceptTransfer | AnswerTransfer
"""The core's word on what a peer pushes: on the offer, and in the end. There is none by default: an
environment that is left without one has found a bug of ours."""


class Release(Effect, frozen=True):
    """A received contribution or fetched update is no longer needed."""

    ticket: Ticket


class MergeInput(Struct, frozen=True):
    """One contribution of a merge, with its paper weight tokens^2 / inner steps computed by the worker."""

    contributor: Contributor
    ticket: Ticket


class Merge(Effect, frozen=True):
    """Merge in this order, encode the outer update, make the outer step into the spare copy.

    Answered by `Merged` or `MergeFailed` with the same (fragment, term, number)."""

    fragment: int
    term: int
    number: int
    inputs: tuple[MergeInput, ...]
    partials: tuple[Ticket, ...]
    """Partial merges of groups, added after the inputs, as if their contributions were inputs."""
    longest_steps: int
    """Inner steps of the longest of all these contributions, those of the groups too."""


class MergePartial(Effect, frozen=True):
    """Merge contributions and partials of one group, in this order, into one partial: sums, no outer step,
    no spare copy. Answered by `PartialMerged` or `PartialFailed` with the same (fragment, group, attempt)."""

    fragment: int
    group: str
    attempt: int
    inputs: tuple[MergeInput, ...]
    partials: tuple[Ticket, ...]


# --- updates and states ------------------------------------------------------------------------------


class FetchUpdate(Effect, frozen=True):
    """Pull version `number` from a peer's log: `UpdateFetched` or `FetchFailed`."""

    fragment: int
    number: int
    peer: str


class FetchState(Effect, frozen=True):
    """Pull a fragment's newest state, at least version `number`, into the spare copy:
    `StateFetched` or `FetchFailed`."""

    fragment: int
    number: int
    peer: str


class ApplyUpdate(Effect, frozen=True):
    """Make the outer step of a fetched update into the spare copy: `UpdateApplied`."""

    fragment: int
    number: int
    ticket: Ticket
    longest_steps: int
    """As its header says (`VersionHeader.longest_steps`)."""


class DropSpare(Effect, frozen=True):
    """What was prepared in the spare copy of this fragment is not wanted."""

    fragment: int


class CommitVersion(Effect, frozen=True):
    """The spare copy becomes the fragment's state: it is this version now.

    The learner is told: if `merged_ticket` is set, that contribution of its own is in the version,
    else it rebases (design 5.2, 6). `update` is kept in the log unless None (a fetched state)."""

    version: SignedVersion
    update: Ticket | None
    merged_ticket: Ticket | None
    watermarks: tuple[Watermark, ...]
    """The fragment's complete watermarks after this version."""
    after: Stamp
    """Our own last merged stamp in this chain."""
    overwrite: bool
    """The learner's unmerged displacement is in the chain already: take the parameters as they are."""


# --- records -----------------------------------------------------------------------------------------


class Record(Effect, frozen=True):
    """A line for people: events.jsonl, status and live view. `kind` and the keys of `fields` are documented
    in docs/events.md."""

    kind: str
    fragment: int | None
    reason: str
    fields: tuple[tuple[str, str | int | float | bool | None], ...] = ()


class Left(Effect, frozen=True):
    """Leaving is complete: the node may stop."""
