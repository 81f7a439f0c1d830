"""Groups of a run that does not fit into one: their partial merges, their syncers, their members.

A `Delegate` brings the partial merges of one group to the syncer of the group above. `Seeking` finds the
syncers of neighbouring groups. `LeafElectorate` and `UpperElectorate` know who is in a group, as this node
sees it.

Rules: docs/protocol/groups.md, sections 3, 4 and 6.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from p2pdiloco.core.api.events import MergePartial, Offer, OfferAnswered, PartialMerged, Release, Undone
from p2pdiloco.core.api.messages import OfficeQuery
from p2pdiloco.core.api.reasons import Suspicion, Then
from p2pdiloco.core.api.types import (
    MAX_PEERS,
    Certificate,
    Contributor,
    MergeLimits,
    Ticket,
)
from p2pdiloco.core.api.versions import (
    PartialHeader,
    Plan,
    SignedPartial,
)
from p2pdiloco.core.base import Shared
from p2pdiloco.core.candidates import ranking
from p2pdiloco.core.chain import limits_after, rightly_stated
from p2pdiloco.core.context import Electorate, FragmentContext, Tenure
from p2pdiloco.core.distrust import backoff_s
from p2pdiloco.core.members import Derived
from p2pdiloco.core.pending import SendState, Underway
from p2pdiloco.core.publisher import Hierarchy, Job, MergedParts
from p2pdiloco.core.roster import Roster
from p2pdiloco.core.voting import are_signed, counting
from p2pdiloco.util import BoundedDict, MovingAverage


class Partial(Underway):
    """Partial merge that is not yet beyond doubt."""

    def __init__(self, job: Job, making: MergedParts, limits: MergeLimits, merged: PartialMerged) -> None:
        super().__init__()
        self.limits = limits
        self.ticket: Ticket = merged.ticket
        self.digest, self.size = merged.payload_digest, merged.payload_bytes
        self.parts: tuple[Contributor, ...] = making.listed(merged.measured)
        self.below = making.merged
        self.due = job.due


class Delegate:
    """Maker and sender of the partial merges of one group of which we are the syncer.

    A closed round of a group that is not the topmost is merged into one partial. It goes to the syncer of the
    group above as a contribution goes to its syncer: offered, held there, sent again if that syncer is
    replaced. It is kept until the chain moves past it: contains its parts, or something that contradicts
    them. What it was made of stays in the group's inbox as long, so that the group can merge again what is
    still unmerged.

    - WAITING: to be sent (no syncer above, or a pause after a refusal)
    - OFFERED: on its way to the syncer above
    - HELD: the syncer above has it; a version that contains it is due
    """

    makes_version = False

    def __init__(self, context: FragmentContext, group: str, level: int, hierarchy: Hierarchy) -> None:
        self._context = context
        self._shared = context.shared
        self._fragment = context.index
        self._group = group
        self._level = level
        self._hierarchy = hierarchy
        self._job: Job | None = None
        """Newest job: another chain of the same length may have ended the one before it."""
        self.partial: Partial | None = None
        self._round_s = MovingAverage()

    @property
    def _above(self) -> Tenure | None:
        """Office of the group above, if we have a seat there."""
        return self._hierarchy.office_above(self._level)

    # --- making it -----------------------------------------------------------------------------------

    def begin(self, job: Job, missing: int, expected: int) -> None:
        """Add up what is in."""
        self._job, making = job, MergedParts(job, self._context.chain.marks)
        self._shared.out.record(
            "partial",
            self._fragment,
            f"{len(job.held)} of {expected} of our group" + (", grace is over" if missing else ""),
            number=job.number,
            group=self._group,
            contributors=sum(len(held.parts) for held in job.held),
            live=expected,
        )
        limits = limits_after(self._context.chain, self._shared.config)
        merge = MergePartial(self._fragment, making.inputs, making.partials, limits, making.seed())
        self._shared.out.ask(merge, functools.partial(self._merged, job, making, limits), self._fragment)

    def _merged(
        self,
        job: Job,
        making: MergedParts,
        limits: MergeLimits,
        answer: PartialMerged | Undone,
        now: float,
    ) -> None:
        """Send the sums, which are ready, to the syncer above."""
        wanted = job is self._job and job.round.awaits(job.term, job.number)
        if isinstance(answer, Undone):
            self._shared.out.record("partial", self._fragment, f"failed: {answer.reason}", group=self._group)
            if wanted:
                job.round.failed(answer.reason, now, answer.unusable)
            return
        if not wanted:
            self._shared.out.put(Release(answer.ticket))
            return
        self._drop()
        self.partial = Partial(job, making, limits, answer)
        job.round.merge_done()
        self._shared.out.cut(self._fragment, answer.cut, self._shared.me)

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
            offer = Offer(syncer, signed, partial.ticket)
            partial.sends(offer)
            shared.out.ask(offer, functools.partial(self._answered, partial, offer), self._fragment)
        elif self._hierarchy.hand_up(self._level, signed, partial.ticket, now).taken:
            self._accepted(partial, now)
        else:
            partial.retry(now, shared.timing.retry_s)

    def _answered(self, partial: Partial, offer: Offer, answer: OfferAnswered | Undone, now: float) -> None:
        """Take in the word of the syncer above, unless the partial is not with it any more."""
        if partial is not self.partial or partial.offer is not offer:
            return
        if isinstance(answer, Undone):
            partial.retry(now, self._shared.timing.retry_s)
            return
        if answer.verdict.taken:
            self._accepted(partial, now)
            return
        words = f"refused: {answer.verdict}"
        self._shared.out.record("partial", self._fragment, words, syncer=offer.peer, group=self._group)
        office = self._above
        again = answer.verdict.then is Then.DOUBT and partial.attempts > 1
        if again and office is not None and partial.peer == office.syncer:
            office.suspect(Suspicion.NOT_IN_OFFICE)
        partial.retry(now, self._shared.timing.retry_s)

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

    def chain_moved(self, now: float) -> None:
        """Keep it only if the chain contains nothing of it, and everything before it, and its trust weights
        follow from the chain: another one may have taken the place of ours."""
        partial = self.partial
        if partial is None:
            return
        chain = self._context.chain
        if any(
            chain.marks.stamp(p.learner) != p.after or not rightly_stated(chain, p) for p in partial.parts
        ):
            if partial.offered_s:
                self._round_s.add(now - partial.offered_s)
            self._drop()

    def withdraw(self, now: float) -> bool:
        """Forget the partial: the office is lost, and learners send to our successor."""
        self._drop()
        return True

    def _drop(self) -> None:
        if self.partial is not None:
            self._hierarchy.take_back(self._level, self._group)
            self._shared.out.put(Release(self.partial.ticket))
            self.partial = None


TRIES_EACH = 3
"""Questions to a probable member before the next is asked: whoever is elected there, it will know."""
ASKED_PER_CHILD = 8
"""Limit of peers asked in `member_ttl_s`, per group below: strangers' certificates may name any number."""


