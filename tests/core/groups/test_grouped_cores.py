"""Rotating groups of several cores: everything is merged once, by peers that each know only a few."""

from __future__ import annotations

from collections import Counter

import pytest
from core_swarm import Member, Swarm
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import config, contribution, genesis

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.events import MessageReceived, Offered, Tick
from p2pdiloco.core.api.reasons import Verdict, VoteRefusal
from p2pdiloco.core.api.versions import level_sizes
from p2pdiloco.core.members import Claims

ROUND_S = 8.0
"""Virtual: longer than an election in new groups takes."""


class Run:
    """A swarm that starts with so many members that they fall into groups, and what it did."""

    def __init__(self, members: int, group_size: int, term_versions: int = 3) -> None:
        groups = -(-members // group_size)
        self.swarm = Swarm(
            config(
                group_size=group_size,
                term_versions=term_versions,
                genesis_versions=(genesis(0, groups),),
            )
        )
        self.peers = [f"m{index}" for index in range(members)]
        self.merges: list[tuple[str, ...]] = []
        self.partials: list[ef.MergePartial] = []
        self.told: dict[str, set[str]] = {peer: set() for peer in self.peers}
        self.swarm.on_effect = self._saw
        for peer in self.peers:
            self.swarm.join(peer, genesis=peer == "m0")
        self.swarm.run(20.0)

    def _saw(self, member: Member, effect: ef.Effect) -> None:
        if isinstance(effect, ef.Merge):
            self.merges.append(self.swarm.merged(effect))
        elif isinstance(effect, ef.MergePartial):
            self.partials.append(effect)
        elif isinstance(effect, ef.Send | ef.Offer | ef.Offer | ef.FetchUpdate):
            self.told[member.peer].add(effect.peer)

    def round(self) -> None:
        self.swarm.contribute()
        self.swarm.run(ROUND_S)

    def states(self) -> set[bytes]:
        return {m.states[0] for m in self.swarm.members.values()}


@settings(max_examples=12, deadline=None)
@given(members=st.integers(3, 14), group_size=st.integers(2, 4))
def test_every_contribution_is_merged_exactly_once_whatever_the_number_of_groups(
    members: int, group_size: int
) -> None:
    run = Run(members, group_size)
    for _ in range(3):
        run.round()
    times = Counter(peer for merge in run.merges for peer in merge)
    assert times == dict.fromkeys(run.peers, 3)
    assert len(run.states()) == 1, "and everybody holds the same bytes"
    chain = run.swarm.members["m0"].core.fragments[0].chain
    assert chain.head.tokens == 3 * members * 40
    learners = [part.learner for part in chain.header.contributors]
    assert learners == sorted(learners), "one order, whatever group they came from"


def test_a_leaf_syncer_hands_over_one_partial_and_the_root_alone_makes_the_version() -> None:
    run = Run(9, 3, term_versions=8)
    run.round()
    leaves = [p for p in run.partials if p.inputs]
    assert len(leaves) == len({p.group for p in leaves}) == len(run.partials), "one level of partials"
    assert sorted(i.contributor.learner for p in leaves for i in p.inputs) == run.peers
    assert run.merges == [tuple(run.peers)], "one version has them all"


def test_as_many_levels_as_the_members_need() -> None:
    run = Run(24, 2, term_versions=8)
    assert len(level_sizes(12, 2)) == 5
    run.round()
    levels = {p.group.split("/")[1] for p in run.partials}
    assert levels == {"0", "1", "2", "3"}, "all but the topmost make partials"
    assert sorted(peer for merge in run.merges for peer in merge) == sorted(run.peers)


@pytest.mark.parametrize(("members", "group_size"), [(24, 4), (40, 4)])
def test_nobody_talks_to_more_than_about_two_groups(members: int, group_size: int) -> None:
    run = Run(members, group_size, term_versions=50)
    for told in run.told.values():
        told.clear()
    run.round()
    run.round()
    most = max(len(told) for told in run.told.values())
    largest = max(len(leaf) for leaf in _leaves(run))
    assert most <= largest + 2 * group_size, "its leaf group and its fellows above, not the run"
    assert len(run.merges[-1]) == members


def _leaves(run: Run) -> list[tuple[str, ...]]:
    core = run.swarm.members["m0"].core
    header = core.fragments[0].chain.header
    return list(core.shared.roster.leaves(header.run, 0, header.epoch, header.groups))


def test_groups_and_offices_rotate_until_everybody_had_one() -> None:
    run = Run(8, 2, term_versions=1)
    holders: set[str] = set()
    roots, groups = set(), set()
    for _ in range(16):
        run.round()
        chain = run.swarm.members["m0"].core.fragments[0].chain
        roots.add(chain.header.syncer)
        groups.add(run.swarm.members["m0"].core.fragments[0].seats.leaf.name)
        holders |= {p for p, m in run.swarm.members.items() if m.core.fragments[0].office.holding}
    assert holders == set(run.peers)
    assert len(roots) >= 4 and len({name.split("/")[0] for name in groups}) >= 8


def test_a_run_that_grows_beyond_a_group_falls_into_groups_and_back() -> None:
    swarm = Swarm(config(group_size=3, term_versions=2))
    for peer in ("a", "b", "c"):
        swarm.join(peer, genesis=peer == "a")
    swarm.run(5.0)

    def plans() -> set[tuple[int, int]]:
        headers = [m.core.fragments[0].chain.header for m in swarm.members.values()]
        return {(header.epoch, header.groups) for header in headers}

    def rounds(count: int) -> None:
        for _ in range(count):
            swarm.contribute()
            swarm.run(ROUND_S)

    rounds(2)
    assert plans() == {(0, 1)}
    for peer in ("d", "e", "f", "g"):
        swarm.join(peer)
    swarm.run(5.0)
    rounds(4)
    assert len(plans()) == 1 and plans().pop()[1] == 3
    for peer in ("d", "e", "f", "g"):
        swarm.kill(peer)
    swarm.list_members()
    swarm.run(15.0)
    rounds(6)
    assert len(plans()) == 1 and plans().pop()[1] == 1, "fewer members, one group again"
    assert len({tuple(m.states) for m in swarm.members.values()}) == 1


def test_a_dead_root_is_replaced_and_nothing_is_merged_twice() -> None:
    run = Run(9, 3, term_versions=50)
    run.round()
    root = run.swarm.members["m0"].core.fragments[0].chain.header.syncer
    run.swarm.kill(root)
    run.swarm.list_members()
    run.swarm.run(12.0)
    run.round()
    run.round()
    left = [peer for peer in run.peers if peer != root]
    times = Counter(peer for merge in run.merges for peer in merge)
    assert times == {**dict.fromkeys(left, 3), root: 1}
    assert len(run.states()) == 1


def test_a_vote_request_of_an_epoch_that_we_are_not_in_is_asked_again_in_the_same_term() -> None:
    run = Run(4, 2, term_versions=50)
    swarm = run.swarm
    member = swarm.members["m0"].core
    head = member.fragments[0].chain.head
    request = msg.VoteRequest("7/0/0", 0, 9, head, "test")
    swarm.on_effect = lambda m, effect: None
    effects = member.handle(MessageReceived("m1", request), swarm.now)
    refused = [e.message for e in effects if isinstance(e, ef.Send)]
    assert isinstance(refused[0], msg.VoteRefused) and refused[0].reason is VoteRefusal.OTHER_EPOCH
    assert not [e for e in effects if isinstance(e, ef.Persist)]


@pytest.mark.parametrize(
    ("epoch", "verdict"), [(0, Verdict.NOT_SYNCER), (7, Verdict.OTHER_EPOCH)], ids=["ours", "another"]
)
def test_who_has_no_seat_for_an_offer_of_its_own_epoch_says_that_it_is_no_syncer(
    epoch: int, verdict: Verdict
) -> None:
    """Else its sender would wait for the groups to rotate, which they do not where no version is made."""
    run = Run(9, 3, term_versions=50)
    swarm, core = run.swarm, run.swarm.members["m0"].core
    seats = core.fragments[0].seats
    index = next(i for i in range(3) if seats.named(f"0/0/{i}") is None)
    signed = contribution("m1", core.fragments[0].chain.head, group=f"{epoch}/0/{index}")
    effects = core.handle(Offered(1, "m1", signed), swarm.now)
    answers = [e.verdict for e in effects if isinstance(e, ef.AnswerTransfer)]
    assert answers == [verdict]


def test_who_lays_down_an_office_takes_its_claim_back_with_its_fellows() -> None:
    run = Run(9, 3, term_versions=50)
    swarm = run.swarm
    seats = {p: m.core.fragments[0].seats.taken for p, m in swarm.members.items()}
    loser, others = next(
        (peer, fellows)
        for peer, mine in seats.items()
        if len(mine) > 1 and (fellows := list(mine[1].electorate.others(swarm.now)))
    )
    office, named = seats[loser][0].office, seats[loser][0].name

    def believers() -> list[str]:
        return [p for p in others if loser in swarm.members[p].core.shared.claims.of(0, named)]

    assert believers() == others
    office.lay_down("test")
    swarm.members[loser].core.shared.vote_disk.failed(lambda: None, "disk full", swarm.now)
    swarm.post(loser, Tick())
    swarm.run(0.0)
    assert not believers()


def test_a_claim_that_is_not_repeated_is_void() -> None:
    claims = Claims(1)
    assert claims.heard("p", (("1/0/0", 0, 3),), 10.0) and claims.of(0, "1/0/0") == {"p": 3}
    claims.expire(10.0)
    assert claims.of(0, "1/0/0") == {"p": 3}
    claims.expire(10.1)
    assert not claims.of(0, "1/0/0")
