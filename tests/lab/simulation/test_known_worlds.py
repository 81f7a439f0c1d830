"""Worlds made by hand: a usurper, long splits, splits of many sides, a turnover. Some show known flaws."""

from __future__ import annotations

import copy
import dataclasses
import itertools

import pytest
from known_flaws import given, known_flaw
from msgspec.structs import replace
from sim_kit import Commits, calm_plan

from p2pdiloco.core import chain
from p2pdiloco_lab.simulation.seed_plan import WorldPlan, draw_plan
from p2pdiloco_lab.simulation.seed_report import SeedResult
from p2pdiloco_lab.simulation.sim_disk import Disk
from p2pdiloco_lab.simulation.sim_world import World, run_seed


def plan_of(nodes: int, until_s: float, quorum: int = 2, **changes: object) -> WorldPlan:
    """Nothing goes wrong but what the test does."""
    plan = calm_plan(nodes, until_s, quorum)
    return dataclasses.replace(plan, config=replace(plan.config, group_size=64, **changes), faults=False)


@known_flaw("no version proves its syncer's office: those of a member that nobody elected are taken")
@pytest.mark.parametrize("seed", [1, 2])
def test_every_version_beside_usurpers_is_of_an_office(seed: int) -> None:
    result = run_seed(seed, "usurpers")
    given(result.violation in ("", "authority") and not result.stuck, result.detail or result.stuck)
    assert not result.violation


@pytest.mark.parametrize("seed", [0, 1])
def test_what_few_have_learned_in_a_quiet_hour_is_everybodys_afterwards(seed: int) -> None:
    given(not draw_plan(seed, "quiet").seated_riders, "somebody lies")
    result = run_seed(seed, "quiet")
    assert result.ok, result.detail or result.stuck


@known_flaw("where fewer than three seats are awake, one believes another about a state")
@pytest.mark.parametrize("seed", [4, 5])
def test_nobody_takes_what_liars_forged_in_a_quiet_hour(seed: int) -> None:
    given(draw_plan(seed, "quiet").seated_riders, "nobody lies")
    result = run_seed(seed, "quiet")
    given(result.violation in ("", "kept") and not result.stuck, result.detail or result.stuck)
    assert not result.violation


@known_flaw("in groups a member hears few heads: of two sides none hears a third of the seats on the other")
def test_two_sides_of_a_run_of_six_small_groups_come_together() -> None:
    result = run_seed(60316)
    given(result.mix == "storm" and not result.violation, result.detail)
    assert not result.stuck


@pytest.mark.parametrize("nodes", [2, 5])
def test_a_node_that_is_restored_from_a_copy_of_its_disk_contradicts_itself_in_nothing(nodes: int) -> None:
    """All that it did since the copy is gone, time and again."""
    world, peer = World(plan_of(nodes, until_s=50.0, quorum=1, term_versions=2)), "n1"
    copies: list[Disk] = []
    world.clock.at(20.0, lambda: copies.append(copy.deepcopy(world.disk_of(peer))))
    for at_s in range(22, 48, 3):
        world.clock.at(at_s, lambda: restore(world, peer, copies[0]))
    assert outcome(world.run()) == "ok"


def restore(world: World, peer: str, kept: Disk) -> None:
    world.crash(world.hosts[peer], back_in_s=0.5)
    world._disks[peer] = copy.deepcopy(kept)


Sides = tuple[tuple[str, ...], ...]
FIVE_AND_THREE: Sides = (("n0", "n1", "n2", "n3", "n4"), ("n5", "n6", "n7"))
SIX_AND_THREE: Sides = (("n0", "n1", "n2", "n3", "n4", "n5"), ("n6", "n7", "n8"))


def old(plan: WorldPlan) -> WorldPlan:
    """States need support, as in a run that is no longer young."""
    return dataclasses.replace(plan, mix=dataclasses.replace(plan.mix, old=True, perjurers=0))


def cut(world: World, sides: Sides, on: bool) -> None:
    """All links between two sides, or all back."""
    for one, other in itertools.permutations(sides, 2):
        for source, target in itertools.product(one, other):
            (world.network.block if on else world.network.unblock)(source, target)


def split(world: World, sides: Sides, begins_s: float, heals_s: float) -> None:
    world.clock.at(begins_s, cut, world, sides, True)
    world.clock.at(heals_s, cut, world, sides, False)


def weight(world: World, side: tuple[str, ...]) -> int:
    """Tokens of a side's head."""
    return max(world.hosts[peer].stores[0].version.header.tokens for peer in side)


def healed(world: World, sides: Sides, heals_s: float) -> SeedResult:
    """The world after its split. Both sides made versions to the end of it."""
    world.clock.run_until(heals_s - 0.1)
    for side in sides:
        given(world.hosts[side[0]].stores[0].version.header.number > 20, "a side made no versions")
    return world.run()


def outcome(result: SeedResult) -> str:
    return result.violation or result.stuck or "ok"


