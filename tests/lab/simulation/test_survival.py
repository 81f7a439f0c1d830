"""The figures of a run that survives: a long partition, seven of eight nodes killed, a syncer that leaves."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from sim_kit import Commits, agreed, plan_of, played_well

from p2pdiloco.core.api.events import LeaveRequested
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco_lab.simulation.lineage import missing_spans
from p2pdiloco_lab.simulation.sim_host import Host
from p2pdiloco_lab.simulation.sim_world import World

pytestmark = pytest.mark.long

SIDES = (("n0", "n1", "n2", "n3", "n4"), ("n5", "n6", "n7"))


def test_two_minutes_of_partition_cost_no_token_of_either_side() -> None:
    world = World(plan_of(8, until_s=140.0, quorum=2))
    links = [(a, b) for a in SIDES[0] for b in SIDES[1]]
    for source, target in [*links, *((b, a) for a, b in links)]:
        world.clock.at(15.0, world.network.block, source, target)
        world.clock.at(135.0, world.network.unblock, source, target)
    commits = Commits(world)
    equal_s: list[float] = []

    def look() -> None:
        if all(agreed(world)):
            equal_s.append(world.clock.now)
        world.clock.after(0.05, look)

    world.clock.at(135.0, look)
    played_well(world)
    for side in SIDES:
        numbers = [n for t, p, f, n in commits.seen if 115.0 < t < 135.0 and p in side and f == 0]
        assert len(set(numbers)) > 5, "both sides made versions to the end"
    assert equal_s and equal_s[0] < 135.0 + 30.0
    for fragment in range(2):
        best = max((h.stores[fragment] for h in world.up_hosts()), key=lambda s: s.state.number).state
        for host in world.up_hosts():
            first = host.learner.model.fragments[fragment].life_from
            trained = host.learner.model.step_at(world.clock.now) - 40
            assert trained > 600
            assert not missing_spans(best.covered[host.peer], first, trained), f"{host.peer}: steps are lost"


@pytest.mark.parametrize(
    ("first", "more"), [(0, "n0 n1 n2 n3 n4 n5"), (1, "n1 n3 n5"), (2, "n2 n4"), (3, "n5")]
)
def test_when_all_died_those_that_return_go_on_from_the_heaviest_saved_state(first: int, more: str) -> None:
    plan = plan_of(7, until_s=75.0, quorum=1, seed=7 + first)
    joins = (*plan.joins_s[:6], 41.5)
    # As in all mixes with blackouts: two of those that return may each be elected, and the heavier goes on.
    mix = dataclasses.replace(plan.mix, blackout=1.0)
    world = World(dataclasses.replace(plan, joins_s=joins, mix=mix))
    back = more.split()

    def die(peer: str) -> None:
        host = world.hosts[peer]
        delay_s = 3.0 + 3.1 * ((back.index(peer) * 5) % len(back)) if peer in back else None
        world.crash(host, delay_s)

    for index in range(6):  # within a second, in the midst of rounds
        world.clock.at(40.0 + 0.17 * index, die, f"n{index}")
    saved: list[tuple[str, list[SignedVersion]]] = []
    confirmed_s: list[tuple[float, str]] = []

    def look() -> None:
        for host in world.up_hosts():
            if host.incarnation == 2 and host.peer not in [peer for peer, _ in saved]:
                saved.append((host.peer, [store.version for store in host.stores]))
            if host.may_serve and host.peer not in [peer for _, peer in confirmed_s]:
                confirmed_s.append((world.clock.now, host.peer))
        world.clock.after(0.05, look)

    world.clock.at(41.2, look)
    played_well(world)
    assert {peer for peer, _ in saved} == set(back) and confirmed_s[0][1] in back
    assert "n6" in {host.peer for host in world.up_hosts()}, "which has nothing saved, and waited for them"
    for fragment in range(2):
        heaviest = max((v[fragment] for _, v in saved), key=lambda v: v.header.head().weight)
        final = max(
            (h.stores[fragment].version for h in world.up_hosts()), key=lambda v: v.header.head().weight
        )
        assert heaviest.header.number > 5
        assert heaviest.header.digest() in world.watch.ancestors(final)


def test_one_of_eight_survives_and_seven_come_back() -> None:
    world = World(plan_of(8, until_s=80.0, quorum=2))
    commits = Commits(world)
    killed = [f"n{index}" for index in range(1, 8)]
    for index, peer in enumerate(killed):
        world.clock.at(30.0, lambda p=peer, i=index: world.crash(world.hosts[p], 25.0 + i))  # type: ignore[misc]
    played_well(world)
    alone = [t for t, p, _, _ in commits.seen if 30.0 < t < 54.0]
    # Ten seconds until the dead no longer count in its majority, a term's election, a round.
    assert alone and min(alone) < 30.0 + 17.0, "the survivor goes on by itself"
    for peer in killed:
        host = world.hosts[peer]
        assert host.up and host.incarnation == 2 and host.may_serve and host.learner.model.running
    up = world.up_hosts()
    numbers = [[h.stores[f].version.header.number for h in up] for f in range(2)]
    assert all(max(n) - min(n) <= 1 for n in numbers), "and they have caught up"


@pytest.mark.parametrize("seed", [7, 8, 9, 10])
def test_a_syncer_that_leaves_delays_no_round_and_loses_nothing(seed: int) -> None:
    world = World(plan_of(5, until_s=60.0, quorum=2, seed=seed))
    commits = Commits(world)
    leaver: list[Host] = []
    merged: list[int] = []

    def leave() -> None:
        host = next((h for h in world.up_hosts() if h.core.fragments[0].office.holding), None)
        if host is None:  # between two terms
            world.clock.after(0.05, leave)
            return
        leaver.append(host)
        host.leaving = True
        merged.append(host.learner.model.step_at(world.clock.now))
        host.feed(LeaveRequested())

    world.clock.at(30.0 + seed / 10, leave)
    played_well(world)
    host = leaver[0]
    assert not host.up
    for fragment in range(2):
        times = sorted(t for t in commits.made(fragment).values() if t > 12.0)
        gaps = [(b - a, a) for a, b in itertools.pairwise(times)]
        usual_s = sorted(gap for gap, at in gaps if at < 28.0)[len(gaps) // 4]
        around = [gap for gap, at in gaps if 28.0 < at < 36.0]
        assert max(around) < usual_s + 1.0
        best = max((h.stores[fragment] for h in world.up_hosts()), key=lambda s: s.state.number).state
        begun = host.learner.model.fragments[fragment].life_from
        missing = missing_spans(best.covered[host.peer], begun, merged[0])
        # What was made since the contribution that was on its way already, if one was.
        assert all(end == merged[0] and end - first < 10 for first, end in missing), missing


@pytest.mark.parametrize("seed", [7, 8, 9])
def test_who_stands_still_for_ten_seconds_suspects_nobody_on_waking(seed: int) -> None:
    lines: list[str] = []
    world = World(plan_of(5, until_s=50.0, quorum=2, seed=seed), lines.append)
    host_of = world.hosts
    world.clock.at(25.0, lambda: host_of["n2"].freeze())
    world.clock.at(35.0, lambda: host_of["n2"].thaw(10.0))
    played_well(world)
    woken = [line.split(maxsplit=2) for line in lines if line.split()[1:2] == ["n2"]]
    said = [(float(at), what) for at, _, what in woken if 35.0 <= float(at) < 40.0]
    assert len([what for _, what in said if "health:" in what]) == 1
    assert not any("silent:" in what or "suspicion: no version" in what for _, what in said)
    assert not any("we stand" in what for at, what in said if at < 36.0)


def test_the_end_of_a_term_delays_no_round() -> None:
    world = World(plan_of(5, until_s=60.0, quorum=2))
    commits = Commits(world)
    played_well(world)
    terms = {(v.header.fragment, v.header.number): v.header.term for v in world.watch.headers.values()}
    for fragment in range(2):
        first = commits.made(fragment)
        pairs = [(a, b) for a, b in itertools.pairwise(sorted(first)) if first[a] > 15.0]
        same = [first[b] - first[a] for a, b in pairs if terms[fragment, a] == terms[fragment, b]]
        ends = [first[b] - first[a] for a, b in pairs if terms[fragment, a] != terms[fragment, b]]
        assert len(ends) >= 3 and max(ends) < max(same) + 0.5
