"""Splits made by hand: long, of many sides, of sides that change or grow."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable

import pytest
from known_flaws import given
from msgspec.structs import replace
from sim_kit import agreed, names, outcome, plan_of

from p2pdiloco.core import chain
from p2pdiloco_lab.simulation.seed_plan import OWNER, PaperKind, WorldPlan
from p2pdiloco_lab.simulation.seed_report import SeedResult
from p2pdiloco_lab.simulation.sim_world import World

Sides = tuple[tuple[str, ...], ...]
FIVE_AND_THREE: Sides = names(0, 5), names(5, 8)
SIX_AND_THREE: Sides = names(0, 6), names(6, 9)


def old(plan: WorldPlan) -> WorldPlan:
    """States need support, as in a run that is no longer young."""
    return dataclasses.replace(plan, mix=dataclasses.replace(plan.mix, old=True, perjurers=0))


def young(plan: WorldPlan) -> WorldPlan:
    return plan


def cut(world: World, sides: Sides, on: bool) -> None:
    """All links between two sides, or all back."""
    for one, other in itertools.permutations(sides, 2):
        for source, target in itertools.product(one, other):
            (world.network.block if on else world.network.unblock)(source, target)


def split(world: World, sides: Sides, begins_s: float, heals_s: float) -> None:
    world.clock.at(begins_s, cut, world, sides, True)
    world.clock.at(heals_s, cut, world, sides, False)


def healed(world: World, sides: Sides, heals_s: float) -> SeedResult:
    """The world after its split. Both sides made versions to the end of it."""
    world.clock.run_until(heals_s - 0.1)
    for peers in sides:
        given(world.hosts[peers[0]].stores[0].version.header.number > 20, "a side made no versions")
    return world.run()


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
        max((world.hosts[peer].stores[0].version for peer in peers), key=lambda v: v.header.head().weight)
        for peers in SIX_AND_THREE
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
    world.clock.run_until(95.0)
    assert equal_s and equal_s[0] < 50.0 + 40.0, "20 s for a choice, others for copies that are tried"


def first_equal(world: World, from_s: float) -> list[float]:
    """Times from then on at which all hold the same versions."""
    equal_s: list[float] = []

    def look() -> None:
        if all(agreed(world)):
            equal_s.append(world.clock.now)
        world.clock.after(0.1, look)

    world.clock.at(from_s, look)
    return equal_s


@pytest.mark.parametrize("ages", [old, young])
@pytest.mark.parametrize(
    "phases",
    [
        pytest.param([(names(0, 2), names(2, 4))], id="2|2"),
        pytest.param([(names(0, 10), names(10, 18))], id="10|8"),
        pytest.param([(names(0, 7), names(7, 11)), (names(0, 4), names(4, 11))] * 2, id="4|3|4"),
    ],
)
def test_a_split_heals_whatever_its_sides_and_loses_nothing(
    phases: list[Sides], ages: Callable[[WorldPlan], WorldPlan]
) -> None:
    """Each phase lasts twenty seconds. Three of eleven change sides with each."""
    heals_s, nodes = 20.0 * (1 + len(phases)), len({*itertools.chain(*phases[0])})
    world = World(ages(plan_of(nodes, until_s=heals_s + 2.0)))
    for place, sides in enumerate(phases, 1):
        split(world, sides, 20.0 * place, 20.0 * (place + 1))
    equal_s = first_equal(world, heals_s)
    world.clock.run_until(heals_s - 0.1)
    heads = {world.hosts[peers[0]].stores[0].version.header.digest() for peers in phases[-1]}
    given(len(heads) == len(phases[-1]), "the sides have one head")
    assert outcome(world.run()) == "ok"
    assert equal_s and equal_s[0] < heals_s + 15.0


@pytest.mark.parametrize(
    ("seats", "larger", "newcomers"), [(10, 7, 0), (10, 7, 8), (20, 14, 9)], ids=["7|3", "7|3+8", "14|6+9"]
)
def test_the_side_of_more_seats_goes_on_and_newcomers_count(seats: int, larger: int, newcomers: int) -> None:
    """A version is final before the split. The owner seats each newcomer, on the smaller side."""
    count = seats + newcomers
    plan = plan_of(count, until_s=102.0, owner=OWNER, seats=names(0, seats))
    joins = tuple(0.3 * i if i < seats else 60.0 + 0.2 * i for i in range(count))
    world = World(dataclasses.replace(plan, joins_s=joins, papers=PaperKind.WORDS))
    sides = names(0, larger), names(larger, count)
    split(world, sides, 55.0, 100.0)
    world.clock.run_until(99.9)
    large, small = (world.hosts[each[0]] for each in sides)
    given(small.core.fragments[0].chain.marks.seats == {*names(0, count)}, "newcomers have no seats")
    given(len(large.core.fragments[0].chain.marks.seats) == seats, "newcomers have seats on both sides")
    given(small.core.fragments[0].chain.final, "nothing is final")
    heads = [each.stores[0].version.header.digest() for each in (large, small)]
    assert outcome(world.run()) == "ok", "work is lost, or it does not heal"
    ancestors = world.watch.ancestors(world.hosts["n0"].stores[0].version)
    more = larger < len(sides[1])
    assert [head in ancestors for head in heads] == [not more, more]
