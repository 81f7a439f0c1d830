"""Contributions of this node's learner, until they are merged beyond doubt.

`ContributionQueue` offers them to the syncer. `Withheld` and `Patience` say when that syncer is to be
doubted.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from p2pdiloco.core.api.events import (
    Combined,
    CommitVersion,
    ContributionReady,
    DiscardContribution,
    Offer,
    OfferAnswered,
    RetireSlot,
    Undone,
)
from p2pdiloco.core.api.reasons import Suspicion, Then, Verdict
from p2pdiloco.core.api.types import (
    NEVER,
    Attestation,
    Contributor,
    Head,
    SignedContribution,
    Stamp,
    Ticket,
)
from p2pdiloco.core.api.versions import SignedVersion, level_sizes
from p2pdiloco.core.base import Shared, answer_bound_s, patience_s
from p2pdiloco.core.chain import Chain
from p2pdiloco.core.context import FragmentContext, Tenure
from p2pdiloco.core.distrust import Cause
from p2pdiloco.core.pending import (
    Again,
    KeptContributions,
    KeptPart,
    Pending,
    SendState,
    TakeUp,
    Unmerged,
    signed_label,
)
from p2pdiloco.util import MovingAverage

MAX_QUEUE = 4
RETIRED_KEPT = 16


class ContributionQueue:
    """Queue of one fragment's contributions of this node. Each is offered to the syncer until it is merged,
    exactly once.

    A contribution is a displacement. It stays here, encoded, until a version that contains it is part of our
    chain (docs/protocol/exactly-once.md, section 1). A syncer's death, a lost answer or a fork costs a
    re-send, never a trained token. Contributions of one learner are ordered: each names the one before it
    (`after`), and a syncer admits it only if its chain contains exactly that one. Hence at most the first of
    the queue is under way.

    What our chain has merged is kept until that is beyond doubt (`kept`). If a heavier chain replaces ours
    and lacks several, they go out as one, ahead of everything else: with the sums of their tokens and steps,
    and the stamp of the last. The parts stay kept, so that another switch is answered from them again.

    An *attached* contribution is still part of the learner's displacement (its slot is in use): when it is
    merged the learner must take it out. A *detached* one is not: the learner crashed since, or the version
    that had merged it lost against a heavier chain.

    Args:
        attestation: what the next label says of milestones.
    """

    def __init__(
        self,
        context: FragmentContext,
        attestation: Callable[[], Attestation | None],
    ) -> None:
        self._context = context
        self._shared = context.shared
        self._fragment = context.index
        self._chain = chain = context.chain
        self._queue: deque[Pending] = deque()
        self._kept = KeptContributions(context.shared, context.index)
        self._replaced = chain.replaced
        self._retired: deque[Stamp] = deque(maxlen=RETIRED_KEPT)
        """Contributions given up, or left behind by an earlier life, and still in the learner's displacement.
        If a chain has one all the same, a peer that held it merged it, and the displacement must go."""
        self._sequence = 0
        self._patience = Patience(context)
        self._withheld = Withheld(context, self._patience)
        self._attestation = attestation
        self.base_number = chain.head.number
        """Version that the learner's parameters are measured against."""
        self.base_digest = chain.head.digest

    # --- questions -----------------------------------------------------------------------------------

    @property
    def _office(self) -> Tenure:
        return self._context.leaf.office

    @property
    def idle(self) -> bool:
        """True: no contribution of ours waits to be merged."""
        return not self._queue

    @property
    def keeps(self) -> bool:
        """True: merged contributions are kept."""
        return len(self._kept) > 0

    def find(self, digest: bytes) -> Ticket | None:
        """Find a contribution, merged or not, by the digest of its payload; None: it is beyond doubt, or not
        ours."""
        waiting = (p.ready.ticket for p in self._queue if p.ready.payload_digest == digest)
        return next(waiting, None) or self._kept.find(digest)

    def unmerged(self) -> Unmerged:
        """Describe what is left if we end here."""
        whole_at, slot = [self._chain.marks.stamp(self._shared.me)], None
        for pending in self._queue:
            if pending.attached:
                slot = pending
                break
            whole_at.append(pending.stamp)  # of an earlier life of the learner: no part of its displacement
        if slot is None:
            return Unmerged(tuple(whole_at), doubts=tuple(self._retired))
        doubts = (*self._retired, slot.stamp) if slot.peer else tuple(self._retired)
        return Unmerged(tuple(whole_at), slot.stamp, slot.sent, doubts)

    def take_up(self, unmerged: Unmerged) -> TakeUp:
        """Decide how much of the displacement of an earlier life, which ended so, the learner may start
        with."""
        mode, doubts = unmerged.take_up(self._chain.marks.stamp(self._shared.me))
        self._retired.extend(doubts)
        return mode

    def words(self) -> str:
        """Say for people where the first contribution is."""
        return self._queue[0].words() if self._queue else ""

    def deadline(self) -> float | None:
        """Find when to look again; None: nothing waits for a time."""
        if not self._queue:
            return None
        return self._queue[0].deadline(self._office.syncer)

    # --- what happens --------------------------------------------------------------------------------

    def ready(self, event: ContributionReady, now: float) -> None:
        """Queue a new contribution of the learner."""
        shared = self._shared
        after = self._queue[-1].stamp if self._queue else self._chain.marks.stamp(shared.me)
        self._sequence += 1
        stamp = Stamp(shared.incarnation, self._sequence)
        base = (self.base_number, self.base_digest)
        self._queue.append(Pending(stamp, after, event, base, tuple(self._retired)))
        while len(self._queue) > MAX_QUEUE:
            # The second: the first may be in a merge at this moment.
            lost = self._queue[1]
            del self._queue[1]
            self._give_up(lost, "too many contributions are waiting")
            self._queue[1].follow(lost.after)

    def review(self, beyond: int, versions: Sequence[int]) -> None:
        """Let go of what is merged in version `beyond` or before: it is beyond doubt. `versions`: which the
        other seats have, lowest first."""
        self._kept.review(beyond, versions)

    def _combined(self, again: Pending, answer: Combined | Undone, _now: float) -> None:
        """Take in the sum of what is to be sent again, or give up what a payload that cannot be read back was
        part of."""
        wanted = again in self._queue
        if isinstance(answer, Undone):
            if wanted:
                self._queue.remove(again)
                self._kept.drop(again.parts, answer.reason)
                if self._queue:
                    self._queue[0].follow(again.after)
        elif wanted:
            again.combined(self._kept.together(again.parts, answer))
        else:
            self._shared.out.put(DiscardContribution(self._fragment, answer.ticket))

    def forgive(self, lag_s: float) -> None:
        """Expect everything later by the time in which we did not run."""
        for pending in self._queue:
            pending.forgive(lag_s)

    def learner_lost(self) -> None:
        """Detach what was copied out: the learner crashed, and its displacement is gone."""
        self._retired.clear()
        for pending in self._queue:
            pending.detach()

    def next_offer(self, now: float) -> Pending | None:
        """Find the contribution to send now, if any."""
        if not self._queue or self._shared.departed:
            return None
        first = self._queue[0]
        syncer = self._office.syncer
        if first.state is SendState.HELD and (first.peer != syncer or now >= first.deadline_s):
            if first.peer == syncer:
                self._office.suspect(Suspicion.NO_VERSION, waited_s=round(now - first.offered_s, 1))
            first.retry(now)
        waiting = first.state is SendState.WAITING
        return first if waiting and self._office.takes(now) and now >= first.retry_at_s else None

    def offer(self, pending: Pending, syncer: str, now: float) -> SignedContribution:
        """Sign a contribution's label anew and count it as under way to `syncer`."""
        pending.offered(syncer, now)
        return signed_label(self._context, pending, self._attestation())

    def send(self, pending: Pending, syncer: str, now: float) -> None:
        """Stream a contribution to another peer."""
        signed = self.offer(pending, syncer, now)
        offer = Offer(syncer, signed, pending.ready.ticket)
        pending.sends(offer)
        self._shared.out.ask(offer, partial(self._answered, pending, offer), self._fragment)

    def _answered(self, pending: Pending, offer: Offer, answer: OfferAnswered | Undone, now: float) -> None:
        """Take in the syncer's word, unless the contribution is not with it any more."""
        if pending not in self._queue or pending.offer is not offer:
            return
        if isinstance(answer, Undone):
            pending.undelivered(now, self._shared.timing.retry_s)
            return
        if answer.verdict.taken:
            self._withheld.acknowledged(pending, answer.head)
            self.accepted(pending, answer.verdict, now)
            return
        self._shared.out.record(
            "contribution",
            self._fragment,
            f"refused: {answer.verdict}",
            syncer=offer.peer,
            stamp=pending.stamp.sequence,
        )
        self.refused(pending, answer.verdict, now)

    def accepted(self, pending: Pending, verdict: Verdict, now: float) -> None:
        """Wait for a version that contains a contribution: the syncer has it."""
        pending.accepted()
        if self._chain.header.groups > 1:
            pending.went_out()  # a syncer of one group among several passes it on in a partial merge
        if pending.relabelled:  # our chain moved meanwhile: theirs will, and drop it
            pending.retry(now, self._shared.timing.retry_s)
            return
        pending.wait_until(now + self._patience.wait_s(now - pending.offered_s, verdict, now))

    def refused(self, pending: Pending, verdict: Verdict, now: float) -> None:
        """Mend what can be mended and try again; give up only what can never be merged."""
        if pending.hopeless(verdict, self._chain.header.number):
            self._queue.remove(pending)
            self._give_up(pending, str(verdict))
            if self._queue:
                self._queue[0].follow(pending.after)
            return
        if verdict.then is Then.RELABEL:
            pending.rebase(self._chain.head)
        if verdict.then is Then.DOUBT and pending.attempts > 1 and pending.peer == self._office.syncer:
            self._office.suspect(Suspicion.NOT_IN_OFFICE)
        self._withheld.refused(pending, verdict, now)
        pending.retry(now, self._shared.timing.retry_s)

    def sent(self, stamp: Stamp) -> None:
        """Note that all of a contribution has gone out."""
        for pending in self._queue:
            if pending.stamp == stamp:
                pending.went_out()

    def office_changed(self, now: float) -> None:
        """Send to another syncer, at once, what the old one holds."""
        for pending in self._queue:
            pending.office_changed(self._office.syncer, now)

    def _give_up(self, pending: Pending, reason: str) -> None:
        out = self._shared.out
        if pending.attached:
            self._retired.append(pending.stamp)
            out.put(RetireSlot(self._fragment, pending.ready.ticket))
        elif pending.parts:
            self._discard_payload(pending)
            self._kept.drop(pending.parts, reason)
        else:
            out.put(DiscardContribution(self._fragment, pending.ready.ticket))
        out.record(
            "contribution",
            self._fragment,
            f"given up: {reason}",
            tokens=pending.ready.tokens,
            lost=not pending.attached,
        )

    def ticket_in(self, parts: Iterable[Contributor]) -> Ticket | None:
        """Find the payload of ours that is among these parts of a version; None: we have none in it, or not
        as it was."""
        mine = (part.payload_digest for part in parts if part.learner == self._shared.me)
        return next(map(self.find, mine), None)

    # --- versions ------------------------------------------------------------------------------------

    def would_merge(self, watermark: Stamp) -> tuple[Ticket | None, bool]:
        """Tell what a new watermark of our chain would mean for the learner.

        Returns (ticket of the attached contribution that is then merged, whether the learner's displacement
        must be dropped). It must if the chain has what we had given up.
        """
        merged = [p for p in self._queue if p.stamp <= watermark]
        attached = [p.ready.ticket for p in merged if p.attached]
        return (attached[0] if attached else None), watermark in self._retired

    def chain_moved(self, watermark: Stamp, now: float) -> None:
        """Look at the chain's new head, with this watermark of ours: let go of what it has, requeue what it
        lost."""
        if watermark in self._retired:  # somebody merged all the same what was given up here
            self._retired.clear()
        for pending in [p for p in self._queue if watermark in p.contains]:
            self._queue.remove(pending)
            self._give_up(pending, "it contains what was merged")
        number = self._chain.marks.number(self._shared.me)
        while self._queue and self._queue[0].stamp <= watermark:
            self._merged(self._queue.popleft(), number, now)
        replaced, self._replaced = self._chain.replaced != self._replaced, self._chain.replaced
        lost = self._kept.moved(watermark, number, replaced)
        first = self._queue[0] if self._queue else None
        if first is not None and first.parts and first.parts != lost:
            self._withdraw(first)
            first = None
        if lost and (first is None or not first.parts):
            self._send_again(lost, watermark, now)
        if self._queue:
            # Also after a restart (an earlier life's contribution was merged just now) or a deep fork: what
            # is queued here is a displacement of its own, disjoint from whatever the chain contains of us.
            first = self._queue[0]
            if first.after != watermark:
                first.follow(watermark)
                if first.state is SendState.HELD:  # not any more: it does not fit as it was labelled
                    first.retry(now)
            elif not replaced and self._withheld.missed(first, now):
                first.retry(now)

    def _merged(self, pending: Pending, number: int, now: float) -> None:
        """Record a contribution that is in our chain now, and keep it until that is beyond doubt."""
        if pending.offered_s:
            self._patience.merged(now - pending.offered_s)
        for stamp in set(pending.contains).intersection(self._retired):
            self._retired.remove(stamp)  # with this one it went out of the displacement
        self._shared.out.record(
            "contribution",
            self._fragment,
            "merged",
            stamp=pending.stamp.sequence,
            tokens=pending.ready.tokens,
            inner_steps=pending.ready.inner_steps,
            attempts=pending.attempts,
        )
        if pending.parts:
            self._discard_payload(pending)
        else:
            self._kept.add(min((*pending.contains, pending.stamp)), pending.stamp, pending.ready, number)

    def _discard_payload(self, pending: Pending) -> None:
        if pending.state is not SendState.COMBINING:
            self._shared.out.put(DiscardContribution(self._fragment, pending.ready.ticket))

    def _withdraw(self, again: Pending) -> None:
        self._queue.remove(again)
        self._discard_payload(again)

    def _send_again(self, lost: tuple[KeptPart, ...], watermark: Stamp, now: float) -> None:
        """Send again, as one, what a chain that replaced ours lacks."""
        again = Again(lost, watermark, self._chain.head)
        self._kept.combine(lost, partial(self._combined, again))
        for other in self._queue:  # only the first may be under way
            other.retry(now)
        self._queue.appendleft(again)
        self._shared.out.record(
            "fork",
            self._fragment,
            f"our chain lost: {len(lost)} contributions are sent again",
            stamp=again.stamp.sequence,
            contributions=len(lost),
            tokens=sum(part.ready.tokens for part in lost),
        )

    def learner_applied(self, number: int, digest: bytes) -> None:
        """Note against which version the learner's parameters are measured now."""
        self.base_number, self.base_digest = number, digest


