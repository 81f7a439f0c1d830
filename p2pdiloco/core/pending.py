"""Work on its way to a syncer: its states, its label, and what is kept of it until a chain has it for good.

Rules: docs/protocol/exactly-once.md, sections 1, 3 and 6.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import Literal

import msgspec

from p2pdiloco.core.api.events import (
    Combine,
    Combined,
    ContributionReady,
    DiscardContribution,
    Offer,
    Spill,
    Undone,
)
from p2pdiloco.core.api.reasons import Then, Verdict
from p2pdiloco.core.api.types import (
    Attestation,
    ContributionHeader,
    Contributor,
    Head,
    MergeLimits,
    SignedContribution,
    Stamp,
    Ticket,
)
from p2pdiloco.core.api.versions import PartOfTree
from p2pdiloco.core.base import Shared
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.distrust import backoff_s
from p2pdiloco.util import Machine, direct_members


@direct_members
class SendState(Enum):
    """States of the first contribution of the queue.

    - COMBINING: its parts are being added up
    - WAITING: to be sent (no syncer, or a pause after a refusal)
    - OFFERED: on its way to the syncer
    - HELD: the syncer has it; a version that contains it is due
    """

    COMBINING = auto()
    WAITING = auto()
    OFFERED = auto()
    HELD = auto()


@direct_members
class SendSignal(Enum):
    """Causes for its state to change."""

    COMBINED = auto()
    OFFER = auto()
    ACCEPT = auto()
    RETRY = auto()


SEND_TABLE = {
    (SendState.COMBINING, SendSignal.COMBINED): SendState.WAITING,
    (SendState.WAITING, SendSignal.OFFER): SendState.OFFERED,
    (SendState.OFFERED, SendSignal.ACCEPT): SendState.HELD,
    (SendState.OFFERED, SendSignal.RETRY): SendState.WAITING,
    (SendState.HELD, SendSignal.RETRY): SendState.WAITING,
}

OTHER_OPINIONS = 3
"""Number of further refusals as unusable until a contribution is given up that a peer took, or may have
taken; of a copy those of so many further versions."""

SEND_WORDS = {
    SendState.COMBINING: "being combined",
    SendState.WAITING: "waits for a syncer",
    SendState.OFFERED: "on its way to the syncer",
    SendState.HELD: "held by the syncer",
}


class Underway:
    """Work that a syncer is to merge, and where it is: a contribution, or the partial merge of a group."""

    def __init__(self, start: SendState = SendState.WAITING) -> None:
        self._machine = Machine(SEND_TABLE, start)
        self.peer = ""
        """Peer to which it was offered last."""
        self.attempts = 0
        self.retry_at_s = 0.0
        self.deadline_s = 0.0
        self._bound_s = math.inf
        """Deadline of the term before, where the same syncer was elected again."""
        self.offered_s = 0.0
        """Time at which it was offered last."""
        self.offer: Offer | None = None
        """Offer that is on its way; an earlier one's answer says nothing of it."""

    @property
    def state(self) -> SendState:
        """Place where it is."""
        return self._machine.state

    def words(self) -> str:
        """Say for people where it is."""
        return SEND_WORDS[self.state]

    def deadline(self, syncer: str | None) -> float | None:
        """Find when to look again, if that peer is in office."""
        if self.state is SendState.WAITING:
            return self.retry_at_s if syncer else None
        return self.deadline_s if self.state is SendState.HELD else None

    def offered(self, peer: str, now: float) -> None:
        """Note that it is on its way to that peer."""
        self._machine.go(SendSignal.OFFER)
        self.peer, self.offered_s = peer, now
        self.attempts += 1

    def sends(self, offer: Offer) -> None:
        """Note by which offer it is on its way."""
        self.offer = offer

    def accepted(self) -> None:
        """Note that the syncer has it."""
        self._machine.go(SendSignal.ACCEPT)
        self.offer = None

    def wait_until(self, deadline_s: float) -> None:
        """Expect a version that contains it by then; of a syncer that was elected again as before."""
        self.deadline_s, self._bound_s = min(deadline_s, self._bound_s), math.inf

    def forgive(self, lag_s: float) -> None:
        """Expect it later by time in which we did not run: that was not the syncer's slowness."""
        self.deadline_s += lag_s
        self._bound_s += lag_s

    def retry(self, now: float, pause_s: float = 0.0) -> None:
        """Send it again: at once, or after a pause that grows with the attempts."""
        self.offer = None
        if self._machine.may(SendSignal.RETRY):
            self._machine.go(SendSignal.RETRY)
        self.retry_at_s = now + backoff_s(pause_s, self.attempts) if pause_s else now

    def office_changed(self, syncer: str | None, now: float) -> None:
        """Send to another syncer, at once, what the old one holds."""
        if self.peer != syncer:
            self._bound_s = math.inf
        elif self.state is SendState.HELD:
            self._bound_s = self.deadline_s
        if self.state is not SendState.OFFERED or self.peer != syncer:
            self.retry(now)
        self.attempts = 0


