"""Happy paths of several cores: train together, rotate the office, lose a syncer, take a joiner in."""

from __future__ import annotations

import pytest
from core_swarm import Swarm
from kit import config

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.events import LeaveRequested
from p2pdiloco.core.api.types import Stamp

PEERS = ("a", "b", "c")


@pytest.fixture
def swarm() -> Swarm:
    swarm = Swarm(config(fragments=2, term_versions=2))
    for peer in PEERS:
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
    assert {p.learner: p.stamp for p in head.header.contributors} == dict.fromkeys(PEERS, Stamp(1, 3))
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
    survivors = [p for p in PEERS if p != victim]
    assert victim is not None

    def dies_while_merging(member: object, effect: ef.Effect) -> None:
        if isinstance(effect, ef.Merge) and victim in swarm.members:
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
    assert sorted(merged) == sorted([*((p, 1) for p in PEERS), *((p, 2) for p in survivors)])
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

    def listen(member: object, effect: ef.Effect) -> None:
        if isinstance(effect, ef.Send) and isinstance(effect.message, msg.Leaving):
            said.append(effect.peer)

    swarm.on_effect = listen
    leaver = syncers(swarm).pop()
    assert leaver is not None
    swarm.contribute()
    swarm.post(leaver, LeaveRequested())
    swarm.run(6.0)
    assert swarm.members[leaver].core.departed and sorted(said) == [p for p in PEERS if p != leaver]
    swarm.kill(leaver)
    train(swarm, 2)
    rest = next(iter(swarm.members.values())).core.fragments[0].chain
    assert rest.marks.stamp(leaver) == Stamp(1, 1) and rest.head.tokens == (3 + 2 + 2) * 40
