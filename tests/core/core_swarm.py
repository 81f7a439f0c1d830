"""Several cores in memory, for happy paths: every message arrives at once, every job succeeds at once.
Weather, crashes and partitions are the simulator's business."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

from kit import STEP_S, digest, restored_nothing
from msgspec import Struct

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.config import CoreConfig
from p2pdiloco.core.api.reasons import FetchFailure
from p2pdiloco.core.api.versions import MemberList, SignedPartial, SignedVersion
from p2pdiloco.core.node import Core
from p2pdiloco_lab.simulation.lineage import HashCrypto


class Member:
    """A core with a state digest per fragment instead of tensors."""

    def __init__(self, swarm: Swarm, peer: str, genesis: bool) -> None:
        self.peer, self.swarm = peer, swarm
        self.states = [v.header.state_digest for v in swarm.config.genesis_versions]
        self.spares = list(self.states)
        self.log: dict[tuple[int, int], tuple[SignedVersion, int]] = {}
        rng, nothing = random.Random(peer), restored_nothing(swarm.config)
        self.core = Core(swarm.config, peer, 1, HashCrypto(peer), rng, nothing, genesis, swarm.now)
        self.commits: list[ev.CommitVersion] = []

    def heads(self) -> list[bytes]:
        """Digests of all fragments' heads."""
        return [f.chain.head.digest for f in self.core.fragments]


