"""Delegate of a group: brings its partial merges to the syncer of the group above.

A closed round of a group that is not the topmost is merged into one partial (docs/protocol/groups.md, section
3). It goes to the syncer of the group above as a contribution goes to its syncer: offered, held there, sent
again if that syncer is replaced. It is kept until the chain moves past it: contains its parts, or something
that contradicts them. What it was made of stays in the group's inbox as long, so that the group can merge
again what is still unmerged.

- WAITING: to be sent (no syncer above, or a pause after a refusal)
- OFFERED: on its way to the syncer above
- HELD: the syncer above has it; a version that contains it is due
"""

from __future__ import annotations

from p2pdiloco.core.api.effects import MergePartial, Offer, Release
from p2pdiloco.core.api.events import OfferAnswered, PartialFailed, PartialMerged
from p2pdiloco.core.api.partials import PartialHeader, SignedPartial
from p2pdiloco.core.api.reasons import Suspicion, Then
from p2pdiloco.core.api.types import NO_LIMITS, Contributor, MergeLimits, Ticket
from p2pdiloco.core.chain import scale
from p2pdiloco.core.context import FragmentContext, Tenure
from p2pdiloco.core.contributions.pending import SendState, Underway
from p2pdiloco.core.rounds.handover import Job
from p2pdiloco.core.rounds.hierarchy import Hierarchy
from p2pdiloco.core.rounds.parts import MergedParts
from p2pdiloco.util import MovingAverage


class Partial(Underway):
    """Partial merge that is not yet beyond doubt."""

    def __init__(
        self, attempt: int, job: Job, making: MergedParts, limits: MergeLimits, event: PartialMerged
    ) -> None:
        super().__init__()
        self.attempt, self.limits = attempt, limits
        self.ticket: Ticket = event.ticket
        self.digest, self.size = event.payload_digest, event.payload_bytes
        self.parts: tuple[Contributor, ...] = making.listed(event.measured)
        self.below = making.merged
        self.due = job.due


