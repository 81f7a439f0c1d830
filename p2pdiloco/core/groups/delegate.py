"""A group's partial merge on its way to the syncer of the group above (design 5.5).

Theory of operation
-------------------
A closed round of a group that is not the topmost is merged into one partial, which goes to the syncer of the
group above as a contribution goes to its syncer: offered, held there, sent again if that syncer is replaced.
It is kept until the chain moves past it: contains its parts, or something that contradicts them. What it
was made of stays in the group's inbox as long, so that the group can merge again what is still unmerged.

    WAITING   to be sent (no syncer above, or a pause after a refusal)
    OFFERED   on its way to the syncer above
    HELD      the syncer above has it; a version that contains it is due
"""

from __future__ import annotations

from collections.abc import Callable

from p2pdiloco.core.api.effects import MergePartial, OfferPartial, Release
from p2pdiloco.core.api.events import PartialAnswered, PartialFailed, PartialMerged, PartialUndelivered
from p2pdiloco.core.api.types import PartialHeader, PartialPart, SignedPartial, Ticket
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.contributions.pending import SEND_TABLE, SendSignal, SendState
from p2pdiloco.core.election.office import Office
from p2pdiloco.core.election.office_table import NOT_IN_OFFICE
from p2pdiloco.core.machine import Machine
from p2pdiloco.core.rounds.handover import Job
from p2pdiloco.core.rounds.publishing import inputs_of
from p2pdiloco.core.timing import Ema, backoff_s


class Partial:
    """One partial merge that is not yet beyond doubt."""

    def __init__(self, attempt: int, job: Job, event: PartialMerged) -> None:
        self.attempt = attempt
        self.ticket: Ticket = event.ticket
        self.digest, self.size = event.payload_digest, event.payload_bytes
        parts = [part for held in job.held for part in held.parts]
        self.parts: tuple[PartialPart, ...] = tuple(sorted(parts, key=lambda p: p.contributor.learner))
        self.due = job.due
        self.machine = Machine(SEND_TABLE, SendState.WAITING)
        self.peer = ""
        self.tries = 0
        self.retry_at_s = 0.0
        self.deadline_s = 0.0
        self.since_s = 0.0


