"""Inbox of a syncer: which offers it takes in, and what becomes of them until they are merged.

An `Inbox` holds the offers that `Admission` lets in: of learners, or above the leaves of groups.

Rules: docs/protocol/rounds.md, sections 1 and 4; docs/protocol/groups.md, section 4.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pdiloco.core.api.events import (
    AcceptTransfer,
    AnswerTransfer,
    Release,
)
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import (
    MAX_CONTRIBUTORS,
    ContributionHeader,
    Contributor,
    MergeLimits,
    SignedContribution,
    Ticket,
    plausible_work,
)
from p2pdiloco.core.api.versions import (
    MAX_PARTIALS,
    MergedPartial,
    PartialHeader,
    SignedOffer,
    SignedPartial,
)
from p2pdiloco.core.chain import (
    Chain,
    Marks,
    limits_after,
    plan_of,
    rightly_stated,
    stamp_follows,
)
from p2pdiloco.core.context import Electorate, FragmentContext, Tenure
from p2pdiloco.core.distrust import Cause
from p2pdiloco.core.members import Derived
from p2pdiloco.core.pending import signed_by_learners, signed_by_syncer
from p2pdiloco.util import BoundedDict

ROOM = 4
"""Room of an inbox, as a multiple of `group_size`, which is what a group has on average. Half of it is for
seats: headers cost strangers nothing."""


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


Unusable = tuple[tuple[Ticket, Verdict], ...]
"""Inputs in which a merge found a fault, by their tickets."""


class Inbox:
    """Offers of the children: at most one each, at most `ROOM` times `group_size` in all."""

    def __init__(self, context: FragmentContext) -> None:
        self._context = context
        self._shared = context.shared
        self._fragment = context.index
        self._chain: Chain = context.chain
        self._held: dict[str, Held] = {}
        self._faults: BoundedDict[str, tuple[bytes, Verdict]] = BoundedDict()
        """Digest of each child's newest payload in which a merge found a fault, and which."""
        self._derived = Derived()

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
        return all(self._chain.marks.stamp(p.learner) == p.after for p in held.parts)

    def in_turn(self, child: str, now: float) -> bool:
        """Tell whether the next version takes what that child has."""
        return True

    def awaits(self, child: str, now: float) -> bool:
        """Tell whether the next version waits for that child."""
        return True

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

    def unusable(self, held: Held, verdict: Verdict) -> None:
        """Drop an offer in whose payload a merge found a fault, and remember that."""
        self._faults[held.child] = held.header.payload_digest, verdict
        self.drop(held)

    def fault(self, payload_digest: bytes) -> Verdict | None:
        """Find the fault that a merge found in this payload."""
        return next((why for digest, why in self._faults.values() if digest == payload_digest), None)

    def here(self, held: Held, ticket: Ticket, own: bool, now: float) -> None:
        """Take in its payload. `own`: this node made it, and keeps the ticket."""
        held.ticket, held.own, held.ready_s = ticket, own, now

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
        if self._shared.distrust.has(sender, now, Cause.USELESS):
            return Verdict.EXPELLED
        if self._context.grouped and not self._context.leaf.electorate.admits(sender, now):
            return Verdict.OTHER_GROUP
        if not signed_by_learners(self._shared, self._fragment, [signed.contributor()]):
            return Verdict.BAD_SIGNATURE
        self._context.attested.seen(sender, [signed.contributor()])
        if header.codec != config.contribution_codec:
            return Verdict.WRONG_CODEC
        if not 0 < header.payload_bytes <= config.max_payload_bytes[self._fragment]:
            return Verdict.WRONG_SIZE
        if not plausible_work(header.tokens, header.inner_steps, config.tokens_per_step, config.inner_steps):
            return Verdict.IMPLAUSIBLE_TOKENS
        if not holding:
            return Verdict.NOT_SYNCER
        reason = self._why_not_base(header.base_number, header.base_digest)
        if reason is not None:
            return reason
        mark = chain.marks.stamp(header.learner)
        if header.stamp <= mark:
            return Verdict.ALREADY_MERGED
        if mark != header.after:
            return Verdict.OVERLAP if mark > header.after else Verdict.BEHIND
        if not stamp_follows(header.stamp, mark):
            return Verdict.FALSE_STAMP
        if self._is_copy(header):
            return Verdict.COPY
        return self._judge_place(header, now)

    def fits(self, held: Held) -> bool:
        """Tell whether it follows from the chain as of any inbox, and is no copy of what was merged, or came,
        meanwhile."""
        assert isinstance(held.header, ContributionHeader)
        return super().fits(held) and not self._is_copy(held.header)

    def _is_copy(self, header: ContributionHeader) -> bool:
        """Tell whether somebody else's work here, or somebody's newest in the chain, has this payload. What
        is still on its way does not count: a header costs nothing."""
        here = (held for held in self._held.values() if held.ticket is not None)
        others = (held.header.payload_digest for held in here if held.child != header.learner)
        return self._chain.marks.is_copy(header.payload_digest) or header.payload_digest in others

    def _judge_place(self, header: ContributionHeader, now: float) -> Verdict | None:
        held, learner = self._held.get(header.learner), header.learner
        if held is None or not isinstance(held.header, ContributionHeader):
            room = self._has_room(learner) or self._place_for(learner)
            return None if room and self.in_turn(learner, now) else Verdict.FULL
        if held.header.stamp == header.stamp:
            return Verdict.ALREADY_HELD if held.ticket is not None else Verdict.IN_TRANSFER
        # Of an earlier life of the learner: that one is merged first, both are its own work.
        return Verdict.BEHIND if held.header.stamp < header.stamp else Verdict.OVERLAP

    def _has_room(self, learner: str) -> bool:
        room, roster = ROOM * self._shared.config.group_size, self._context.roster
        if len(self._held) >= room + (learner in roster.seats):  # without a seat's work there is no merge
            return False
        return learner in roster.known or 2 * sum(child not in roster.known for child in self._held) < room

    def _place_for(self, learner: str) -> Held | None:
        """Find an offer on its way that gives way to that learner, which was merged before: its author never
        was, and a header costs nothing."""
        marks, seats = self._chain.marks, self._context.roster.known
        gives_way = (
            held
            for child, held in self._held.items()
            if learner in marks and held.ticket is None and child not in marks and child not in seats
        )
        return next(gives_way, None)

    def awaits(self, child: str, now: float) -> bool:
        roster = self._context.roster  # that a newcomer trains is its own word
        return child in roster.known or (roster.attends(child) and self.in_turn(child, now))

    def in_turn(self, child: str, now: float) -> bool:
        newest = self._chain.marks.number(child)
        return child in self._context.roster.known or newest <= self._chain.head.number - self._pause(now)

    def _pause(self, now: float) -> int:
        """Compute how many versions a learner without a seat lets pass after one with its work, so that all
        such learners here have their turns in the room for them."""
        live, roster = self._context.leaf.electorate.expected(now), self._context.roster
        return self._derived.of("pause", self._count_pause, live, roster.known, roster.marks)

    def _count_pause(self, live: list[str], known: frozenset[str], _marks: Marks) -> int:
        guests, room = [each for each in live if each not in known], ROOM * self._shared.config.group_size
        lately = sum(map(self._context.roster.attends, guests))
        places = room // 2 - (lately < len(guests))  # one is left to newcomers
        return min(lately, len(guests) - 1) // places

    def add(self, signed: SignedOffer, transfer: int, in_time: bool, now: float) -> Held:
        assert isinstance(signed, SignedContribution)
        header = signed.header
        if not self._has_room(header.learner) and (other := self._place_for(header.learner)):
            self.drop(other)
        starts = in_time and header.due and header.base_number == self._chain.head.number
        begins = starts and self.awaits(header.learner, now)
        parts = (signed.contributor(),)
        held = Held(header.learner, header.learner, signed, parts, transfer, starts, begins, now)
        self._held[header.learner] = held
        return held


