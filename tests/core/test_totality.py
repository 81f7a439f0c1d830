"""`Core.handle` is total: whatever peers say, in any order, late, twice or never, with an environment that
answers in its own time or not at all. Nothing raises, and what must hold at every instant does."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
from core_swarm import Swarm
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from kit import (
    RUN,
    announce,
    branch,
    certificate,
    child,
    config,
    contribution,
    digest,
    found,
    progress,
    restored_nothing,
    vote,
)
from msgspec import Struct
from wire_strategies import contributions, message_strategies

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.config import Restored, RestoredFragment
from p2pdiloco.core.api.events import LeaveRequested
from p2pdiloco.core.api.reasons import FetchFailure, Verdict
from p2pdiloco.core.api.types import WHOLE_RUN, Head, Stamp
from p2pdiloco.core.api.versions import MemberList, SignedVersion
from p2pdiloco.core.inbox import ROOM
from p2pdiloco.core.node import Core
from p2pdiloco_lab.simulation.lineage import HashCrypto

PEERS = ("p1", "p2", "p3")
CONFIG = config(fragments=2, group_size=4, term_versions=2, log_versions=2, max_base_age_versions=1)
POOL = [
    version
    for fragment in (0, 1)
    for version in (*branch(4, fragment), *branch(3, fragment, "p2", term=2, learners=PEERS))
]
"""Versions of two branches that peers may talk of."""
fragments = st.integers(0, 2)
small = st.integers(0, 6)
peers = st.sampled_from(PEERS)
senders = st.sampled_from((*PEERS, "me", "stranger"))
pool = st.sampled_from(POOL)
stamps = st.builds(Stamp, st.integers(0, 2), st.integers(0, 4))
wild = st.one_of(
    *message_strategies(
        groups=st.sampled_from((WHOLE_RUN, WHOLE_RUN, "half")),
        fragments=fragments,
        peers=st.sampled_from((*PEERS, "me", "stranger")),
    ).values()
)
wild_offers = contributions(st.sampled_from((RUN, "other")), fragments, st.sampled_from((WHOLE_RUN, "half")))


class Weather(RuleBasedStateMachine):
    """One core; its peers and its environment do what hypothesis likes."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.incarnation, self.numbers = 50.0, 0, 0
        self.votes: dict[tuple[int, int], str] = {}
        self.restored = restored_nothing(CONFIG)
        self.start()

    def start(self) -> None:
        self.incarnation += 1
        self.open: list[ev.Effect] = []
        """What the environment was asked to do and has not answered."""
        self.tokens: dict[int, int] = {}
        """Token of each of these, by its identity."""
        self.transfers: list[int] = []
        self.tickets: set[int] = set()
        rng, crypto = random.Random(self.incarnation), HashCrypto("me")
        self.core = Core(CONFIG, "me", self.incarnation, crypto, rng, self.restored, True, self.now)
        self.feed(ev.PresenceSeen(MemberList(())))

    def number(self) -> int:
        self.numbers += 1
        return self.numbers

    def ticket(self) -> int:
        ticket = self.number()
        self.tickets.add(ticket)
        return ticket

    def feed(self, event: ev.Event) -> None:
        before = [f.chain.head.weight for f in self.core.fragments]
        for effect in self.core.handle(event, self.now):
            self.carry_out(effect)
        for fragment, weight in zip(self.core.fragments, before, strict=True):
            assert fragment.chain.head.weight >= weight, "only forward"
            assert (
                len(fragment.own._queue) <= 7 and len(fragment.round.inbox._held) <= ROOM * CONFIG.group_size
            )
        assert math.isfinite(self.core.next_deadline())

    def carry_out(self, effect: ev.Effect) -> None:
        match effect:
            case ev.Send(peer, message):
                assert peer != "me"
                self.check_sent(message)
            case ev.Release(ticket) | ev.DiscardContribution(_, ticket) | ev.RetireSlot(_, ticket):
                self.tickets.remove(ticket)
            case ev.CommitVersion(_, int() as ticket):
                self.tickets.remove(ticket)
            case ev.AcceptTransfer(transfer):
                self.transfers.append(transfer)
            case ev.Ask(token, asked):
                self.tokens[id(asked)] = token
                self.carry_out(asked)
                return
            case ev.Merge(_, _, inputs):
                assert inputs and all(part.ticket in self.tickets for part in inputs)
            case ev.Offer(_, _, ticket) | ev.ApplyUpdate(_, _, ticket):
                assert ticket in self.tickets
        slow = ev.Persist | ev.Offer | ev.RequestFragment
        if isinstance(effect, slow | ev.Merge | ev.FetchUpdate | ev.FetchState | ev.ApplyUpdate):
            self.open.append(effect)
        for fragment in (0, 1):
            jobs = ev.Merge | ev.FetchState | ev.ApplyUpdate  # an update of who is in doubt comes beside
            assert sum(isinstance(e, jobs) and e.fragment == fragment for e in self.open) <= 1, "one spare"

    def check_sent(self, message: msg.Message) -> None:
        assert msg.decode(RUN, msg.encode(RUN, message)) == message, "others can read it"
        if isinstance(message, msg.VoteGranted):
            body = message.vote.body
            assert self.votes[(body.fragment, body.term)] == body.candidate, "durable, and one a term"

    # --- the environment ------------------------------------------------------------------------------

    @precondition(lambda self: self.open)
    @rule(choice=st.integers(0, 99), good=st.integers(0, 3), version=pool)
    def answer(self, choice: int, good: int, version: SignedVersion) -> None:
        effect = self.open.pop(choice % len(self.open))
        answers: dict[type, Callable[..., None]] = {
            ev.Persist: self.persisted,
            ev.Offer: self.offer_ended,
            ev.RequestFragment: self.copied_out,
            ev.Merge: self.merged,
            ev.FetchUpdate: self.update_came,
            ev.FetchState: self.state_came,
            ev.ApplyUpdate: self.applied,
        }
        answers[type(effect)](effect, good > 0, version)

    def persisted(self, effect: ev.Persist, good: bool, _version: SignedVersion) -> None:
        if not good:
            self.answered(effect, ev.Undone("disk full"))
            return
        record = effect.record
        if isinstance(record, ev.VoteRecord):
            assert self.votes.setdefault((record.fragment, record.term), record.candidate) == record.candidate
        for following in effect.then:
            self.carry_out(following)
        self.answered(effect, None)

    def answered(self, effect: ev.Effect, answer: Struct | None) -> None:
        self.feed(ev.Answered(self.tokens.pop(id(effect)), answer))

    def offer_ended(self, effect: ev.Offer, good: bool, version: SignedVersion) -> None:
        words = tuple(Verdict)
        verdict = words[version.header.tokens // 40 % len(words)]
        answer = ev.OfferAnswered(verdict, version.header.head())
        self.answered(effect, answer if good else ev.Undone("cut"))

    def copied_out(self, effect: ev.RequestFragment, good: bool, _version: SignedVersion) -> None:
        if good:
            self.learner_is_ready(effect.fragment, False)
        else:
            self.feed(ev.NothingToContribute(effect.fragment))

    def merged(self, effect: ev.Merge, good: bool, _version: SignedVersion) -> None:
        key = (effect.fragment, effect.number)
        made = ev.Merged(self.ticket(), digest("u", key), 100, digest("s", key)) if good else None
        self.answered(effect, made or ev.Undone("out of memory"))

    def update_came(self, effect: ev.FetchUpdate, good: bool, version: SignedVersion) -> None:
        fitting = child(self.core.fragments[effect.fragment].chain.header, "p1", PEERS)
        if not good:
            failures = tuple(FetchFailure)
            reason = failures[version.header.number % len(failures)]
            self.answered(effect, ev.FetchFailed(reason))
            return
        chosen = fitting if version.header.number % 2 else version
        self.answered(effect, ev.UpdateFetched(chosen, self.ticket()))

    def applied(self, effect: ev.ApplyUpdate, good: bool, _version: SignedVersion) -> None:
        self.answered(effect, ev.UpdateApplied(effect.stated if good else bytes(32)))

    def state_came(self, effect: ev.FetchState, good: bool, version: SignedVersion) -> None:
        if good:
            self.answered(effect, ev.StateFetched(version, ()))
        else:
            self.answered(effect, ev.FetchFailed(FetchFailure.UNREACHABLE))

    @rule(seconds=st.sampled_from((0.0, 0.1, 0.6, 4.0, 30.0)), busy=st.booleans())
    def time_passes(self, seconds: float, busy: bool) -> None:
        self.now += seconds
        self.feed(ev.Tick())
        for peer in PEERS if busy else ():
            self.feed(ev.MessageReceived(peer, progress(self.heads())))

    @rule(kept=st.booleans())
    def restart(self, kept: bool) -> None:
        logs = [(f.chain.logged_all(), f.chain.marks.table) for f in self.core.fragments]
        votes = tuple(ev.VoteRecord(f, t, c) for (f, t), c in self.votes.items())
        parts = tuple(RestoredFragment(log=log, watermarks=marks) for log, marks in logs)
        chains = parts if kept else restored_nothing(CONFIG).fragments
        self.restored = Restored(fragments=chains, votes=votes, saved=kept)
        self.start()

    @rule(seldom=st.integers(0, 15))
    def leave(self, seldom: int) -> None:
        if seldom == 15:
            self.feed(ev.LeaveRequested())

    @rule(learner=peers)
    def a_good_second(self, learner: str) -> None:
        """Else we would hardly ever be in office, with contributions in."""
        for _ in range(3):
            self.time_passes(0.3, True)
            for _ in range(100):
                if self.open:
                    self.answer(0, 1, POOL[3])
            assert not self.open, "the same thing again and again, at once"
            for fragment in (0, 1):
                self.votes_for_us(fragment, set(PEERS))
                self.offers(learner, fragment, Stamp(1, 1), True, True)

    @rule(token=st.integers(900, 903), stamp=stamps, peer=peers)
    def stale_answers(self, token: int, stamp: Stamp, peer: str) -> None:
        self.feed(ev.ContributionSent(1, stamp))
        self.feed(ev.PayloadBroken(token, Verdict.CUT))
        self.feed(ev.PayloadReceived(token, self.ticket()))
        self.feed(ev.SendFailed(peer))

    # --- our learner ----------------------------------------------------------------------------------

    @rule(running=st.booleans())
    def learner(self, running: bool) -> None:
        self.feed(ev.LearnerStatus(True, 9, 90, 10.0, 0.1, 2.0) if running else ev.LearnerLost())

    @rule(fragment=st.integers(0, 1), due=st.booleans())
    def learner_is_ready(self, fragment: int, due: bool) -> None:
        ticket = self.ticket()
        self.feed(ev.ContributionReady(fragment, ticket, 40, 4, digest("p", ticket), 100, due))

    @rule(fragment=st.integers(0, 1), number=small)
    def learner_applied(self, fragment: int, number: int) -> None:
        self.feed(ev.LearnerApplied(fragment, number, 9))

    # --- peers ----------------------------------------------------------------------------------------

    def heads(self) -> tuple[Head, ...]:
        return tuple(f.chain.head for f in self.core.fragments)

    @rule(sender=senders, message=wild)
    def wild_message(self, sender: str, message: msg.Message) -> None:
        self.feed(ev.MessageReceived(sender, message))

    @rule(sender=senders, offer=wild_offers, transfer=small)
    def wild_offer(self, sender: str, offer: Any, transfer: int) -> None:
        if transfer not in self.transfers:
            self.feed(ev.Offered(transfer, sender, offer))

    @rule(peer=peers, version=pool, confirmed=st.booleans(), term=small, incarnation=st.integers(1, 2))
    def heartbeat(
        self, peer: str, version: SignedVersion, confirmed: bool, term: int, incarnation: int
    ) -> None:
        heads = list(self.heads())
        heads[version.header.fragment] = version.header.head()
        odd: dict[str, Any] = {"confirmed": confirmed, "incarnation": incarnation}
        self.feed(ev.MessageReceived(peer, progress(tuple(heads), offices=((WHOLE_RUN, 0, term),), **odd)))

    @rule(peer=peers, term=small, version=pool)
    def asks_for_votes(self, peer: str, term: int, version: SignedVersion) -> None:
        header = version.header
        request = msg.VoteRequest(WHOLE_RUN, header.fragment, term, header.head(), "open")
        self.feed(ev.MessageReceived(peer, request))

    @rule(fragment=st.integers(0, 1), voters=st.sets(peers))
    def votes_for_us(self, fragment: int, voters: set[str]) -> None:
        term = self.core.fragments[fragment].office._candidate_term
        for peer in sorted(voters):
            self.feed(ev.MessageReceived(peer, msg.VoteGranted(vote(peer, "me", term, fragment))))

    @rule(peer=senders, voters=st.sets(peers), term=small, start=small, fragment=st.integers(0, 1))
    def elected(self, peer: str, voters: set[str], term: int, start: int, fragment: int) -> None:
        proof = certificate(peer, tuple(voters), term, start, fragment)
        self.feed(ev.MessageReceived("p1", msg.Elected(proof)))

    @rule(peer=peers, version=pool, fitting=st.booleans())
    def announces(self, peer: str, version: SignedVersion, fitting: bool) -> None:
        chain = self.core.fragments[version.header.fragment].chain
        following = child(chain.header, peer, PEERS) if fitting else version
        self.feed(ev.MessageReceived(peer, announce(following)))

    @rule(peer=peers, fragment=st.integers(0, 1), ahead=st.integers(0, 2))
    def calls_and_passes(self, peer: str, fragment: int, ahead: int) -> None:
        office = self.core.fragments[fragment].office
        number = self.core.fragments[fragment].chain.head.number + ahead
        call = msg.Closing(WHOLE_RUN, fragment, office.term, number, 0.1)
        self.feed(ev.MessageReceived(office.syncer or peer, call))
        self.feed(ev.MessageReceived(peer, msg.Pass(WHOLE_RUN, fragment, office.term, number)))

    @rule(learner=peers, fragment=st.integers(0, 1), stamp=stamps, known=st.booleans(), due=st.booleans())
    def offers(self, learner: str, fragment: int, stamp: Stamp, known: bool, due: bool) -> None:
        chain = self.core.fragments[fragment].chain
        mark = chain.marks.stamp(learner)
        following = Stamp(mark.incarnation or 1, mark.sequence + 1)
        odd: dict[str, Any] = {"fragment": fragment, "due": due, "after": mark if known else stamp}
        signed = contribution(learner, chain.head, following if known else stamp, **odd)
        self.feed(ev.Offered(self.number(), learner, signed))

    @precondition(lambda self: self.transfers)
    @rule(choice=st.integers(0, 99), good=st.integers(0, 3))
    def payload(self, choice: int, good: int) -> None:
        transfer = self.transfers.pop(choice % len(self.transfers))
        if good:
            self.feed(ev.PayloadReceived(transfer, self.ticket()))
        else:
            self.feed(ev.PayloadBroken(transfer, Verdict.NON_FINITE))


Weather.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, derandomize=True, print_blob=False
)
TestTotality = Weather.TestCase


