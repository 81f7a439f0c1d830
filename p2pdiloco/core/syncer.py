"""Syncer of a group: which offers it takes in, and how what is in becomes a version.

An `Inbox` holds the offers that `Admission` lets in. A closed round is a `Job` for a `Merger`: the
`Publisher` in the topmost group, a delegate in all others.

Rules: docs/protocol/rounds.md, sections 1, 4 and 6; docs/protocol/weights.md, section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from p2pdiloco.core.api.events import (
    AcceptTransfer,
    AnswerTransfer,
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
    ContributionHeader,
    Contributor,
    Head,
    SignedContribution,
    Ticket,
    plausible_work,
)
from p2pdiloco.core.api.versions import (
    MergedPartial,
    PartialHeader,
    SignedOffer,
    SignedPartial,
    SignedVersion,
    VersionHeader,
    in_a_version,
    sample_seed,
)
from p2pdiloco.core.base import Shared
from p2pdiloco.core.chain import Chain, Marks, limits_after, plan_after, scale_after, stamp_follows
from p2pdiloco.core.context import FragmentContext, Tenure
from p2pdiloco.core.contributions import ContributionQueue, commit_effect
from p2pdiloco.core.members import Derived
from p2pdiloco.core.pending import signed_by_learners
from p2pdiloco.util import BoundedDict

ROOM = 4
"""Room of an inbox, as a multiple of `group_size`, which is what a group has on average. Half of it is for
seats: headers cost strangers nothing."""
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


Unusable = tuple[tuple[Ticket, Verdict], ...]
"""Inputs in which a merge found a fault, by their tickets."""


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

    def hurry(self, now: float) -> None:
        """Do not wait any longer: the group above calls and has nothing of us."""


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
            return None if room and self._in_turn(learner, now) else Verdict.FULL
        if held.header.stamp == header.stamp:
            return Verdict.ALREADY_HELD if held.ticket is not None else Verdict.IN_TRANSFER
        # Of an earlier life of the learner: that one is merged first, both are its own work.
        return Verdict.BEHIND if held.header.stamp < header.stamp else Verdict.OVERLAP

    def _has_room(self, learner: str) -> bool:
        room, seats = ROOM * self._shared.config.group_size, self._context.roster.known
        if learner in seats:
            return len(self._held) < room
        return 2 * sum(child not in seats for child in self._held) < room

    def _place_for(self, learner: str) -> Held | None:
        """Find an offer on its way that gives way to that learner, which was merged before: its author never
        was, and a header costs nothing."""
        marks, seats = self._chain.marks, self._context.roster.known
        coming = (held for held in self._held.values() if held.ticket is None and learner in marks)
        return next((held for held in coming if held.child not in marks and held.child not in seats), None)

    def awaits(self, child: str, now: float) -> bool:
        roster = self._context.roster  # that a newcomer trains is its own word
        return child in roster.known or (roster.attends(child) and self._in_turn(child, now))

    def _in_turn(self, child: str, now: float) -> bool:
        known, newest = self._context.roster.known, self._chain.marks.number(child)
        return child in known or newest <= self._chain.head.number - self._pause(now)

    def _pause(self, now: float) -> int:
        """Compute how many versions a learner without a seat lets pass after one with its work, so that all
        such learners here have their turns in the room for them."""
        live, roster = self._context.leaf.electorate.expected(now), self._context.roster
        return self._derived.of("pause", self._count_pause, live, roster.known, roster.marks)

    def _count_pause(self, live: list[str], known: frozenset[str], _marks: Marks) -> int:
        guests, room = [each for each in live if each not in known], ROOM * self._shared.config.group_size
        lately = sum(map(self._context.roster.attends, guests))
        return min(lately, len(guests) - 1) // (room // 2)

    def add(self, signed: SignedOffer, transfer: int, in_time: bool, now: float) -> Held:
        assert isinstance(signed, SignedContribution)
        header = signed.header
        if not self._has_room(header.learner) and (other := self._place_for(header.learner)):
            self.drop(other)
        starts = in_time and header.due and header.base_number == self._chain.head.number
        begins = starts and header.learner not in self._cut and self.awaits(header.learner, now)
        parts = (signed.contributor(),)
        held = Held(header.learner, header.learner, signed, parts, transfer, starts, begins, now)
        self._held[header.learner] = held
        return held


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
        self._inbox.broken(held)
        self._count(verdict, held.author)
        return True

    def unusable(self, merged: tuple[Held, ...], found: Unusable) -> bool:
        """Refuse those of `merged` in which the merge found a fault; the same are not admitted again, unless
        they were damaged here. False: there are none."""
        faults = dict(found)
        faulty = [(held, faults[held.ticket]) for held in merged if held.ticket in faults]
        for held, verdict in faulty:
            if verdict is Verdict.DAMAGED and not held.own:
                self._inbox.broken(held)  # its learner has it whole
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
        """Merge what is in, and make the outer step into the spare copy. Where we yielded to a lighter chain,
        we may have signed a version of this parent already: others have it, and a second one in the same term
        would be a lie."""
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

    def hurry(self, now: float) -> None:
        """Do nothing: no group is above us."""

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
        marks = self._chain.marks.after(job.number, parts)
        if job.term != self._chain.header.term:
            papers = self._context.roster.to_carry(job.number, marks, self._shared.excluded.proofs)
            marks = self._chain.marks.after(job.number, parts, papers)
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
            papers=papers,
        )
        return SignedVersion(header, self._shared.sign("version", header))

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


IN_VAIN = 3
"""Versions that wait for a newcomer whose head does not move. Whoever has come no further in all that time
(16 sync intervals each) does not take them."""
MOST = 16
"""Versions that wait for a newcomer in all, before anything of it is merged."""
MAX_PEERS = 4096


class _Lag:
    """Versions that waited for one newcomer."""

    __slots__ = ("at", "number", "vain", "waited")

    def __init__(self) -> None:
        self.at = self.number = -1
        self.vain = self.waited = 0


class Laggards:
    """Newcomers for which a syncer that would merge alone lets the next version wait.

    They have not said that they hold our last version, and what they say is their own word. Without a bound a
    silent stranger would slow a lone node as much as it can.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._lags: BoundedDict[str, _Lag] = BoundedDict(MAX_PEERS)

    def waits_for(self, peer: str, named: Head | None, chain: Chain) -> bool:
        """Tell whether the version after the chain's head waits for that peer, which named this head."""
        if self._shared.has_seat(peer):
            self._lags.pop(peer, None)
            return True
        lag = self._lags.setdefault(peer, _Lag())
        at = named.number if named is not None and chain.knows(named.number, named.digest) else lag.at
        if at > lag.at:
            lag.at, lag.vain = at, 0
        if lag.number != chain.head.number:
            lag.number = chain.head.number
            lag.vain, lag.waited = min(lag.vain + 1, IN_VAIN + 1), min(lag.waited + 1, MOST + 1)
        return lag.vain <= IN_VAIN and lag.waited <= MOST