class Delegate:
    """Maker and sender of the partials of one group of which we are the syncer."""

    makes_version = False

    def __init__(self, context: FragmentContext, group: str, level: int, hierarchy: Hierarchy) -> None:
        self._context = context
        self._shared = context.shared
        self._fragment = context.index
        self._group = group
        self._level = level
        self._hierarchy = hierarchy
        self._job: Job | None = None
        self._parts: MergedParts | None = None
        self._attempt, self._limits = 0, NO_LIMITS
        self.partial: Partial | None = None
        self._round_s = MovingAverage()

    @property
    def _above(self) -> Tenure | None:
        """Office of the group above, if we have a seat there."""
        return self._hierarchy.office_above(self._level)

    # --- making it -----------------------------------------------------------------------------------

    def begin(self, job: Job, missing: int, expected: int) -> None:
        """Add up what is in."""
        self._job = job
        self._attempt = self._context.next_attempt()
        self._parts = making = MergedParts(job, self._context.chain.marks)
        self._shared.out.record(
            "partial",
            self._fragment,
            f"{len(job.held)} of {expected} of our group" + (", grace is over" if missing else ""),
            number=job.number,
            group=self._group,
            contributors=sum(len(held.parts) for held in job.held),
            live=expected,
        )
        self._limits = scale.limits_after(self._context.chain, self._shared.config)
        key = self._fragment, self._group, self._attempt
        self._shared.out.put(MergePartial(*key, making.inputs, making.partials, self._limits, making.seed()))

    def merged(self, event: PartialMerged, now: float) -> None:
        """Send the sums, which are ready, to the syncer above."""
        job = self._job
        making, right = self._parts, event.attempt == self._attempt
        if job is None or making is None or not right or not job.round.awaits(job.term, job.number):
            self._shared.out.put(Release(event.ticket))
            return
        self._drop()
        self.partial = Partial(event.attempt, job, making, self._limits, event)
        job.round.merge_done()
        self._shared.out.cut(self._fragment, event.cut, self._shared.me)

    def failed(self, event: PartialFailed, now: float) -> None:
        """Take in that contributions turned out unusable, or the worker failed."""
        job = self._job
        self._shared.out.record("partial", self._fragment, f"failed: {event.reason}", group=self._group)
        if job is not None and event.attempt == self._attempt and job.round.awaits(job.term, job.number):
            job.round.failed(event.reason, now, event.unusable)

    # --- sending it ----------------------------------------------------------------------------------

    def deadline(self) -> float | None:
        """Find when to look again; None: nothing waits for a time."""
        partial, office = self.partial, self._above
        return None if partial is None or office is None else partial.deadline(office.syncer)

    def poll(self, now: float) -> None:
        """Send what is to be sent; doubt a syncer above that does nothing with it."""
        partial, office = self.partial, self._above
        if partial is None or office is None:
            return
        syncer = office.syncer
        if partial.state is SendState.HELD and (partial.peer != syncer or now >= partial.deadline_s):
            if partial.peer == syncer:
                office.suspect(Suspicion.NO_VERSION, waited_s=round(now - partial.offered_s, 1))
            partial.retry(now)
        waiting = partial.state is SendState.WAITING and now >= partial.retry_at_s
        if waiting and syncer is not None and office.takes(now):
            self._send(partial, syncer, now)

    def _send(self, partial: Partial, syncer: str, now: float) -> None:
        config, chain, shared = self._shared.config, self._context.chain, self._shared
        header = PartialHeader(
            run=config.run,
            group=self._group,
            fragment=self._fragment,
            syncer=shared.me,
            number=chain.head.number,
            digest=chain.head.digest,
            parts=partial.parts,
            due=partial.due,
            payload_digest=partial.digest,
            payload_bytes=partial.size,
            limits=partial.limits,
            below=partial.below,
        )
        signed = SignedPartial(header, shared.sign("partial", header))
        partial.offered(syncer, now)
        if syncer != shared.me:
            shared.out.put(Offer(syncer, signed, partial.ticket, partial.attempt))
        elif self._hierarchy.hand_up(self._level, signed, partial.ticket, now).taken:
            self._accepted(partial, now)
        else:
            partial.retry(now, shared.timing.retry_s)

    def answered(self, event: OfferAnswered, now: float) -> None:
        """Take in the word of the syncer above."""
        partial = self._current(event.offer)
        if partial is None:
            return
        if event.verdict.taken:
            self._accepted(partial, now)
            return
        self._shared.out.record(
            "partial",
            self._fragment,
            f"refused: {event.verdict}",
            syncer=event.offer.peer,
            group=self._group,
        )
        office = self._above
        again = event.verdict.then is Then.DOUBT and partial.attempts > 1
        if again and office is not None and partial.peer == office.syncer:
            office.suspect(Suspicion.NOT_IN_OFFICE)
        partial.retry(now, self._shared.timing.retry_s)

    def undelivered(self, offer: Offer, now: float) -> None:
        """Try again after a pause: the stream broke."""
        partial = self._current(offer)
        if partial is not None:
            partial.retry(now, self._shared.timing.retry_s)

    def _current(self, offer: Offer) -> Partial | None:
        """Find the partial that we have, if it is what that offer is about."""
        partial = self.partial
        if partial is None:
            return None
        right = (partial.attempt, partial.peer, partial.state) == (
            offer.attempt,
            offer.peer,
            SendState.OFFERED,
        )
        return partial if right else None

    def _accepted(self, partial: Partial, now: float) -> None:
        partial.accepted()
        timing, config = self._shared.timing, self._shared.config
        step_s = self._shared.median_step_s(now)
        patience_s = max(timing.answer_floor_s, 4 * self._round_s.value, 4 * config.delay_steps * step_s)
        partial.wait_until(now + patience_s + 2 * config.inner_steps * step_s + timing.hold_floor_s)

    def above_changed(self, now: float) -> None:
        """Send to another syncer above what the old one holds."""
        partial, office = self.partial, self._above
        if partial is not None and office is not None:
            partial.office_changed(office.syncer, now)

    # --- its end -------------------------------------------------------------------------------------

    def hurry(self, now: float) -> None:
        """Send without waiting out a pause: the syncer above misses it."""
        if self.partial is not None:
            self.partial.hurry(now)
        self.poll(now)

    def chain_moved(self, now: float) -> None:
        """Keep it only if the chain contains nothing of it, and everything before it, and its trust weights
        follow from the chain: another one may have taken the place of ours."""
        partial = self.partial
        if partial is None:
            return
        chain = self._context.chain
        if any(
            chain.watermark(p.learner) != p.after or not scale.rightly_stated(chain, p) for p in partial.parts
        ):
            if partial.offered_s:
                self._round_s.add(now - partial.offered_s)
            self._drop()

    def withdraw(self, now: float) -> bool:
        """Forget the partial: the office is lost, and learners send to our successor."""
        self._job = None
        self._drop()
        return True

    def _drop(self) -> None:
        if self.partial is not None:
            self._hierarchy.take_back(self._level, self._group)
            self._shared.out.put(Release(self.partial.ticket))
            self.partial = None