class GroupInbox(Inbox):
    """Inbox of a syncer above the leaves: partial merges, at most one for each group below."""

    def __init__(self, context: FragmentContext, electorate: Electorate) -> None:
        super().__init__(context)
        self._electorate = electorate

    def judge(
        self, signed: SignedOffer, sender: str, holding: bool, open_: bool, now: float
    ) -> Verdict | None:
        assert isinstance(signed, SignedPartial)  # contributions go to the leaf group's round
        header = signed.header
        if header.syncer != sender:
            return Verdict.FALSE_SYNCER
        # Cheap reasons first: a label may be megabytes long.
        if not holding:
            return Verdict.NOT_SYNCER
        if self._electorate.child_of(sender, now) != header.group:
            return Verdict.NOT_HEARD_OF
        if sender != self._shared.me and not self._shared.signed_by(
            sender, "partial", header, signed.signature
        ):
            return Verdict.BAD_SIGNATURE
        # Sizes of partials are the environment's to check: the core does not know them.
        learners = {part.learner for part in header.parts}
        if len(learners) != len(header.parts):
            return Verdict.REPEATED_LEARNER
        if any(part.stamp <= part.after for part in header.parts):
            return Verdict.FALSE_STAMP
        config = self._shared.config
        if not all(
            plausible_work(part.tokens, part.inner_steps, config.tokens_per_step, config.inner_steps)
            for part in header.parts
        ):
            return Verdict.IMPLAUSIBLE_TOKENS
        if not self._electorate.all_below(header.group, learners):
            return Verdict.OTHER_GROUP
        if not self._can_be_made(header):
            return Verdict.FALSE_PARTIALS
        if sender != self._shared.me and not self._signed_inside(header):
            return Verdict.BAD_SIGNATURE
        reason = self._why_not_base(header.number, header.digest)
        if reason is not None:
            return reason
        for part in header.parts:
            mark = self._chain.marks.stamp(part.learner)
            if mark != part.after:
                return Verdict.OVERLAP if mark > part.after else Verdict.BEHIND
            if not stamp_follows(part.stamp, mark):
                return Verdict.FALSE_STAMP
            if not rightly_stated(self._chain, part):
                return Verdict.IMPLAUSIBLE_WEIGHT
        limits = limits_after(self._chain, config)
        if not all(each.near(limits) for each in (header.limits, *_limits(header.below))):
            return Verdict.IMPLAUSIBLE_WEIGHT
        return self._judge_place(header, open_)

    def fits(self, held: Held) -> bool:
        """Tell whether it follows from the chain as of any inbox, its trust weights too: where another chain
        took the place of ours, everybody would refuse a version with those of the old one."""
        return super().fits(held) and all(rightly_stated(self._chain, part) for part in held.parts)

    def _can_be_made(self, header: PartialHeader) -> bool:
        """Tell whether it can be the merge of the partials that it names, in the order in which a version
        names its contributors: signatures cover that."""
        learners = [part.learner for part in header.parts]
        plan = plan_of(self._chain.header, self._shared.config)
        said = len(_limits(header.below)) == len(header.below)
        return said and learners == sorted(learners) and header.tree(plan) is not None

    def _signed_inside(self, header: PartialHeader) -> bool:
        """Tell whether those whose work is in it say so themselves. Who puts it into a version answers for
        that."""
        shared, plan = self._shared, plan_of(self._chain.header, self._shared.config)
        tree = header.tree(plan) or {}
        below = [part for group, part in tree.items() if group != header.group]
        by_syncers = all(signed_by_syncer(shared, self._fragment, part, header.limits) for part in below)
        return by_syncers and signed_by_learners(shared, self._fragment, header.parts)

    def _judge_place(self, header: PartialHeader, open_: bool) -> Verdict | None:
        # At most one for each group below, and no two of these have a learner in common.
        others = [other for child, other in self._held.items() if child != header.group]
        parts = sum(len(other.parts) for other in others) + len(header.parts)
        partials = sum(len(other.partials) for other in others) + 1 + len(header.below)
        if parts > MAX_CONTRIBUTORS or partials > MAX_PARTIALS:
            return Verdict.FULL  # a header that names more could be read by nobody
        held = self._held.get(header.group)
        if held is None:
            return None
        if held.header == header:
            return Verdict.ALREADY_HELD if held.ticket is not None else Verdict.IN_TRANSFER
        return None if open_ else Verdict.CLOSING  # the group merged again: more of its members are in

    def add(self, signed: SignedOffer, transfer: int, in_time: bool, now: float) -> Held:
        header = signed.header
        assert isinstance(header, PartialHeader)
        replaced = self._held.get(header.group)
        if replaced is not None:
            self.drop(replaced)
        starts = in_time and header.due and header.number == self._chain.head.number
        begins = False  # whoever sends partials makes them when it is called
        held = Held(header.group, header.syncer, signed, header.parts, transfer, starts, begins, now)
        self._held[header.group] = held
        return held


