"""How a closed round becomes a version: its `Job` goes to a `Merger`, the `Publisher` in the topmost group, a
delegate in all others.

Rules: docs/protocol/rounds.md, section 6; docs/protocol/weights.md, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from p2pdiloco.core.api.events import (
    DropSpare,
    Effect,
    Measured,
    Merge,
    Merged,
    MergeInput,
    PartialInput,
    Persist,
    Release,
    Send,
    Undone,
    UpdateRecord,
)
from p2pdiloco.core.api.messages import Announce, Closing, Pass
from p2pdiloco.core.api.papers import Paper
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import (
    WHOLE_RUN,
    Certificate,
    ContributionHeader,
    Contributor,
    Ticket,
)
from p2pdiloco.core.api.versions import (
    MergedPartial,
    SignedPartial,
    SignedVersion,
    VersionHeader,
    in_a_version,
    sample_seed,
)
from p2pdiloco.core.chain import Marks, limits_after, plan_after, scale_after
from p2pdiloco.core.context import FragmentContext, Tenure
from p2pdiloco.core.contributions import ContributionQueue, commit_effect
from p2pdiloco.core.inbox import Held, Unusable


class ClosedRound(Protocol):
    """Round that hears what becomes of its job (`Round`)."""

    def awaits(self, term: int, number: int) -> bool:
        """Tell whether this merge is still wanted."""

    def merge_done(self) -> None:
        """Note that the merge worker is done."""

    def published(self, sync_s: float | None) -> None:
        """Note that what was merged is in the chain, `sync_s` after the round closed."""

    def failed(self, reason: str, now: float, unusable: Unusable = ()) -> None:
        """Hand over again without what was unusable; or lay the office down: nothing could be merged, for
        reasons of ours, or it could not be kept."""


@dataclass(frozen=True)
class Job:
    """Inputs of one merge, as a closed round hands them over."""

    round: ClosedRound
    group: str
    term: int
    number: int
    """Number of the version for which it is meant."""
    held: tuple[Held, ...]
    due: bool
    """True: it began with what was due, not with a call from above."""
    closed_s: float


class Merger(Protocol):
    """Merger of a closed round: the publisher of versions, or the delegate that sends a partial merge up."""

    makes_version: bool
    """True: the version is made here, and the fragment's spare copy is needed."""

    def begin(self, job: Job, missing: int, expected: int) -> None:
        """Merge what is in."""

    def withdraw(self, now: float) -> bool:
        """Forget what was not finished: the office is lost. False: it cannot be stopped any more."""

    def chain_moved(self, now: float) -> None:
        """Take in that the chain has a new head."""


class Hierarchy(Protocol):
    """Posts of this node above and below a level (`Posts`). Level 0: the leaf group."""

    def call_own(self, level: int, call: Closing, now: float) -> None:
        """Call this node as a child of its own group on that level: its learner, or the group below."""

    def pass_up(self, peer: str, message: Pass, now: float) -> None:
        """Tell the syncer above that a group has nothing."""

    def office_above(self, level: int) -> Tenure | None:
        """Find the office of the group above that level, if we have a seat there."""

    def hand_up(self, level: int, signed: SignedPartial, ticket: Ticket, now: float) -> Verdict:
        """Put that level's partial into our own inbox of the group above."""

    def take_back(self, level: int, group: str) -> None:
        """Take that group's partial out of our own inbox of the group above, if it is there. It is not to be
        merged, unless that has begun."""