class Delegate:
    """The partials of one group of which we are the syncer."""

    last = False

    def __init__(self, context: FragmentContext, group: str) -> None:
        self._context = context
        self._shared = context.shared
        self._fragment = context.index
        self._group = group
        self._job: Job | None = None
        self._attempt = 0
        self.partial: Partial | None = None
        self._round_s = Ema()
        self.above: Callable[[], Office | None] = lambda: None
        """The office of the group above, if we have a seat there (set by the fragment)."""
        self.hand_up: Callable[[SignedPartial, Ticket, float], str] = lambda signed, ticket, now: "not-syncer"
        """Put it into our own inbox of the group above; the refusal reason (set by the fragment)."""

        self.take_back: Callable[[], None] = lambda: None
        """Out of our own inbox of the group above, if it is there (set by the fragment)."""

    # --- making it -----------------------------------------------------------------------------------

    def begin(self, job: Job, missing: int, expected: int) -> None:
        """Add up what is in."""
        self._job = job
        self._attempt = self._context.next_attempt()
        inputs, partials = inputs_of(job)
        self._shared.out.record(
            "partial",
            self._fragment,
            f"{len(job.held)} of {expected} of our group" + (", grace is over" if missing else ""),
            number=job.number,
            group=self._group,
            contributors=sum(len(held.parts) for held in job.held),
            live=expected,
        )
        self._shared.out.put(MergePartial(self._fragment, self._group, self._attempt, inputs, partials))

    def merged(self, event: PartialMerged, now: float) -> None:
        """The sums are ready: off to the syncer above."""
        job = self._job
        if job is None or event.attempt != self._attempt or not job.round.awaits(job.term, job.number):
            self._shared.out.put(Release(event.ticket))
            return
        self._drop()
        self.partial = Partial(event.attempt, job, event)
        job.round.merged()

    def failed(self, event: PartialFailed) -> None:
        """Every contribution turned out unusable, or the worker failed."""
        job = self._job
        self._shared.out.record("partial", self._fragment, f"failed: {event.reason}", group=self._group)
        if job is not None and event.attempt == self._attempt and job.round.awaits(job.term, job.number):
            job.round.failed(event.reason)

    # --- sending it ----------------------------------------------------------------------------------

    def deadline(self) -> float | None:
        """When to look again."""
        partial, office = self.partial, self.above()
        if partial is None or office is None:
            return None
        if partial.machine.state is SendState.WAITING:
            return partial.retry_at_s if office.syncer else None
        return partial.deadline_s if partial.machine.state is SendState.HELD else None

    def poll(self, now: float) -> None:
        """Send what is to be sent; doubt a syncer above that does nothing with it."""
        partial, office = self.partial, self.above()
        if partial is None or office is None:
            return
        syncer = office.syncer
        if partial.machine.state is SendState.HELD and (partial.peer != syncer or now >= partial.deadline_s):
            if partial.peer == syncer:
                office.suspect(f"no version for {now - partial.since_s:.1f} s")
            self._retry(partial, now, at_once=True)
        waiting = partial.machine.state is SendState.WAITING and now >= partial.retry_at_s
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
        )
        signed = SignedPartial(header, shared.sign("partial", header))
        partial.machine.go(SendSignal.OFFER)
        partial.peer = syncer
        partial.tries += 1
        partial.since_s = now
        if syncer != shared.me:
            shared.out.put(OfferPartial(syncer, partial.attempt, signed, partial.ticket))
            return
        reason = self.hand_up(signed, partial.ticket, now)
        if reason in ("", "already-held"):
            self._accepted(partial, now)
        else:
            self._retry(partial, now, at_once=False)

    def answered(self, event: PartialAnswered, now: float) -> None:
        """The word of the syncer above."""
        partial = self._current(event.attempt, event.peer)
        if partial is None:
            return
        if event.accepted or event.reason == "already-held":
            self._accepted(partial, now)
            return
        self._shared.out.record(
            "partial", self._fragment, f"refused: {event.reason}", syncer=event.peer, group=self._group
        )
        office = self.above()
        again = event.reason == "not-syncer" and partial.tries > 1
        if again and office is not None and partial.peer == office.syncer:
            office.suspect(NOT_IN_OFFICE)
        self._retry(partial, now, at_once=False)

    def undelivered(self, event: PartialUndelivered, now: float) -> None:
        """The stream broke."""
        partial = self._current(event.attempt, event.peer)
        if partial is not None:
            self._retry(partial, now, at_once=False)

    def _current(self, attempt: int, peer: str) -> Partial | None:
        partial = self.partial
        if partial is None or partial.attempt != attempt or partial.peer != peer:
            return None
        return partial if partial.machine.state is SendState.OFFERED else None

    def _accepted(self, partial: Partial, now: float) -> None:
        partial.machine.go(SendSignal.ACCEPT)
        timing, config = self._shared.timing, self._shared.config
        step_s = self._shared.median_step_s(now)
        patience_s = max(timing.answer_floor_s, 4 * self._round_s.value, 4 * config.delay_steps * step_s)
        partial.deadline_s = now + patience_s + 2 * config.inner_steps * step_s + timing.hold_floor_s

    def _retry(self, partial: Partial, now: float, at_once: bool) -> None:
        if partial.machine.may(SendSignal.RETRY):
            partial.machine.go(SendSignal.RETRY)
        pause_s = backoff_s(self._shared.timing.retry_s, partial.tries)
        partial.retry_at_s = now if at_once else now + pause_s

    def above_changed(self, now: float) -> None:
        """Another syncer above: what the old one holds is sent again."""
        partial, office = self.partial, self.above()
        if partial is not None and office is not None:
            if partial.machine.state is not SendState.OFFERED or partial.peer != office.syncer:
                self._retry(partial, now, at_once=True)
            partial.tries = 0

    # --- its end -------------------------------------------------------------------------------------

    def hurry(self, now: float) -> None:
        """The syncer above misses it: do not wait out a pause."""
        if self.partial is not None and self.partial.machine.state is SendState.WAITING:
            self.partial.retry_at_s = now
        self.poll(now)

    def chain_moved(self, now: float) -> None:
        """Keep it only if the chain contains nothing of it, and everything before it."""
        partial = self.partial
        if partial is None:
            return
        mark = self._context.chain.watermark
        if any(mark(part.contributor.learner) != part.after for part in partial.parts):
            if partial.since_s:
                self._round_s.add(now - partial.since_s)
            self._drop()

    def withdraw(self, now: float) -> bool:
        """The office is lost: learners send to our successor."""
        self._job = None
        self._drop()
        return True

    def _drop(self) -> None:
        if self.partial is not None:
            self.take_back()
            self._shared.out.put(Release(self.partial.ticket))
            self.partial = None
