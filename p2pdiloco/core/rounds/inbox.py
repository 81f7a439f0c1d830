"""Inbox of a syncer: which offers it holds, and what is wrong with others (docs/protocol/rounds.md, section
1)."""

from __future__ import annotations

from p2pdiloco.core.api.effects import Release
from p2pdiloco.core.api.partials import MergedPartial, PartialHeader, SignedOffer, SignedPartial
from p2pdiloco.core.api.plausible import plausible_work
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import ContributionHeader, Contributor, SignedContribution, Ticket
from p2pdiloco.core.chain import scale
from p2pdiloco.core.chain.chain import Chain
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.contributions.label import signed_by_learners
from p2pdiloco.util import BoundedDict

ROOM = 4
"""Room of an inbox, as a multiple of `group_size`, which is what a group has on average. Half of it is for
learners that have worked: headers cost strangers nothing."""
MAX_NOTED = 512
"""Children of which an inbox remembers what was wrong last."""


class Held:
    """Offer of one child; `ticket` is None while its payload is arriving."""

    def __init__(
        self,
        child: str,
        author: str,
        signed: SignedOffer,
        parts: tuple[Contributor, ...],
        transfer: int,
        starts_round: bool,
        begins: bool,
        now: float,
    ) -> None:
        self.child = child
        """Learner; higher up, the name of a group."""
        self.author = author
        self.header: ContributionHeader | PartialHeader = signed.header
        self.parts = parts
        """Contributions in it."""
        self.partials: tuple[MergedPartial, ...] = ()
        """Partial merges in it: itself, and those of which it was made."""
        if isinstance(signed, SignedPartial):
            self.partials = signed.header.merged(signed.signature), *signed.header.below
        self.transfer = transfer
        self.starts_round = starts_round
        """True: due and measured against the newest version, so a round may start with it. What came late, or
        early because of a closing call, waits for such a one."""
        self.arrived_s = self.ready_s = now
        """Times at which its header, and the whole payload, came."""
        self.begins = begins
        """True: a round may begin before its payload is here."""
        self.ticket: Ticket | None = None
        self.own = False

    @property
    def based_on(self) -> int:
        """Number of the version that its author held."""
        header = self.header
        return header.base_number if isinstance(header, ContributionHeader) else header.number


class Inbox:
    """Offers of the children: at most one each, at most `ROOM` times `group_size` in all."""

    def __init__(self, context: FragmentContext) -> None:
        self._context = context
        self._shared = context.shared
        self._fragment = context.index
        self._chain: Chain = context.chain
        self._held: dict[str, Held] = {}
        self._cut: BoundedDict[str, None] = BoundedDict(MAX_NOTED)
        """Children whose last payload did not come."""
        self._faults: BoundedDict[str, tuple[bytes, Verdict]] = BoundedDict(MAX_NOTED)
        """Digest of each child's newest payload in which a merge found a fault, and which."""

    def judge(
        self, signed: SignedOffer, sender: str, holding: bool, open_: bool, now: float
    ) -> Verdict | None:
        """Say on sight of its header why not to admit an offer; None: its payload may come.

        `open_`: no round is closing, so that what is in may still be replaced.
        """
        raise NotImplementedError

    def add(self, signed: SignedOffer, transfer: int, in_time: bool, now: float) -> Held:
        """Give what was admitted its place."""
        raise NotImplementedError

    def _why_not_base(self, number: int, digest: bytes) -> Verdict | None:
        head = self._chain.head
        if number > head.number:
            return Verdict.BEHIND
        if head.number - number > self._shared.config.max_base_age_versions:
            return Verdict.STALE_BASE
        return None if self._chain.knows(number, digest) else Verdict.UNKNOWN_BASE

    def fits(self, held: Held) -> bool:
        """Tell whether the chain contains nothing of it, and everything that comes before it."""
        return all(self._chain.watermark(p.learner) == p.after for p in held.parts)

    def arriving(self, transfer: int) -> Held | None:
        """Find the offer whose payload comes by this transfer."""
        return next((h for h in self._held.values() if h.transfer == transfer and h.ticket is None), None)

    def has(self, child: str) -> bool:
        """Tell whether that child's offer is in or arriving."""
        return child in self._held

    def busy(self) -> bool:
        """Tell whether anything is in or arriving."""
        return bool(self._held)

    def ready(self) -> list[Held]:
        """List the offers whose payload is here, in the order in which they are merged: that in which headers
        name them. Sums depend on it, and whoever audits a version knows no other order."""
        here = [child for child, held in self._held.items() if held.ticket is not None]
        return [self._held[child] for child in sorted(here)]

    def starting(self) -> list[Held]:
        """List the offers on their way that a round may start with."""
        return [held for held in self._held.values() if held.ticket is None and held.begins]

    def none_begins(self) -> None:
        """Let rounds start with offers only when their payloads are here. The chain moved, or a round has
        waited for what is on its way in vain."""
        for held in self._held.values():
            held.begins = False

    def broken(self, held: Held) -> None:
        """Drop an offer whose payload will not come. The next one of that child starts no round before it is
        here: headers cost their sender nothing."""
        self.drop(held)
        self._cut[held.child] = None

    def unusable(self, held: Held, verdict: Verdict) -> None:
        """Drop an offer in whose payload a merge found a fault, and remember that."""
        self._faults[held.child] = held.header.payload_digest, verdict
        self.broken(held)

    def fault(self, payload_digest: bytes) -> Verdict | None:
        """Find the fault that a merge found in this payload."""
        return next((why for digest, why in self._faults.values() if digest == payload_digest), None)

    def here(self, held: Held, ticket: Ticket, own: bool, now: float) -> None:
        """Take in its payload. `own`: this node made it, and keeps the ticket."""
        held.ticket, held.own, held.ready_s = ticket, own, now
        self._cut.pop(held.child, None)

    def all_late(self) -> None:
        """Let none of these start the next round by itself: a version was made without them."""
        for held in self._held.values():
            held.starts_round = held.begins = False

    def drop(self, held: Held) -> None:
        """Remove an offer that was merged, or is broken."""
        if self._held.get(held.child) is held:
            del self._held[held.child]
            self._release(held)

    def drop_own(self, child: str) -> None:
        """Remove what we put in ourselves for that child: it is not to be merged."""
        held = self._held.get(child)
        if held is not None and held.own:
            self.drop(held)

    def drop_overlapping(self) -> None:
        """Remove, after the chain moved, what it contains already, or what no longer follows from it."""
        for held in list(self._held.values()):
            if held.ticket is not None and not self.fits(held):
                self.drop(held)

    def clear(self) -> None:
        """Remove all; their senders send again, elsewhere."""
        self._cut.clear()
        self._faults.clear()
        for held in list(self._held.values()):
            self.drop(held)

    def _release(self, held: Held) -> None:
        if held.ticket is not None and not held.own:
            self._shared.out.put(Release(held.ticket))


