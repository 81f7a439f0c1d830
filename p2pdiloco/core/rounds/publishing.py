"""Publisher of versions: merges, signs, makes durable, and only then announces.

Done by the syncer of the topmost group, which is the only one while the run fits into one group. Merging
happens in `daemon.payloads.merging`. Its completion is stamped, and dropped if the chain or the office moved
on (docs/protocol/rounds.md, section 6).
"""

from __future__ import annotations

from collections.abc import Callable

from p2pdiloco.core.api.effects import (
    DropSpare,
    Effect,
    Merge,
    Release,
    Send,
    UpdateRecord,
)
from p2pdiloco.core.api.events import Merged, MergeFailed
from p2pdiloco.core.api.messages import Announce
from p2pdiloco.core.api.partials import in_a_version
from p2pdiloco.core.api.types import WHOLE_RUN, Ticket
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.core.chain import scale
from p2pdiloco.core.chain.plan import plan_after
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.contributions.commit_effect import commit_effect
from p2pdiloco.core.contributions.own import ContributionQueue
from p2pdiloco.core.rounds.handover import Job
from p2pdiloco.core.rounds.parts import MergedParts


class Publisher:
    """Maker of one fragment's versions, whatever the seat in which we are the topmost syncer.

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
        self._job: Job | None = None
        self._parts: MergedParts | None = None
        self._repairing: SignedVersion | None = None
        """False version that the merge under way is to repair."""
        self._on_published = on_published
        self._term = 0
        self._parents: set[bytes] = set()
        """Parents of which we signed a version in this term: never another one."""

    def begin(self, job: Job, missing: int, expected: int) -> None:
        """Merge what is in, and make the outer step into the spare copy. Where we yielded to a lighter chain,
        we may have signed a version of this parent already: others have it, and a second one in the same term
        would be a lie."""
        if job.term == self._term and self._chain.head.digest in self._parents:
            job.round.failed("this parent has a version of ours in this term", now=job.closed_s)
            return
        self._context.spare.take()
        self._job = job
        self._parts = making = MergedParts(job, self._chain.marks)
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
        limits = scale.limits_after(self._chain, self._shared.config, [part.learner for part in parts])
        apart = grouped or making.partials
        self._repairing = None if apart else self._context.repairs.next()
        self._shared.out.put(
            Merge(
                self._fragment,
                job.term,
                job.number,
                making.inputs,
                making.partials,
                longest_steps,
                limits,
                making.seed(),
                self._repairing,
            )
        )

    def withdraw(self, now: float) -> bool:
        """Answer that nothing can be stopped. A merge that is not wanted any more is noticed when it
        completes; a version that is being made durable cannot be called back."""
        return False

    def chain_moved(self, now: float) -> None:
        """Do nothing: a publisher keeps nothing."""

    def hurry(self, now: float) -> None:
        """Do nothing: no group is above us."""

    def merged(self, event: Merged, now: float) -> None:
        """Sign the merged version, make it durable, then let it be known."""
        job = self._job
        if job is None or self._parts is None or not job.round.awaits(event.term, event.number):
            self._drop_spare()
            self._shared.out.put(Release(event.ticket))
            self._shared.out.record("merge", self._fragment, "stale: the world moved on", number=event.number)
            return
        job.round.merge_done()
        self._shared.out.cut(self._fragment, event.cut, self._shared.me)
        config, head = self._shared.config, self._chain.head
        parts = self._parts.listed(event.measured)
        now_usual = scale.after(self._chain, parts, config)
        marks = self._chain.marks.after(event.number, parts)
        epoch, groups = plan_after(self._chain.header, marks, event.number, config)
        limits = scale.limits_after(self._chain, config, [part.learner for part in parts])
        header = VersionHeader(
            run=config.run,
            group=WHOLE_RUN,
            fragment=self._fragment,
            number=event.number,
            parent=head.digest,
            term=event.term,
            syncer=self._shared.me,
            tokens=now_usual.tokens,
            state_digest=event.state_digest,
            update_digest=event.update_digest,
            update_bytes=event.update_bytes,
            codec=config.update_codec,
            contributors=parts,
            epoch=epoch,
            groups=groups,
            unit=now_usual.unit,
            norm=event.norm,
            reach=now_usual.reach,
            table=marks.digest,
            limits=limits,
            partials=in_a_version(limits, self._parts.merged),
            repairs=self._repaired(event),
        )
        if event.term != self._term:
            self._term, self._parents = event.term, set()
        self._parents.add(head.digest)
        version = SignedVersion(header, self._shared.sign("version", header))
        self._shared.out.persist(
            UpdateRecord(version, event.ticket),
            self._continuation(version, event.ticket, now),
            lambda t: self._published(version, job, t),
            lambda t, why: self._not_published(event, job, t, why),
        )

    def _repaired(self, event: Merged) -> bytes | None:
        """Name the version that this one repairs."""
        version = self._repairing if event.repaired else None
        return None if version is None else version.header.digest()

    def _continuation(self, version: SignedVersion, update: Ticket, now: float) -> tuple[Effect, ...]:
        """List what may happen once the version is durable: it becomes ours, and those around us may know."""
        announce = Announce(self._fragment, version.header.head(), self._shared.me)
        told: dict[str, None] = {}
        for seat in self._context.seats:
            if seat.office.holding:
                told.update(dict.fromkeys(seat.electorate.others(now)))
        sends = tuple(Send(peer, announce) for peer in told)
        return (commit_effect(self._shared, self._chain, self._own, version, update), *sends)

    def _published(self, version: SignedVersion, job: Job, now: float) -> None:
        self._context.spare.free()
        self._chain.extend(version)
        self._context.moved(now)
        self._own.chain_moved(self._chain.watermark(self._shared.me), now)
        job.round.published(now - job.closed_s)
        header = version.header
        words = f"version {header.number} with {len(header.contributors)} contributions"
        if header.repairs is not None and self._repairing is not None:
            words += f", takes false version {self._repairing.header.number} back"
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

    def failed(self, event: MergeFailed, now: float) -> None:
        """Take in that contributions turned out unusable, or the worker failed."""
        self._drop_spare()
        self._shared.out.record("merge", self._fragment, f"failed: {event.reason}", number=event.number)
        job = self._job
        if job is not None and job.round.awaits(event.term, event.number):
            job.round.failed(event.reason, now, event.unusable)

    def _not_published(self, event: Merged, job: Job, now: float, why: str) -> None:
        self._drop_spare()
        self._shared.out.put(Release(event.ticket))
        self._shared.out.record("publish", self._fragment, f"could not be saved: {why}", number=event.number)
        job.round.failed(f"cannot save: {why}", now)

    def _drop_spare(self) -> None:
        self._context.spare.free()
        self._shared.out.put(DropSpare(self._fragment))