def _limits(partials: Iterable[MergedPartial]) -> list[MergeLimits]:
    return [entry.limits for entry in partials if entry.limits is not None]


class Admission:
    """Admission of offers to one group's inbox: answers to their headers, then to their payloads.

    `open_`: whether the round takes offers in that begin it.
    """

    def __init__(self, context: FragmentContext, office: Tenure, inbox: Inbox) -> None:
        self._shared = context.shared
        self._fragment = context.index
        self._office = office
        self._inbox = inbox

    def offered(
        self, transfer: int, sender: str, signed: SignedOffer, open_: bool, now: float
    ) -> Held | None:
        """Judge what a peer wants to stream to us. None: it is refused, and told so."""
        refusal = self._judge(signed, sender, open_, now)
        if refusal is not None:
            self._shared.out.put(AnswerTransfer(transfer, self._fragment, refusal))
            self._count(refusal, sender)
            return None
        held = self._inbox.add(signed, transfer, open_, now)
        self._shared.out.put(AcceptTransfer(transfer, self._fragment, signed.header.payload_bytes))
        return held

    def own(self, signed: SignedOffer, ticket: Ticket, open_: bool, now: float) -> Verdict | None:
        """Take what this node made itself: no stream is needed. Returns why not, or None."""
        refusal = self._judge(signed, self._shared.me, open_, now)
        if refusal is not None:
            return refusal
        held = self._inbox.add(signed, 0, open_, now)
        self._inbox.here(held, ticket, True, now)
        return None

    def received(self, transfer: int, ticket: Ticket, now: float) -> Held | None:
        """Take the sound payload of an accepted transfer. None: it is not wanted any more, and told so."""
        held, out = self._inbox.arriving(transfer), self._shared.out
        if held is not None and self._office.holding and self._inbox.fits(held):
            self._inbox.here(held, ticket, False, now)
            return held
        refusal = Verdict.FULL if self._office.holding else Verdict.NOT_SYNCER
        if held is not None and self._office.holding:
            # The chain changed while the payload was under way: it may contain this work already.
            refusal = Verdict.CHAIN_MOVED
            self._inbox.drop(held)
        out.put(AnswerTransfer(transfer, self._fragment, refusal))
        out.put(Release(ticket))
        return None

    def broken(self, transfer: int, verdict: Verdict) -> bool:
        """Forget an accepted transfer that came to nothing: cut, or its payload was not sound. False: it was
        not waited for."""
        held = self._inbox.arriving(transfer)
        if held is None:
            return False
        self._inbox.drop(held)
        self._count(verdict, held.author)
        return True

    def unusable(self, merged: tuple[Held, ...], found: Unusable) -> bool:
        """Refuse those of `merged` in which the merge found a fault; the same are not admitted again, unless
        they were damaged here. False: there are none."""
        faults = dict(found)
        faulty = [(held, faults[held.ticket]) for held in merged if held.ticket in faults]
        for held, verdict in faulty:
            if verdict is Verdict.DAMAGED and not held.own:
                self._inbox.drop(held)  # its learner has it whole
            else:
                self._inbox.unusable(held, verdict)
            self._count(verdict, held.author)
        return bool(faulty)

    def _judge(self, signed: SignedOffer, sender: str, open_: bool, now: float) -> Verdict | None:
        refusal = self._inbox.judge(signed, sender, self._office.holding, open_, now)
        return refusal or self._inbox.fault(signed.header.payload_digest)

    def _count(self, verdict: Verdict, peer: str) -> None:
        if verdict.counted:
            self._shared.out.record("refusal", self._fragment, str(verdict), peer=peer)