class LearnerInbox(Inbox):
    """Inbox of a leaf group: contributions, one per learner."""

    def judge(
        self, signed: SignedOffer, sender: str, holding: bool, open_: bool, now: float
    ) -> Verdict | None:
        assert isinstance(signed, SignedContribution)  # partials go to rounds above
        config, chain, header = self._shared.config, self._chain, signed.header
        if header.learner != sender:
            return Verdict.FALSE_LEARNER
        if sender in self._shared.loss_audits:
            return Verdict.EXPELLED
        if self._context.grouped and not self._context.leaf.electorate.admits(sender, now):
            return Verdict.OTHER_GROUP
        if not signed_by_learners(self._shared, self._fragment, [signed.contributor()]):
            return Verdict.BAD_SIGNATURE
        if header.codec != config.contribution_codec:
            return Verdict.WRONG_CODEC
        if not 0 < header.payload_bytes <= config.max_payload_bytes[self._fragment]:
            return Verdict.WRONG_SIZE
        usual = config.tokens_per_step, config.inner_steps
        if not plausible_work(header.tokens, header.inner_steps, *usual):
            return Verdict.IMPLAUSIBLE_TOKENS
        if not holding:
            return Verdict.NOT_SYNCER
        reason = self._why_not_base(header.base_number, header.base_digest)
        if reason is not None:
            return reason
        mark = chain.watermark(header.learner)
        if header.stamp <= mark:
            return Verdict.ALREADY_MERGED
        if mark != header.after:
            return Verdict.OVERLAP if mark > header.after else Verdict.BEHIND
        if not scale.follows(header.stamp, mark):
            return Verdict.FALSE_STAMP
        if self._is_copy(header):
            return Verdict.COPY
        return self._judge_place(header)

    def fits(self, held: Held) -> bool:
        """See `Inbox.fits`. Nor is it a copy of what was merged, or came, meanwhile."""
        assert isinstance(held.header, ContributionHeader)
        return super().fits(held) and not self._is_copy(held.header)

    def _is_copy(self, header: ContributionHeader) -> bool:
        """Tell whether somebody else's work here, or somebody's newest in the chain, has this payload. What
        is still on its way does not count: a header costs nothing."""
        here = (held for held in self._held.values() if held.ticket is not None)
        others = (held.header.payload_digest for held in here if held.child != header.learner)
        return self._chain.marks.is_copy(header.payload_digest) or header.payload_digest in others

    def _judge_place(self, header: ContributionHeader) -> Verdict | None:
        held = self._held.get(header.learner)
        if held is None or not isinstance(held.header, ContributionHeader):
            return None if self._has_room(header.learner) else Verdict.FULL
        if held.header.stamp == header.stamp:
            return Verdict.ALREADY_HELD if held.ticket is not None else Verdict.IN_TRANSFER
        # Of an earlier life of the learner: that one is merged first, both are its own work.
        return Verdict.BEHIND if held.header.stamp < header.stamp else Verdict.OVERLAP

    def _has_room(self, learner: str) -> bool:
        room, has_worked = ROOM * self._shared.config.group_size, self._shared.has_worked
        if has_worked(learner):
            return len(self._held) < room
        return 2 * sum(not has_worked(child) for child in self._held) < room

    def add(self, signed: SignedOffer, transfer: int, in_time: bool, now: float) -> Held:
        assert isinstance(signed, SignedContribution)
        header = signed.header
        starts = in_time and header.due and header.base_number == self._chain.head.number
        begins = starts and header.learner not in self._cut
        parts = (signed.contributor(),)
        held = Held(header.learner, header.learner, signed, parts, transfer, starts, begins, now)
        self._held[header.learner] = held
        return held