class Swarm:
    """Members, one clock, and a queue of what is to be handled next."""

    def __init__(self, config: CoreConfig) -> None:
        self.config, self.now, self._number = config, 1000.0, 0
        self.members: dict[str, Member] = {}
        self.on_effect: Callable[[Member, ev.Effect], None] = lambda member, effect: None
        self._queue: deque[tuple[str, ev.Event]] = deque()
        self._offers: dict[int, tuple[str, ev.Offer]] = {}
        self.tokens: dict[int, ev.Ask] = {}
        """What is not answered yet, by the identity of the effect."""
        self.sums: dict[int, tuple[str, ...]] = {}
        """Ticket of a partial merge -> learners in it, as often as they are in it."""
        self.too_long: set[str] = set()
        """Learners whose contributions partial merges cut."""

    def join(self, peer: str, genesis: bool = False) -> Member:
        """A new member whose learner runs."""
        self.members[peer] = Member(self, peer, genesis)
        self.list_members()
        self._queue.append((peer, ev.LearnerStatus(True, 1, 10, 10 / STEP_S, STEP_S, 3.0)))
        self.run(0.0)
        return self.members[peer]

    def list_members(self) -> None:
        """The DHT lists those that are here."""
        roster = MemberList(tuple((name, 1) for name in self.members))
        for name in self.members:
            self._queue.append((name, ev.PresenceSeen(roster)))

    def kill(self, peer: str) -> None:
        """Gone without a word; nobody can be told anything by it or tell it anything."""
        del self.members[peer]

    def contribute(self, *peers: str, fragment: int = 0) -> None:
        """These learners made H inner steps."""
        for peer in peers or tuple(self.members):
            ticket = self.number()
            payload = digest("payload", peer, ticket)
            self.post(peer, ev.ContributionReady(fragment, ticket, 40, 4, payload, 100, True))

    def number(self) -> int:
        """A fresh ticket or transfer."""
        self._number += 1
        return self._number

    def post(self, peer: str, event: ev.Event) -> None:
        """Something happens to a member."""
        self._queue.append((peer, event))

    def run(self, seconds: float) -> None:
        """Handle all that there is, and every deadline of the time."""
        end = self.now + seconds
        while True:
            while self._queue:
                peer, event = self._queue.popleft()
                member = self.members.get(peer)
                for effect in member.core.handle(event, self.now) if member else ():
                    self._carry_out(member, effect)
            due = {peer: m.core.next_deadline() for peer, m in self.members.items()}
            first = min(due, key=lambda peer: due[peer])
            if due[first] > end:
                self.now = end
                return
            self.now = max(self.now, due[first])
            self.post(first, ev.Tick())

    def _carry_out(self, member: Member | None, effect: ev.Effect) -> None:
        assert member is not None
        if isinstance(effect, ev.Ask):
            self.tokens[id(effect.effect)] = effect
            effect = effect.effect
        self.on_effect(member, effect)
        handler = getattr(self, f"_{type(effect).__name__}", None)
        if handler is not None:
            handler(member, effect)

    def answer(self, peer: str, asked: ev.Effect, answer: Struct | None) -> None:
        """That is what came of a member's effect."""
        self.post(peer, ev.Answered(self.tokens.pop(id(asked)).token, answer))

    def _Send(self, member: Member, effect: ev.Send) -> None:
        there = effect.peer in self.members
        to, event = effect.peer, ev.MessageReceived(member.peer, effect.message)
        self._queue.append((to, event) if there else (member.peer, ev.SendFailed(effect.peer)))

    def _Persist(self, member: Member, effect: ev.Persist) -> None:
        for following in effect.then:
            self._carry_out(member, following)
        self.answer(member.peer, effect, None)

    def _RequestFragment(self, member: Member, effect: ev.RequestFragment) -> None:
        self.post(member.peer, ev.NothingToContribute(effect.fragment))

    def _Offer(self, member: Member, effect: ev.Offer) -> None:
        if effect.peer not in self.members:
            self.answer(member.peer, effect, ev.Undone("nobody is there"))
            return
        transfer = self.number()
        self._offers[transfer] = (member.peer, effect)
        self.post(effect.peer, ev.Offered(transfer, member.peer, effect.signed))

    def _AcceptTransfer(self, member: Member, effect: ev.AcceptTransfer) -> None:
        offer, ticket = self._offers[effect.transfer][1], self.number()
        if isinstance(offer.signed, SignedPartial):
            self.sums[ticket] = self.sums[offer.ticket]
        self.post(member.peer, ev.PayloadReceived(effect.transfer, ticket))

    def _AnswerTransfer(self, member: Member, effect: ev.AnswerTransfer) -> None:
        sender, offer = self._offers.pop(effect.transfer)
        head = member.core.fragments[effect.fragment].chain.head
        self.answer(sender, offer, ev.OfferAnswered(effect.verdict, head))

    def _Merge(self, member: Member, effect: ev.Merge) -> None:
        update = digest("update", self.merged(effect))
        self._outer_step(member, effect.fragment, update)
        state = member.spares[effect.fragment]
        self.answer(member.peer, effect, ev.Merged(self.number(), update, 100, state))

    def merged(self, effect: ev.Merge | ev.MergePartial) -> tuple[str, ...]:
        """The learners whose work is added up, as often as it is."""
        own = [i.contributor.learner for i in effect.inputs]
        return tuple(sorted([*own, *(peer for below in effect.partials for peer in self.sums[below.ticket])]))

    def _MergePartial(self, member: Member, effect: ev.MergePartial) -> None:
        ticket = self.number()
        self.sums[ticket] = self.merged(effect)
        payload = digest("sums", self.sums[ticket])
        cut = tuple(sorted(self.too_long & {*self.sums[ticket]}))
        self.answer(member.peer, effect, ev.PartialMerged(ticket, payload, 400, cut))

    def _outer_step(self, member: Member, fragment: int, update: bytes) -> None:
        member.spares[fragment] = digest(member.states[fragment], update)

    def _FetchUpdate(self, member: Member, effect: ev.FetchUpdate) -> None:
        holder = self.members.get(effect.peer)
        entry = holder.log.get((effect.fragment, effect.number)) if holder else None
        if entry is None:
            reason = FetchFailure.GONE if holder else FetchFailure.UNREACHABLE
            self.answer(member.peer, effect, ev.FetchFailed(reason))
            return
        self.answer(member.peer, effect, ev.UpdateFetched(entry[0], self.number()))
        self._outer_step(member, effect.fragment, entry[0].header.update_digest)

    def _ApplyUpdate(self, member: Member, effect: ev.ApplyUpdate) -> None:
        self.answer(member.peer, effect, ev.UpdateApplied(member.spares[effect.fragment]))

    def _FetchState(self, member: Member, effect: ev.FetchState) -> None:
        holder = self.members.get(effect.peer)
        if holder is None:
            self.answer(member.peer, effect, ev.FetchFailed(FetchFailure.UNREACHABLE))
            return
        chain = holder.core.fragments[effect.fragment].chain
        member.spares[effect.fragment] = holder.states[effect.fragment]
        self.answer(member.peer, effect, ev.StateFetched(chain.signed, chain.marks.table))

    def _CommitVersion(self, member: Member, effect: ev.CommitVersion) -> None:
        header = effect.version.header
        assert member.spares[header.fragment] == header.state_digest, "the state that the header names"
        member.states[header.fragment] = member.spares[header.fragment]
        if effect.update is not None:
            member.log[(header.fragment, header.number)] = (effect.version, effect.update)
        member.commits.append(effect)
        self.post(member.peer, ev.LearnerApplied(header.fragment, header.number, 1))