def test_words_for_people_can_be_had_at_any_time() -> None:
    weather = Weather()
    for _ in range(3):
        weather.time_passes(0.6, True)
        weather.learner(True)
        weather.learner_is_ready(0, True)
        assert all(isinstance(f.words(weather.now), str) for f in weather.core.fragments)
    assert weather.core.confirmed and found([*weather.open], ev.Persist), "it stood for election"


# Happy paths of several cores: train together, rotate the office, lose a syncer, take a joiner in.

CORES = ("a", "b", "c")


@pytest.fixture
def swarm() -> Swarm:
    swarm = Swarm(config(fragments=2, term_versions=2, seats=("a", "b", "c", "d")))
    for peer in CORES:
        swarm.join(peer, genesis=peer == "a")
    swarm.run(5.0)
    return swarm


def train(swarm: Swarm, rounds: int, fragment: int = 0) -> None:
    for _ in range(rounds):
        swarm.contribute(fragment=fragment)
        swarm.run(3.0)


def syncers(swarm: Swarm, fragment: int = 0) -> set[str | None]:
    return {m.core.fragments[fragment].office.syncer for m in swarm.members.values()}


def test_three_nodes_elect_one_syncer_a_fragment(swarm: Swarm) -> None:
    assert all(m.core.confirmed for m in swarm.members.values())
    for fragment in (0, 1):
        assert len(syncers(swarm, fragment)) == 1 and None not in syncers(swarm, fragment)