class _Search:
    """Search for the syncer of one group."""

    __slots__ = ("at_s", "tries")

    def __init__(self) -> None:
        self.at_s = -1e18
        self.tries = 0


class Seeking:
    """Searches of one seat above the leaves for the syncers of the neighbouring groups, when groups are new.

    The holder of a group's office asks, for every group beside its own whose syncer it does not know, one
    probable member after the other, each several times. A member that knows the certificate sends it. One
    that knows only that of a smaller group inside sends that one, and its holder is asked next. The asked one
    also learns of the asker: that saves it the search, and a group of newcomers only would hear of no
    confirmed member otherwise (docs/protocol/groups.md, section 6).
    """

    def __init__(self, context: FragmentContext, plan: Plan, electorate: UpperElectorate) -> None:
        self._context = context
        self._shared = context.shared
        self._plan = plan
        self._electorate = electorate
        self._searches: dict[str, _Search] = {}
        self._asked: dict[str, float] = {}
        """Time at which each peer was asked: it is kept for `member_ttl_s`, and searches back off."""

        self.due_s: float | None = None
        """Time at which the next one is to be asked."""

    def poll(self, now: float) -> None:
        """Ask for those that are unknown, each in its time."""
        self.due_s = None
        for child in self._electorate.unknown(now):
            search = self._searches.setdefault(child, _Search())
            if now >= search.at_s:
                peer = self._whom(child, search.tries)
                search.tries += 1
                search.at_s = now + backoff_s(self._shared.timing.retry_s, search.tries)
                if peer:
                    self._ask(peer, child, now)
            self.due_s = search.at_s if self.due_s is None else min(self.due_s, search.at_s)

    def neighbours(self, now: float) -> list[str]:
        """List the peers that we asked lately."""
        kept_s = self._shared.timing.member_ttl_s
        self._asked = {peer: at_s for peer, at_s in self._asked.items() if now - at_s < kept_s}
        return list(self._asked)

    def learned(self, certificate: Certificate, now: float) -> None:
        """Take in a certificate of a group below, or of one inside it."""
        syncer, electorate = certificate.syncer, self._electorate
        child = next((child for child in electorate.children if electorate.all_below(child, [syncer])), None)
        if child is None or syncer == self._shared.me:
            return  # made up: nobody of another group holds an office in this one
        below = certificate.group == child
        if below:
            known = electorate.shown(child, syncer, certificate.term)
            if known is None or not known[0]:
                self._proven(certificate)
        elif child not in electorate.unknown(now):
            return
        if self._asked.get(syncer, -1e18) > now - 0.1:
            return
        if below:
            self._note(syncer, now)
        else:
            self._ask(syncer, child, now)

    def claimed(self, peer: str, child: str, term: int, now: float) -> None:
        """Ask for the certificate of a claim that has shown none."""
        due_s = self._asked.get(peer, -1e18) + self._shared.timing.query_s
        if now >= due_s and not self._electorate.shown(child, peer, term):
            self._ask(peer, child, now)

    def meet(self, now: float) -> None:
        """Ask those that claim the offices below."""
        for child in self._electorate.children:
            for peer, term in self._shared.claims.of(self._context.index, child).items():
                self.claimed(peer, child, term, now)

    def _proven(self, certificate: Certificate) -> None:
        """Note which part of its group has elected that syncer."""
        proof = counting(certificate, self._context.chain.marks.seats)
        voted, parts = self._context.voted(proof)
        if voted and are_signed(self._context, proof):
            most, term = 2 * voted > parts, proof.term
            self._electorate.prove(proof.group, proof.syncer, (most, term if most else voted, term))

    def _ask(self, peer: str, child: str, now: float) -> None:
        if self._note(peer, now):
            self._shared.out.send(peer, OfficeQuery(child, self._context.index, 0))

    def _note(self, peer: str, now: float) -> bool:
        """Count a peer among our neighbours for a while. False: what we were told has led to too many
        already."""
        if peer not in self._asked and len(self._asked) >= ASKED_PER_CHILD * len(self._electorate.children):
            self.neighbours(now)
            if len(self._asked) >= ASKED_PER_CHILD * len(self._electorate.children):
                return False
        self._asked[peer] = now
        self._shared.notices.greet(peer)
        return True

    def _whom(self, child: str, tries: int) -> str:
        """Choose whom to ask: first the one that is ranked first in the election there, then the others."""
        shared, fragment = self._shared, self._context.index
        run, span = shared.config.run, self._electorate.children[child]
        turn = tries // TRIES_EACH
        leaf = span[turn % len(span)]
        mates = shared.listing.leaves(self._plan)[leaf]
        if not mates:
            return ""
        name = self._plan.name(0, leaf)
        order = ranking(run, name, fragment, self._context.chain.head.term + 1, mates)
        return order[turn // len(span) % len(order)]


class LeafElectorate(Electorate):
    """Members of one leaf group."""

    def __init__(
        self,
        shared: Shared,
        roster: Roster,
        plan: Plan,
        index: int,
        since_s: float,
    ) -> None:
        super().__init__(shared, plan.fragment, roster)
        self._plan = plan
        self._index = index
        self._since_s = since_s
        self._mine: BoundedDict[str, bool] = BoundedDict(2 * MAX_PEERS)
        self._derived = Derived()

    def _belongs(self, peer: str) -> bool:
        found = self._mine.get(peer)
        if found is None:
            found = self._plan.leaf_of(peer) == (0, self._index)
            self._mine[peer] = found
        return found

    def _ours(self, name: str, peers: list[str]) -> list[str]:
        return self._derived.of(name, self._belonging, peers)

    def _belonging(self, peers: list[str]) -> list[str]:
        return [peer for peer in peers if self._belongs(peer)]

    def mates(self) -> tuple[str, ...]:
        """List everybody who is listed here."""
        return self._shared.listing.leaves(self._plan)[self._index]

    def _unheard(self, now: float) -> list[str]:
        """List the members that are listed and not heard of yet; believed in for the first seconds of the
        epoch."""
        if now >= self._since_s + self._shared.timing.suspect_s:
            return []
        shared = self._shared
        seats = self._roster.seats
        return [p for p in self.mates() if p in seats and p != shared.me and shared.view.may_come(p, now)]

    def voters(self, now: float) -> list[str]:
        found = self._roster.of("voters", self._ours("voters", self._shared.voters(now)))
        return [peer for peer in found if peer not in self._elsewhere or not self._is_apart(peer)]

    def _is_apart(self, peer: str) -> bool:
        head = self._shared.view.head(peer, self._fragment)
        return head is not None and self._roster.no_way_from(head)

    def admits(self, peer: str, now: float) -> bool:
        return self._belongs(peer)

    def others(self, now: float) -> list[str]:
        return self._ours("members", self._shared.view.members(now))

    def asked(self, now: float) -> list[str]:
        return [*super().asked(now), *self._unheard(now)]

    def candidates(self, now: float) -> list[str]:
        return [*super().candidates(now), *self._unheard(now)]

    def live(self, now: float) -> list[str]:
        return self._ours("live", self._shared.view.live(now))

    def expected(self, now: float) -> list[str]:
        return self._ours("learners", self._shared.expected_learners(now))

    def neighbours(self, now: float) -> frozenset[str]:
        return self._derived.of("neighbours", self._around, self.mates(), self.others(now))

    def _around(self, *peers: Iterable[str]) -> frozenset[str]:
        return frozenset().union(*peers) - {self._shared.me}


class UpperElectorate(Electorate):
    """Syncers of the groups below one group. We are one of them: else we have no seat here."""

    def __init__(
        self,
        shared: Shared,
        roster: Roster,
        plan: Plan,
        place: tuple[int, int],
        own_child: str,
        since_s: float,
    ) -> None:
        super().__init__(shared, plan.fragment, roster)
        self._plan = plan
        self._own_child = own_child
        self._since_s = since_s
        self.children: dict[str, list[int]] = {}
        """Leaf groups in every group below, by its name."""
        for leaf in range(plan.groups):
            child = plan.above((0, leaf), place[0] - 1)
            if plan.above(child, place[0]) == place:
                self.children.setdefault(plan.name(*child), []).append(leaf)
        self._proofs: dict[tuple[str, str], tuple[bool, int, int]] = {}
        """Rank of what claimants have shown, by group and peer: whether more than half of the group voted,
        the term then, else how many parts of it, and the term."""
        self._holders: dict[str, str] = {}
        self._seen_members: list[str] | None = None
        self._seen_claims = -1

    def holders(self, now: float) -> dict[str, str]:
        """Find the groups below whose syncer is known: name -> peer. A live claimant goes before a silent
        one; newcomers alone in a group are heard all the same."""
        shared = self._shared
        members = shared.view.members(now)
        if members is not self._seen_members or shared.claims.version != self._seen_claims:
            self._seen_members, self._seen_claims = members, shared.claims.version
            alive, known = set(shared.view.live(now)), set(members)
            self._holders = {}
            for child in self.children:
                if child == self._own_child:
                    self._holders[child] = shared.me
                    continue
                claims = shared.claims.of(self._fragment, child)
                here = {peer: term for peer, term in claims.items() if peer in known}
                ranked = [(p in alive, *proof, p) for p, proof in self._credible(child, here).items()]
                if ranked:
                    self._holders[child] = max(ranked)[-1]
        return self._holders

    def _credible(self, child: str, claims: dict[str, int]) -> dict[str, tuple[bool, int, int]]:
        """Pick the claims of seats that have shown a certificate, and rank them by who voted."""
        return {
            peer: proof
            for peer, term in claims.items()
            if (proof := self.shown(child, peer, term)) and self._counts(peer)
        }

    def prove(self, child: str, peer: str, rank: tuple[bool, int, int]) -> None:
        """Note what a claimant has shown: the best of its newest term, as anybody may send older ones, and
        leave votes out."""
        known = self._proofs.get((child, peer), rank)
        self._proofs[child, peer] = max(known, rank, key=lambda each: (each[-1], each))
        self._seen_members = None

    def shown(self, child: str, peer: str, term: int) -> tuple[bool, int, int] | None:
        """Find the rank of what that claimant has shown for that term; None: nothing."""
        rank = self._proofs.get((child, peer))
        return rank if rank and rank[-1] == term else None

    def _counts(self, peer: str) -> bool:
        return peer in self._roster.seats

    def _peers(self, now: float, among: list[str]) -> list[str]:
        holders = set(self.holders(now).values())
        return [peer for peer in among if peer in holders]

    def _listed(self, child: str) -> Iterable[str]:
        leaves = self._shared.listing.leaves(self._plan)
        return (peer for leaf in self.children[child] for peer in leaves[leaf])

    def unknown(self, now: float) -> list[str]:
        """List the groups below whose syncer is to be found out."""
        known = self.holders(now)
        return [child for child in self.children if child not in known and any(self._listed(child))]

    def _unheard(self, now: float) -> list[str]:
        """List the unknown ones in which a seat is, while groups are new: the others may be names only."""
        if now >= self._since_s + self._shared.timing.settle_s:
            return []
        return [child for child in self.unknown(now) if any(map(self._counts, self._listed(child)))]

    def voters(self, now: float) -> list[str]:
        others = self._peers(now, self._shared.view.voters(now))
        peers = sorted([*others, self._shared.me]) if self._shared.votes else others
        return self._roster.of("voters", peers)

    def count(self, peers: Iterable[str], now: float) -> int:
        """Count these voters. One that is unknown to us may be the syncer of a group whose syncer is unknown
        to us."""
        given, voters = set(peers), set(self.voters(now))
        unknown = given.difference(voters, self.holders(now).values())
        strangers = self._roster.seats & unknown
        return len(given & voters) + min(len(strangers), len(self._unheard(now)))

    def admits(self, peer: str, now: float) -> bool:
        return peer in self.holders(now).values()

    def others(self, now: float) -> list[str]:
        return self._peers(now, self._shared.view.members(now))

    def live(self, now: float) -> list[str]:
        return self._peers(now, self._shared.view.live(now))

    def expected(self, now: float) -> list[str]:
        live = {*self.live(now), self._shared.me}
        known = [child for child, peer in self.holders(now).items() if peer in live]
        return sorted([*known, *self._unheard(now)])

    def reachable(self, now: float) -> int:
        return len(self.live(now)) + 1

    def all_below(self, child: str, learners: Iterable[str]) -> bool:
        span = self.children.get(child, ())
        return all(self._plan.leaf_of(learner)[1] in span for learner in learners)

    def peer_of(self, child: str, now: float) -> str:
        return self.holders(now).get(child, "")

    def child_of(self, peer: str, now: float) -> str:
        return next((child for child, holder in self.holders(now).items() if holder == peer), "")