@known_flaw(
    "merged work is let go of once those that may lack it were silent for the fork horizon: a longer split"
    " loses the lighter side's"
)
def test_a_split_that_lasts_longer_than_the_fork_horizon_loses_no_work() -> None:
    plan = plan_of(8, until_s=85.0)
    timing = replace(plan.config.timing, fork_horizon_s=30.0)
    world = World(dataclasses.replace(plan, config=replace(plan.config, timing=timing)))
    split(world, FIVE_AND_THREE, 15.0, 75.0)
    assert outcome(healed(world, FIVE_AND_THREE, 75.0)) == "ok"


@pytest.mark.parametrize("admits", [False, True])
def test_a_split_that_lasts_longer_than_watermarks_do_heals(
    admits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They last for 16 versions here, and each side makes some 25."""
    monkeypatch.setattr(chain, "WATERMARK_VERSIONS", 16)
    world = World(plan_of(8, until_s=75.0, admits=admits))
    split(world, FIVE_AND_THREE, 15.0, 70.0)
    assert outcome(healed(world, FIVE_AND_THREE, 70.0)) == "ok"


def side_of_three_is_faster(until_s: float) -> World:
    """An old run. The six are more than half of those who vote; the three train four times as fast."""
    plan = old(plan_of(9, until_s))
    nodes = tuple(
        dataclasses.replace(spec, step_time_s=0.07 if spec.peer in SIX_AND_THREE[1] else 0.3)
        for spec in plan.nodes
    )
    return World(dataclasses.replace(plan, nodes=nodes))


def test_of_two_sides_the_one_that_most_voters_follow_goes_on_though_it_is_lighter() -> None:
    world = side_of_three_is_faster(until_s=70.0)
    split(world, SIX_AND_THREE, 20.0, 60.0)
    world.clock.run_until(59.9)
    six, three = (
        max((world.hosts[peer].stores[0].version for peer in side), key=lambda v: v.header.head().weight)
        for side in SIX_AND_THREE
    )
    given(six.header.tokens < three.header.tokens, "the six are heavier")
    world.clock.run_until(90.0)
    ancestors = world.watch.ancestors(world.hosts["n0"].stores[0].version)
    assert six.header.digest() in ancestors and three.header.digest() not in ancestors


def test_a_split_that_opens_for_moments_heals_as_soon_as_it_stays_open() -> None:
    """Neither pauses between questions nor what is told of unsupported heads keep the sides apart."""
    world = side_of_three_is_faster(until_s=65.0)
    split(world, SIX_AND_THREE, 20.0, 60.0)
    for opens_s in range(24, 58, 4):
        world.clock.at(opens_s, cut, world, SIX_AND_THREE, False)
        world.clock.at(opens_s + 0.4, cut, world, SIX_AND_THREE, True)
    equal_s = first_equal(world, 60.0)
    world.clock.run_until(85.0)
    assert equal_s and equal_s[0] < 60.0 + 15.0


@pytest.mark.parametrize(("nodes", "count"), [(9, 3), (10, 5)])
def test_several_sides_of_which_none_has_more_than_a_third_come_together(nodes: int, count: int) -> None:
    sides = tuple(tuple(f"n{i}" for i in range(nodes) if i % count == side) for side in range(count))
    world = World(old(plan_of(nodes, until_s=60.0, quorum=1)))
    split(world, sides, 20.0, 50.0)
    equal_s = first_equal(world, 50.0)
    world.clock.run_until(75.0)
    assert equal_s and equal_s[0] < 50.0 + 15.0


def first_equal(world: World, from_s: float) -> list[float]:
    """Times from then on at which all hold the same versions."""
    equal_s: list[float] = []

    def look() -> None:
        up = world.up_hosts()
        if all(len({host.stores[f].version.header.digest() for host in up}) == 1 for f in range(2)):
            equal_s.append(world.clock.now)
        world.clock.after(0.1, look)

    world.clock.at(from_s, look)
    return equal_s


def test_two_of_twenty_go_on_by_themselves_and_five_that_return_later_follow_them() -> None:
    world = World(plan_of(20, until_s=150.0))
    commits = Commits(world)
    early, late = {3: 40.0, 7: 42.0}, {1: 80.0, 2: 81.0, 9: 85.0, 15: 90.0, 16: 91.0}
    for index in range(20):
        back_s = (early | late).get(index)
        world.clock.at(40.0 + 0.05 * index, lambda i=index, s=back_s: world.crash(world.hosts[f"n{i}"], s))
    world.clock.run_until(90.0)
    saved = [
        max(world.hosts[peer].stores[fragment].version.header.number for peer in ("n3", "n7"))
        for fragment in range(2)
    ]
    world.clock.run_until(160.0)
    made = [(at_s, peer) for at_s, peer, fragment, number in commits.seen if number > saved[fragment]]
    alone = [(at_s, peer) for at_s, peer in made if 90.0 < at_s < 119.0]
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