def test_everybody_is_merged_and_everybody_holds_the_same_bytes(swarm: Swarm) -> None:
    train(swarm, 3)
    assert len({tuple(m.states) for m in swarm.members.values()}) == 1
    head = swarm.members["a"].core.fragments[0].chain
    assert (head.head.number, head.head.tokens) == (3, 3 * 3 * 40)
    assert {p.learner: p.stamp for p in head.header.contributors} == dict.fromkeys(CORES, Stamp(1, 3))
    assert all(m.core.fragments[0].own.idle for m in swarm.members.values())
    assert swarm.members["a"].core.fragments[1].chain.head.number == 0, "fragments are independent"


def test_the_office_rotates_and_nothing_stops_for_it(swarm: Swarm) -> None:
    train(swarm, 12)
    versions = [c.version.header for c in swarm.members["a"].commits]
    assert [v.number for v in versions] == list(range(1, 13))
    terms = sorted({v.term for v in versions})[1:]  # elections of the start may have used terms up
    assert terms == list(range(terms[0], terms[0] + 5))
    assert len({v.syncer for v in versions}) >= 2
    assert all(len([v for v in versions if v.term == t]) == 2 for t in {v.term for v in versions})


def test_a_syncers_death_loses_nothing_and_doubles_nothing(swarm: Swarm) -> None:
    train(swarm, 1)
    victim = syncers(swarm).pop()
    survivors = [p for p in CORES if p != victim]
    assert victim is not None

    def dies_while_merging(member: object, effect: ev.Effect) -> None:
        if isinstance(effect, ev.Merge) and victim in swarm.members:
            swarm.kill(victim)

    swarm.on_effect = dies_while_merging
    swarm.contribute()
    swarm.run(20.0)
    chain = swarm.members[survivors[0]].core.fragments[0].chain
    assert victim not in swarm.members and syncers(swarm) <= {*survivors, None}
    merged = [
        (part.learner, part.stamp.sequence)
        for commit in swarm.members[survivors[0]].commits
        for part in commit.version.header.contributors
    ]
    assert sorted(merged) == sorted([*((p, 1) for p in CORES), *((p, 2) for p in survivors)])
    assert chain.head.number == 2


