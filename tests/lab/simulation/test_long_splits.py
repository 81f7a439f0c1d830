"""Splits that last longer than what members keep for it, that heal bit by bit, or that have many sides."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from known_flaws import given, known_flaw
from msgspec.structs import replace
from sim_kit import calm_plan

from p2pdiloco.core.chain import watermarks
from p2pdiloco.core.following import support
from p2pdiloco.lab.simulation.report import SeedResult
from p2pdiloco.lab.simulation.world.plan import WorldPlan
from p2pdiloco.lab.simulation.world.world import World

Sides = tuple[tuple[str, ...], ...]
FIVE_AND_THREE: Sides = (("n0", "n1", "n2", "n3", "n4"), ("n5", "n6", "n7"))
SIX_AND_THREE: Sides = (("n0", "n1", "n2", "n3", "n4", "n5"), ("n6", "n7", "n8"))


APART = known_flaw(
    "watermarks of one side's members leave the other's chain with time: then each side knows nobody of the"
    " other's, and they stay apart"
)
TWICE = known_flaw(
    "watermarks of one side's members leave the other's chain with time: after the heal members offer work"
    " over a base that has it"
)


def plan_of(sides: Sides, until_s: float, quorum: int = 2, seed: int = 7, **changes: object) -> WorldPlan:
    """Nothing goes wrong but what the test does."""
    plan = calm_plan(sum(len(side) for side in sides), until_s, quorum, seed)
    return dataclasses.replace(plan, config=replace(plan.config, group_size=64, **changes), faults=False)


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
    plan = plan_of(FIVE_AND_THREE, until_s=85.0)
    timing = replace(plan.config.timing, fork_horizon_s=30.0)
    world = World(dataclasses.replace(plan, config=replace(plan.config, timing=timing)))
    split(world, FIVE_AND_THREE, 15.0, 75.0)
    assert outcome(healed(world, FIVE_AND_THREE, 75.0)) == "ok"


@pytest.mark.parametrize(
    ("admits", "founding_versions"),
    [
        pytest.param(False, None, id="open", marks=APART),
        pytest.param(True, None, id="by-invite-young", marks=TWICE),
        pytest.param(True, 10, id="by-invite-old", marks=APART),
    ],
)
def test_a_split_that_lasts_longer_than_watermarks_do_heals(
    admits: bool, founding_versions: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They last for 16 versions here, and each side makes some 25."""
    monkeypatch.setattr(watermarks, "WATERMARK_VERSIONS", 16)
    if founding_versions is not None:
        monkeypatch.setattr(support, "FOUNDING_VERSIONS", founding_versions)
    world = World(plan_of(FIVE_AND_THREE, until_s=75.0, admits=admits))
    split(world, FIVE_AND_THREE, 15.0, 70.0)
    assert outcome(healed(world, FIVE_AND_THREE, 70.0)) == "ok"


def side_of_three_is_faster(until_s: float) -> World:
    """An old run. The six are more than half of those who vote; the three train four times as fast."""
    plan = old(plan_of(SIX_AND_THREE, until_s))
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
    world = World(old(plan_of(sides, until_s=60.0, quorum=1)))
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