class Publisher:
    """Maker of one fragment's versions: merges, signs, makes durable, and only then announces.

    Done by the syncer of the topmost group, which is the only one while the run fits into one group. Merging
    happens in `daemon.driver.Merging`. What comes of it is dropped if the chain or the office moved on
    (docs/protocol/rounds.md, section 6).

    Args:
        on_published: called once the chain has a version of ours more.
    """

    makes_version = True

    def __init__(
        self, context: FragmentContext, own: ContributionQueue, on_published: Callable[[float], None]
    ) -> None:
        self._context = context
        self._shared = context.shared
        self._fragment = context.index
        self._chain = context.chain
        self._own = own
        self._on_published = on_published
        self._term = 0
        self._parents: set[bytes] = set()
        """Parents of which we signed a version in this term: never another one."""

    def begin(self, job: Job, missing: int, expected: int) -> None:
        """Merge what is in, and make the outer step into the spare copy. Where we went over to another chain,
        its head may be of a term that ours does not follow. Or we have signed a version of it already: others
        have that, and a second one in the same term would be a lie."""
        head = self._chain.header
        if job.term < head.term or (job.term == head.term and head.syncer != self._shared.me):
            job.round.failed("our chain has a version of a later term", now=job.closed_s)
            return
        if job.term == self._term and self._chain.head.digest in self._parents:
            job.round.failed("this parent has a version of ours in this term", now=job.closed_s)
            return
        self._context.spare.take()
        making = MergedParts(job, self._chain.marks)
        parts = making.listed()
        grouped = self._context.grouped
        reason = f"{len(job.held)} of {expected} " + ("groups" if grouped else "live learners")
        if missing:
            reason += ", grace is over"
        self._shared.out.record(
            "merge",
            self._fragment,
            reason,
            number=job.number,
            contributors=len(parts),
            live=len(parts) if grouped else expected,
            tokens=sum(part.tokens for part in parts),
        )
        longest_steps = max((part.inner_steps for part in parts), default=0)
        limits = limits_after(self._chain, self._shared.config, [part.learner for part in parts])
        apart = grouped or making.partials
        repairs = None if apart else self._context.repairs.next()
        merge = Merge(
            self._fragment,
            job.number,
            making.inputs,
            making.partials,
            longest_steps,
            limits,
            making.seed(),
            repairs,
        )
        self._shared.out.ask(merge, partial(self._merged, job, making, repairs), self._fragment)

    def withdraw(self, now: float) -> bool:
        """Answer that nothing can be stopped. A merge that is not wanted any more is noticed when it
        completes; a version that is being made durable cannot be called back."""
        return False

    def chain_moved(self, now: float) -> None:
        """Do nothing: a publisher keeps nothing."""

    def _merged(
        self,
        job: Job,
        making: MergedParts,
        repairs: SignedVersion | None,
        answer: Merged | Undone,
        now: float,
    ) -> None:
        """Sign the merged version, make it durable, then let it be known."""
        wanted = job.round.awaits(job.term, job.number)
        if isinstance(answer, Undone):
            self._drop_spare()
            self._shared.out.record("merge", self._fragment, f"failed: {answer.reason}", number=job.number)
            if wanted:
                job.round.failed(answer.reason, now, answer.unusable)
            return
        if not wanted:
            self._not_made(answer)
            self._shared.out.record("merge", self._fragment, "stale: the world moved on", number=job.number)
            return
        job.round.merge_done()
        self._shared.out.cut(self._fragment, answer.cut, self._shared.me)
        version = self._signed(job, making, repairs, answer)
        if version is None:
            self._not_made(answer)
            job.round.failed("no seat's work is in it", now)
            return
        if job.term != self._term:
            self._term, self._parents = job.term, set()
        self._parents.add(version.header.parent)

        def heard(failed: Undone | None, now: float) -> None:
            if failed is None:
                self._published(version, job, repairs, now)
            else:
                self._not_published(answer, job, now, failed.reason)

        then = self._continuation(version, answer.ticket, now)
        self._shared.out.ask(Persist(UpdateRecord(version, answer.ticket), then), heard)

    def _signed(
        self, job: Job, making: MergedParts, repairs: SignedVersion | None, merged: Merged
    ) -> SignedVersion | None:
        """Sign the version that was merged; None: papers came, or its seat's work dropped out, since the
        round closed, and nobody would take it."""
        config, head = self._shared.config, self._chain.head
        parts = making.listed(merged.measured)
        now_usual = scale_after(self._chain, parts, config)
        papers: tuple[Paper, ...] = ()
        marks = self._chain.marks_with(job.number, parts)
        if job.term != self._chain.header.term:
            papers = self._context.roster.to_carry(job.number, marks, self._shared.excluded.proofs)
            marks = self._chain.marks_with(job.number, parts, papers)
        if (self._chain.marks.seats | marks.seats).isdisjoint(part.learner for part in parts):
            return None
        epoch, groups = plan_after(self._chain.header, marks, job.number, config)
        limits = limits_after(self._chain, config, [part.learner for part in parts])
        header = VersionHeader(
            run=config.run,
            group=WHOLE_RUN,
            fragment=self._fragment,
            number=job.number,
            parent=head.digest,
            term=job.term,
            syncer=self._shared.me,
            tokens=now_usual.tokens,
            state_digest=merged.state_digest,
            update_digest=merged.update_digest,
            update_bytes=merged.update_bytes,
            codec=config.update_codec,
            contributors=parts,
            epoch=epoch,
            groups=groups,
            unit=now_usual.unit,
            norm=merged.norm,
            reach=now_usual.reach,
            table=marks.digest,
            limits=limits,
            partials=in_a_version(limits, making.merged),
            repairs=repairs.header.digest() if repairs is not None and merged.repaired else None,
            finality=self._chain.finality_after(marks),
            papers=papers,
            elected=self._proof(job),
        )
        return SignedVersion(header, self._shared.sign("version", header))

    def _proof(self, job: Job) -> Certificate | None:
        """Find the proof of our office, unless the head is a version of ours in this term."""
        parent = self._chain.header
        if (parent.term, parent.syncer) == (job.term, self._shared.me):
            return None
        return next((post.office.certificate for post in self._context.posts if post.name == job.group), None)

    def _continuation(self, version: SignedVersion, update: Ticket, now: float) -> tuple[Effect, ...]:
        """List what may happen once the version is durable: it becomes ours, and those around us may know."""
        announce = Announce(self._fragment, version.header.head(), self._shared.me)
        told: dict[str, None] = {}
        for post in self._context.posts:
            if post.office.holding:
                told.update(dict.fromkeys(post.electorate.others(now)))
        sends = tuple(Send(peer, announce) for peer in told)
        return (commit_effect(self._shared, self._chain, self._own, version, update), *sends)

    def _published(self, version: SignedVersion, job: Job, repairs: SignedVersion | None, now: float) -> None:
        self._context.spare.free()
        self._chain.extend(version)
        self._context.moved(now)
        self._own.chain_moved(self._chain.marks.stamp(self._shared.me), now)
        job.round.published(now - job.closed_s)
        header = version.header
        words = f"version {header.number} with {len(header.contributors)} contributions"
        if header.repairs is not None and repairs is not None:
            words += f", takes false version {repairs.header.number} back"
        self._shared.out.record(
            "publish",
            self._fragment,
            words,
            number=header.number,
            digest=self._chain.head.digest.hex()[:8],
            term=header.term,
            tokens=header.tokens,
        )
        self._on_published(now)

    def _not_published(self, merged: Merged, job: Job, now: float, why: str) -> None:
        self._not_made(merged)
        self._shared.out.record("publish", self._fragment, f"could not be saved: {why}", number=job.number)
        job.round.failed(f"cannot save: {why}", now)

    def _not_made(self, merged: Merged) -> None:
        self._drop_spare()
        self._shared.out.put(Release(merged.ticket))

    def _drop_spare(self) -> None:
        self._context.spare.free()
        self._shared.out.put(DropSpare(self._fragment))