def test_a_joiner_catches_up_and_takes_part(swarm: Swarm) -> None:
    train(swarm, 3)
    late = swarm.join("late")
    swarm.run(3.0)
    assert late.core.confirmed and late.heads() == swarm.members["a"].heads()
    train(swarm, 2)
    parts = swarm.members["a"].core.fragments[0].chain.header.contributors
    assert "late" in {part.learner for part in parts}


def test_who_leaves_is_merged_first_and_missed_by_nobody(swarm: Swarm) -> None:
    said: list[str] = []

    def listen(member: object, effect: ev.Effect) -> None:
        if isinstance(effect, ev.Send) and isinstance(effect.message, msg.Leaving):
            said.append(effect.peer)

    swarm.on_effect = listen
    leaver = syncers(swarm).pop()
    assert leaver is not None
    swarm.contribute()
    swarm.post(leaver, LeaveRequested())
    swarm.run(6.0)
    assert swarm.members[leaver].core.departed and sorted(said) == [p for p in CORES if p != leaver]
    swarm.kill(leaver)
    train(swarm, 2)
    rest = next(iter(swarm.members.values())).core.fragments[0].chain
    assert rest.marks.stamp(leaver) == Stamp(1, 1) and rest.head.tokens == (3 + 2 + 2) * 40