class Pending(Underway):
    """Contribution that is not yet beyond doubt."""

    def __init__(
        self,
        stamp: Stamp,
        after: Stamp,
        ready: ContributionReady,
        base: tuple[int, bytes],
        contains: tuple[Stamp, ...] = (),
        start: SendState = SendState.WAITING,
    ) -> None:
        super().__init__(start)
        self.stamp = stamp
        self.after = after
        self.ready = ready
        self.base_number, self.base_digest = base
        self.attached = True
        self.contains = contains
        """Contributions that were given up, or left behind by an earlier life, and that this copy has as
        well. If a chain has one of them all the same, it must not get this one."""
        self.parts: tuple[KeptPart, ...] = ()
        """Contributions that an abandoned version had merged and that are sent again in this one; its payload
        is ours alone."""
        self._offered_after = after
        self.sent = False
        """True: all of it went out to another node, once at least, or may have."""
        self.perhaps_held = False
        """True: a peer took it, or may have; it may be in a merge that we have not heard of."""
        self.called_unusable = 0
        self._copy_at = -1
        """Version at which it was refused as a copy."""

    @property
    def relabelled(self) -> bool:
        """True: our chain moved since it was offered, and it follows something else now."""
        return self._offered_after != self.after

    def offered(self, peer: str, now: float) -> None:
        super().offered(peer, now)
        self._offered_after = self.after

    def accepted(self) -> None:
        super().accepted()
        self.perhaps_held = True

    def undelivered(self, now: float, pause_s: float) -> None:
        """Try again after a pause: the stream broke, at one end perhaps only."""
        self.perhaps_held = True
        self.retry(now, pause_s)

    def went_out(self) -> None:
        """Note that all of it went out to another node, or may have."""
        self.sent = True

    def hopeless(self, verdict: Verdict, number: int) -> bool:
        """Tell whether it is to be given up after this verdict; our head is version `number`.

        What was sound for somebody was damaged on the way. And of a copy the one that came first may be the
        thief's: once that has newer work in the chain, ours is taken. What is attached stays in the
        displacement if it is given up; else it would be lost, and waits for some more versions."""
        if verdict.then is not Then.GIVE_UP:
            return False
        if verdict is Verdict.COPY and not self.attached:
            if number == self._copy_at:
                return False
            self._copy_at = number
        elif not self.perhaps_held:
            return True
        self.called_unusable += 1
        return self.called_unusable > OTHER_OPINIONS

    def follow(self, after: Stamp) -> None:
        """Follow another one than before."""
        self.after = after

    def detach(self) -> None:
        """Note that it is no part of the learner's displacement any more."""
        self.attached = False

    def combined(self, ready: ContributionReady) -> None:
        """Take in the sum of its parts, which can be sent."""
        self.ready = ready
        self._machine.go(SendSignal.COMBINED)

    def rebase(self, head: Head) -> None:
        """Measure the displacement from that version."""
        self.base_number, self.base_digest = head.number, head.digest