NOTHING_FOUND = Measured(0.0)


class MergedParts:
    """Contributions and partial merges of a closed round, in the order in which they are merged, and what its
    syncer states of each."""

    def __init__(self, job: Job, marks: Marks) -> None:
        inputs, partials = [], []
        self._inner: list[Contributor] = []
        self.merged: tuple[MergedPartial, ...] = ()
        """Partial merges in it, with their limits: those of the groups below, and those of which they were
        made."""
        for held in job.held:
            if held.ticket is None:
                continue
            if isinstance(held.header, ContributionHeader):
                part = replace(held.parts[0], votes=held.parts[0].learner in marks.seats)
                inputs.append(MergeInput(part, held.ticket, marks.mean(part.learner)))
            else:
                partials.append(PartialInput(held.ticket, held.header.payload_digest))
                self._inner += held.parts
                self.merged += held.partials
        self.inputs: tuple[MergeInput, ...] = tuple(inputs)
        self.partials: tuple[PartialInput, ...] = tuple(partials)

    def listed(self, measured: Sequence[Measured] = ()) -> tuple[Contributor, ...]:
        """List all contributions by learner, with what was measured of the inputs; empty: nothing was."""
        found = measured or [NOTHING_FOUND] * len(self.inputs)
        parts = [_stated(given, each) for given, each in zip(self.inputs, found, strict=True)]
        return tuple(sorted([*parts, *self._inner], key=lambda part: part.learner))

    def seed(self) -> bytes:
        """Compute what nobody knows before all of it is here: it draws the sample on which contributions are
        compared."""
        return sample_seed(given.contributor for given in self.inputs)


def _stated(given: MergeInput, found: Measured) -> Contributor:
    trust = given.mean.trust(found.score)
    return replace(given.contributor, trust=trust, length=found.length, score=found.score)
