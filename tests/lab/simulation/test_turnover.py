"""Few of many return after all were gone, and members are replaced one by one."""

from __future__ import annotations

import dataclasses
import itertools

from known_flaws import given
from msgspec.structs import replace
from sim_kit import Commits, calm_plan

from p2pdiloco.lab.simulation.world.plan import WorldPlan
from p2pdiloco.lab.simulation.world.world import World


def plan_of(nodes: int, until_s: float) -> WorldPlan:
    """Nothing goes wrong but what the test does."""
    plan = calm_plan(nodes, until_s, quorum=2)
    return dataclasses.replace(plan, config=replace(plan.config, group_size=64), faults=False)


def test_two_of_twenty_go_on_by_themselves_and_five_that_return_later_follow_them() -> None:
    world = World(plan_of(20, until_s=150.0))
    commits = Commits(world)
    early, late = {3: 40.0, 7: 42.0}, {1: 80.0, 2: 81.0, 9: 85.0, 15: 90.0, 16: 91.0}
    for index in range(20):
        back_s = (early | late).get(index)
        world.clock.at(40.0 + 0.05 * index, lambda i=index, s=back_s: world.crash(world.hosts[f"n{i}"], s))
    world.clock.run_until(160.0)
    before = max(number for at_s, _, _, number in commits.seen if at_s < 40.0)
    alone = [(at_s, peer) for at_s, peer, _, number in commits.seen if number > before and at_s < 119.0]
    assert {peer for _, peer in alone} == {"n3", "n7"} and alone[0][0] < 105.0
    up = world.up_hosts()
    assert {host.peer for host in up} == {f"n{index}" for index in early | late}
    assert all(host.core.confirmed for host in up) and not world.watch.forks
    numbers = [[host.stores[fragment].version.header.number for host in up] for fragment in range(2)]
    assert all(max(n) - min(n) <= 1 for n in numbers)


def test_a_run_goes_on_while_its_members_are_replaced_one_by_one() -> None:
    """Eight are here; one leaves every ten seconds, without a word, and another comes."""
    here, every_s, until_s = 8, 10.0, 180.0
    identities = here + int((until_s - 30.0) / every_s) + 1
    joins = [0.3 * i if i < here else 30.0 + every_s * (i - here) for i in range(identities)]
    world = World(dataclasses.replace(plan_of(identities, until_s), joins_s=tuple(joins)))
    for index in range(identities - here):
        gone_s = 30.0 + every_s * index + every_s / 2
        world.clock.at(gone_s, lambda i=index: world.crash(world.hosts[f"n{i}"], None))
    commits = Commits(world)
    world.clock.run_until(until_s)
    given(not {f"n{index}" for index in range(here)} & {host.peer for host in world.up_hosts()}, "some stay")
    made = {number: at_s for at_s, _, fragment, number in reversed(commits.seen) if fragment == 0}
    times = sorted(made.values())
    assert max(b - a for a, b in itertools.pairwise(times)) < 20.0 and len(times) > 50