class Again(Pending):
    """Merged contributions that a heavier chain lacks, oldest first, sent again as one; first their payloads
    are added up."""

    def __init__(self, lost: tuple[KeptPart, ...], after: Stamp, head: Head) -> None:
        nothing = ContributionReady(lost[-1].ready.fragment, 0, 0, 0, b"", 0, True)
        base = (head.number, head.digest)
        super().__init__(lost[-1].stamp, after, nothing, base, start=SendState.COMBINING)
        self.attached, self.parts = False, lost
        self.perhaps_held = True  # merged once already: whoever finds it unusable got it damaged


IN_MEMORY = 2
"""Payloads that stay in memory: enough for a fork of one version, the usual one."""
KEPT_MAX = 64
"""Contributions of a fragment above which two are combined for each new one."""
KEPT_MOST = 512
"""Those above which the oldest is given up."""
UNTOUCHED = 8
"""Contributions after what a seat certainly has that are not combined: its chain may branch off among
them."""
UNMERGED = 1 << 62
"""Mark in place of the version number of what our chain lacks."""


@dataclass(eq=False, slots=True)
class KeptPart:
    """Merged contribution, or several combined."""

    first: Stamp
    stamp: Stamp
    ready: ContributionReady
    number: int
    many: int = 1
    spilled: bool = False
    of: int = 0
    """Equal for those that the same seats had whenever another chain took the place of ours."""