MOST_MISSES = 3
"""Times in a row that a syncer may say that it has a contribution, and make a version without it."""
MOST_AHEAD = 4
"""Versions that a syncer can be ahead of us where we take in its versions one by one. It may say that it is
further, so that none counts as made since."""
LEFT_OUT = "the syncer leaves out of its versions what it says that it has"
ELSEWHERE = (
    Verdict.ALREADY_MERGED,
    Verdict.OVERLAP,
    Verdict.BEHIND,
    Verdict.UNKNOWN_BASE,
    Verdict.STALE_BASE,
    Verdict.OTHER_EPOCH,
)
"""Words of a syncer whose chain is another than ours, or further."""


class Withheld:
    """Watch over the syncer that is to merge the first contribution of the queue.

    It may leave contributions out, or make versions that nobody gets. A syncer merges all that is here when a
    round closes. So what it has is in its next version, or in the one after that, if the next was in the
    making. A version without it is a miss; it is then offered again, and an honest syncer that had to drop it
    takes it. A syncer that says time and again that it has it, and makes versions without it, leaves it out
    on purpose.

    Nor is a syncer of use that refuses our work because its chain is another, where nobody can have that
    chain.

    Rules: docs/protocol/exactly-once.md, section 5.
    """

    def __init__(self, context: FragmentContext, patience: Patience) -> None:
        self._context, self._patience = context, patience
        self._of = NEVER, ""
        self._misses = 0
        self._from: int | None = None
        """First version that is to have it; None: missed or refused since, or never said to be."""
        self._elsewhere: tuple[str, int, float] | None = None
        """Syncer that said that its chain is another, than which version of ours, and since when."""

    def acknowledged(self, pending: Pending, theirs: Head | None) -> None:
        """Take in that its syncer, who has that head, has a contribution. What it said before still binds it:
        else who is asked again and again, as rounds last longer than our patience, never misses any."""
        if self._of != (pending.stamp, pending.peer):
            self._of, self._misses, self._from = (pending.stamp, pending.peer), 0, None
        if self._from is not None:
            return
        ours = self._context.chain.head.number
        ahead = theirs.number - ours if theirs is not None else 0
        self._from = ours + min(max(0, ahead), MOST_AHEAD) + 2

    def missed(self, pending: Pending, now: float) -> bool:
        """Look at a new version of our chain. Tell whether it is to have that contribution, and has not."""
        header, office = self._context.chain.header, self._context.leaf.office
        held = pending.state is SendState.HELD and self._of == (pending.stamp, pending.peer)
        if self._from is None or header.number < self._from or header.groups > 1:
            return False
        if not held or header.syncer != pending.peer:
            return False
        self._misses, self._from = self._misses + 1, None
        if self._misses >= MOST_MISSES and pending.peer == office.syncer:
            shared, self._misses = self._context.shared, 0
            shared.distrust.add(pending.peer, Cause.FALSE, now)
            shared.out.record("suspicion", header.fragment, LEFT_OUT, syncer=pending.peer)
        return True

    def refused(self, pending: Pending, verdict: Verdict, now: float) -> None:
        """Take in that a syncer refused it."""
        self._from = None
        office, ours = self._context.leaf.office, self._context.chain.head.number
        if verdict not in ELSEWHERE or pending.peer != office.syncer:
            return
        if self._elsewhere is None or self._elsewhere[:2] != (pending.peer, ours):
            self._elsewhere = pending.peer, ours, now
        waited_s = now - self._elsewhere[2]
        if waited_s > self._patience.wait_s(0.0, Verdict.HELD, now):
            office.suspect(Suspicion.NO_VERSION, waited_s=round(waited_s, 1))