class KeptContributions:
    """Merged contributions of one fragment, oldest first, kept until the versions that have them are beyond
    doubt.

    A heavier chain may replace the one that has them (docs/protocol/belief.md, section 7). Then those that it
    lacks are sent once more, as one: displacements are additive. Payloads beyond the newest few wait on the
    disk. Of more than a bound, two are combined for each new one. A chain that has one of those two has both,
    as far as is known: it branched off soon after what its seats had.
    """

    def __init__(self, shared: Shared, fragment: int) -> None:
        self._shared = shared
        self._fragment = fragment
        self._parts: list[KeptPart] = []
        self._combining: tuple[KeptPart, ...] = ()
        self._versions: Sequence[int] = ()
        """Versions that the other seats certainly have, lowest first."""

    def __len__(self) -> int:
        return len(self._parts)

    def find(self, digest: bytes) -> Ticket | None:
        """Find a contribution by the digest of its payload."""
        return next((p.ready.ticket for p in self._parts if p.ready.payload_digest == digest), None)

    def add(self, first: Stamp, stamp: Stamp, ready: ContributionReady, number: int) -> None:
        """Keep a contribution that was merged into our chain's version `number`, or a later one. `first`: the
        oldest that it contains."""
        self._parts.append(KeptPart(first, stamp, ready, number))
        for part in self._parts[:-IN_MEMORY]:
            if not part.spilled:
                part.spilled = True
                self._shared.out.put(Spill(self._fragment, part.ready.ticket))
        self._bound()

    def _bound(self) -> None:
        if len(self._parts) >= KEPT_MOST:
            self.drop(self._parts[:1], "too many merged contributions are in doubt")
        if len(self._parts) > KEPT_MAX and not self._combining:
            pairs = [*self._alike()]
            if pairs:
                self._combining = two = min(pairs, key=lambda pair: sum(part.many for part in pair))
                self.combine(two, partial(self._combined, two))

    def _alike(self) -> Iterator[tuple[KeptPart, KeptPart]]:
        """List the neighbours of which each seat has both, or neither: but the newest, and the first that it
        lacks."""
        older = [part for part in self._parts[: -KEPT_MAX // 2] if part.number != UNMERGED]
        known = [(part.of, self._lacking(part)) for part in older]
        for at, (one, other) in enumerate(itertools.pairwise(older)):
            first = at - UNTOUCHED
            if first >= 0 and known[at + 1] == known[first]:
                yield one, other

    def _lacking(self, part: KeptPart) -> int:
        """Count the seats that may lack it."""
        return bisect_left(self._versions, part.number)

    def moved(self, watermark: Stamp, number: int, replaced: bool) -> tuple[KeptPart, ...]:
        """Look at our chain's new head, with this watermark of ours from version `number`. List what it
        lacks."""
        straddling = [part for part in self._parts if part.first <= watermark < part.stamp]
        if straddling:
            self.drop(straddling, "the heavier chain has a part of what was combined")
        for part in self._parts:
            if replaced:
                part.of = hash((part.of, self._lacking(part)))
            if part.stamp > watermark:
                part.number = UNMERGED
            elif replaced or part.number == UNMERGED:
                part.number = number
        return tuple(part for part in self._parts if part.number == UNMERGED)

    def review(self, beyond: int, versions: Sequence[int]) -> None:
        """Let go of what is merged in version `beyond` or before. `versions`: which the other seats certainly
        have, lowest first."""
        self._versions = versions
        if self._combining:
            return  # it is being read from the disk: without a part of it, all the rest would be given up
        while self._parts and self._parts[0].number <= beyond:
            self._discard(self._parts.pop(0))

    def drop(self, parts: Sequence[KeptPart], reason: str) -> None:
        """Give these up: they can never be sent again."""
        self._shared.out.record(
            "fork",
            self._fragment,
            f"given up: {reason}",
            stamp=parts[-1].stamp.sequence,
            tokens=sum(part.ready.tokens for part in parts),
        )
        for part in parts:
            self._parts.remove(part)
            self._discard(part)

    def _discard(self, part: KeptPart) -> None:
        self._shared.out.put(DiscardContribution(self._fragment, part.ready.ticket))

    # --- combining -----------------------------------------------------------------------------------

    def combine(self, parts: Sequence[KeptPart], heard: Callable[[Combined | Undone, float], None]) -> None:
        """Ask for the sum of these."""
        tickets = tuple(part.ready.ticket for part in parts)
        self._shared.out.ask(Combine(self._fragment, tickets), heard, self._fragment)

    def together(self, parts: Sequence[KeptPart], answer: Combined) -> ContributionReady:
        """Describe the sum of these as one contribution."""
        return ContributionReady(
            self._fragment,
            answer.ticket,
            sum(part.ready.tokens for part in parts),
            sum(part.ready.inner_steps for part in parts),
            answer.payload_digest,
            answer.payload_bytes,
            True,
        )

    def _combined(self, two: tuple[KeptPart, ...], answer: Combined | Undone, _now: float) -> None:
        """Put the sum in place of both, or drop what cannot be read: there must be a bound."""
        self._combining = ()
        alive = [part for part in two if part in self._parts]
        if isinstance(answer, Undone):
            if alive:
                self.drop(alive, answer.reason)
            return
        if alive != [*two] or any(part.number == UNMERGED for part in two):
            self._shared.out.put(DiscardContribution(self._fragment, answer.ticket))
            return
        at = self._parts.index(two[0])
        ready = self.together(two, answer)
        whole = KeptPart(two[0].first, two[-1].stamp, ready, two[-1].number)
        whole.many, whole.of, whole.spilled = sum(part.many for part in two), two[0].of, True
        self._shared.out.put(Spill(self._fragment, answer.ticket))
        self._parts[at : at + len(two)] = [whole]
        for part in two:
            self._discard(part)


TakeUp = Literal["all", "rest", "none"]
"""Part of a saved displacement: the whole, what was made after the copy in the slot, or nothing."""


class Unmerged(msgspec.Struct, frozen=True):
    """Displacement of one fragment at an orderly end, by what the chain may come to have of it.

    A displacement is what the learner made since what the chain has of it. A copy of its first part (the
    slot) may be with a syncer when we go, and be merged after that, or not. Taking up again what is merged as
    well would count tokens twice; dropping what is not merged would lose them.

    Rules: docs/protocol/exactly-once.md, section 6.
    """

    whole_at: tuple[Stamp, ...]
    """Watermarks of ours in the chain at which nothing of the displacement is merged."""
    slot: Stamp | None = None
    """Stamp of the contribution whose copy is in the slot, if there is one."""
    sent: bool = False
    """True: a syncer may have all of the slot's; it is left to it, however long a merge takes."""
    doubts: tuple[Stamp, ...] = ()
    """Contributions that are in the whole displacement and that a peer may have: merged by any chance, the
    displacement must go."""

    def take_up(self, watermark: Stamp) -> tuple[TakeUp, tuple[Stamp, ...]]:
        """Decide how much a new life may take up while the chain has of us what `watermark` says.

        Returns (that part, what the new life must doubt until a contribution that contains it is merged).
        """
        if self.slot is not None and watermark == self.slot:
            return "rest", ()
        if watermark not in self.whole_at:
            return "none", ()
        return ("rest", ()) if self.sent else ("all", self.doubts)


SIGNATURES_CHECKED = 64
"""Labels of one merge whose signatures a member checks; each draws its own, where there are more."""


def signed_label(
    context: FragmentContext, pending: Pending, attestation: Attestation | None
) -> SignedContribution:
    """Sign what a contribution is, as our chain stands. The base is the head where its own is too old."""
    shared, chain = context.shared, context.chain
    config, ready = shared.config, pending.ready
    age = chain.head.number - pending.base_number
    if not chain.knows(pending.base_number, pending.base_digest) or age > config.max_base_age_versions:
        # A displacement is the same measured from any base that the learner was rebased to.
        pending.rebase(chain.head)
    header = ContributionHeader(
        run=config.run,
        group=context.leaf.name,
        fragment=context.index,
        learner=shared.me,
        stamp=pending.stamp,
        after=pending.after,
        base_number=pending.base_number,
        base_digest=pending.base_digest,
        tokens=ready.tokens,
        inner_steps=ready.inner_steps,
        payload_digest=ready.payload_digest,
        payload_bytes=ready.payload_bytes,
        codec=config.contribution_codec,
        due=ready.due or shared.leaving,
        attestation=attestation,
    )
    work = SignedContribution(header, b"").contributor().work(config.run, context.index)
    return SignedContribution(header, shared.sign("work", work))


def signed_by_learners(shared: Shared, fragment: int, parts: Sequence[Contributor]) -> bool:
    """Tell whether the learners themselves say what these parts of a merge say of them, all of them: who puts
    one into a version answers for it."""
    return all(_signed(shared, fragment, part) for part in parts)


def signed_by_syncer(shared: Shared, fragment: int, part: PartOfTree, limits: MergeLimits) -> bool:
    """Tell whether a group's syncer itself says what a merge of these limits says of its partial."""
    label, entry = part.label(shared.config.run, fragment, limits), part.entry
    return shared.signed_by(entry.syncer, "partial", label, entry.signature)


def unsigned(shared: Shared, fragment: int, parts: Sequence[Contributor]) -> int | None:
    """Find a part of a version that its learner did not sign, among some that are drawn; its index. None:
    there is none."""
    drawn = (
        range(len(parts))
        if len(parts) <= SIGNATURES_CHECKED
        else shared.rng.sample(range(len(parts)), SIGNATURES_CHECKED)
    )
    return next((index for index in drawn if not _signed(shared, fragment, parts[index])), None)


def _signed(shared: Shared, fragment: int, part: Contributor) -> bool:
    return shared.signed_by(part.learner, "work", part.work(shared.config.run, fragment), part.signature)