class Patience:
    """Patience with a syncer that took our contribution, learned from how long contributions took until they
    were merged."""

    def __init__(self, context: FragmentContext) -> None:
        self._context = context
        self._round_s = MovingAverage()

    def merged(self, took_s: float) -> None:
        """Note how long after its last offer a contribution was in our chain."""
        self._round_s.add(took_s)

    def wait_s(self, took_s: float, verdict: Verdict, now: float) -> float:
        """Compute how long to wait for the version, from the answer on. `took_s`: seconds from the offer to
        the answer."""
        shared, groups = self._context.shared, self._context.chain.header.groups
        config, timing = shared.config, shared.timing
        step_s = shared.median_step_s(now)
        # Others' payloads may well take as long as ours has taken.
        round_s = max(self._round_s.value, took_s)
        wait_s = patience_s(timing.answer_floor_s, round_s, config.delay_steps, step_s)
        # A round may be open for so long, for the sake of one that does not answer.
        wait_s += min(config.grace_cap_s, answer_bound_s(config.inner_steps, step_s))
        if verdict.then is Then.WAIT_LONGER or config.quorum > 1:
            wait_s += 2 * config.inner_steps * step_s + timing.hold_floor_s
        # The syncers above are doubted first, by those below them.
        return wait_s * len(level_sizes(groups, config.group_size))


def commit_effect(
    shared: Shared, chain: Chain, own: ContributionQueue, version: SignedVersion, update: Ticket | None
) -> CommitVersion:
    """Make the effect by which the spare copy becomes the state. It says whether our own contribution is in
    it."""
    marks = chain.marks_after(version.header)
    after = max(marks.stamp(shared.me), chain.marks.stamp(shared.me))
    merged_ticket, overwrite = own.would_merge(after)
    return CommitVersion(version, update, merged_ticket, marks.table, after, overwrite)
