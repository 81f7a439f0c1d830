"""Worlds made by hand: usurpers, colluders, nights, rests, silent seats, turnovers."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Mapping

import pytest
from known_flaws import given
from sim_kit import Commits, names, outcome, plan_of

from p2pdiloco.core import roster
from p2pdiloco.core.fork_choice import ForkChoice
from p2pdiloco_lab.simulation.seed_plan import (
    MONTH_S,
    OWNER,
    CrowdKind,
    PaperKind,
    UsurperKind,
    WorldPlan,
    draw_plan,
)
from p2pdiloco_lab.simulation.sim_disk import Disk
from p2pdiloco_lab.simulation.sim_usurper import Usurper
from p2pdiloco_lab.simulation.sim_world import World, run_seed


def asleep(plan: WorldPlan, sleeps_s: float, wakes_s: Mapping[str, float]) -> WorldPlan:
    return dataclasses.replace(plan, sleeps_s=sleeps_s, wakes_s=tuple(wakes_s.items()))


# --- usurpers -----------------------------------------------------------------------------------------------


def beside_usurper(plan: WorldPlan, peer: str, kind: UsurperKind) -> str:
    """Rule that is broken beside it, if any."""
    world = World(dataclasses.replace(plan, usurpers=((peer, kind),)))
    result, usurper = world.run(), world.perjurers[peer]
    given(isinstance(usurper, Usurper) and usurper.made, "it made nothing")
    given(result.violation in ("", "authority") and not result.stuck, result.detail or result.stuck)
    return result.violation


@pytest.mark.parametrize("kind", [kind for kind in UsurperKind if not kind.is_history])
def test_every_version_beside_a_usurper_of_six_is_of_an_office(kind: UsurperKind) -> None:
    assert not beside_usurper(plan_of(6, until_s=40.0), "n5", kind)


def test_seeds_of_the_mix_have_usurpers_of_all_kinds() -> None:
    plans = [draw_plan(seed, "usurpers") for seed in range(20)]
    assert {kind for plan in plans for _, kind in plan.usurpers} == {*UsurperKind}
    assert all(3 * len(plan.usurpers) <= len(plan.nodes) for plan in plans)


@pytest.mark.parametrize("kind", [kind for kind in UsurperKind if kind.is_history])
@pytest.mark.parametrize(
    ("nodes", "joins_s", "sleepers"),
    [
        pytest.param(6, 0.0, (), id="all-are-here"),
        pytest.param(7, 30.0, (), id="a-newcomer"),
        pytest.param(7, 0.0, ("n0",), id="a-sleeper"),
    ],
)
def test_nobody_follows_a_second_history(
    nodes: int, joins_s: float, sleepers: tuple[str, ...], kind: UsurperKind
) -> None:
    """The last member tells it, and says that it is its own. It is heavier than what all others made."""
    plan = plan_of(nodes, until_s=60.0, quorum=1)
    if joins_s:
        plan = dataclasses.replace(plan, joins_s=(*plan.joins_s[:-2], joins_s, 1.0))
    plan = asleep(plan, 20.0, dict.fromkeys(sleepers, 45.0))
    assert not beside_usurper(plan, f"n{nodes - 1}", kind)


@pytest.mark.parametrize("kind", [kind for kind in UsurperKind if kind.is_history])
def test_of_two_members_each_believes_the_other_about_a_history(kind: UsurperKind) -> None:
    """The chain never had seven seats: docs/protocol/belief.md, section 9."""
    assert beside_usurper(plan_of(2, until_s=60.0, quorum=1), "n1", kind) == "authority"


def test_a_vote_without_a_seat_is_seen_by_the_rule_of_the_roster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roster, "_among", lambda peers, _seats: [*peers])
    result = World(plan_of(5, until_s=40.0, seats=names(0, 3))).run()
    assert result.violation == "roster", result.detail or result.stuck


# --- colluders ----------------------------------------------------------------------------------------------


def left_out(world: World) -> tuple[int, int]:
    """Versions of fragment 0 in a row, at most, in which an honest member is not, and those in which no
    honest member is."""
    honest, head = world.specs.keys() - {*world.plan.colluders}, world.hosts["n0"].stores[0].version
    chain = [world.watch.headers[digest].header for digest in world.watch.ancestors(head)]
    own, longest, since = 0, 0, dict.fromkeys(honest, 0)
    for header in sorted(chain, key=lambda header: header.number):
        merged = {part.learner for part in header.contributors}
        own += merged.isdisjoint(honest)
        since = {peer: 0 if peer in merged else count + 1 for peer, count in since.items()}
        longest = max(longest, *since.values())
    return longest, own


def test_three_of_ten_that_merge_only_each_other_leave_nobody_out_for_longer_than_two_terms() -> None:
    world = World(dataclasses.replace(plan_of(10, until_s=120.0), colluders=names(7, 10)))
    assert outcome(world.run()) == "ok"
    longest, own = left_out(world)
    given(own > world.plan.config.term_versions, "they left nobody out")
    assert longest <= 2 * world.plan.config.term_versions


def test_a_night_of_colluders_and_one_honest_member_changes_no_roster_and_loses_no_work() -> None:
    """They make some thirty versions, in which there is only their own work."""
    plan = dataclasses.replace(plan_of(10, until_s=105.0), colluders=names(7, 10))
    world = World(asleep(plan, 25.0, dict.fromkeys(names(0, 6), 85.0)))
    assert outcome(world.run()) == "ok"
    longest, own = left_out(world)
    given(longest >= own > 16, "the night was not theirs")
    assert world.hosts["n0"].core.fragments[0].chain.marks.seats == {*names(0, 10)}


# --- nights, power cuts, rests ------------------------------------------------------------------------------


def test_a_state_that_few_seats_have_and_nobody_tried_is_seen_by_the_rule_of_the_gate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ForkChoice, "must_be_tried", lambda *_: False)
    assert run_seed(3, "quiet").violation == "gate"


@pytest.mark.parametrize("seed", [0, 1])
def test_what_few_have_learned_in_a_quiet_hour_is_everybodys_afterwards(seed: int) -> None:
    given(not draw_plan(seed, "quiet").seated_riders, "somebody lies")
    result = run_seed(seed, "quiet")
    assert result.ok, result.detail or result.stuck


def test_what_two_of_twenty_learn_in_a_long_night_is_in_everybodys_state_by_noon() -> None:
    """It has many times as many versions as there are updates kept of. The others wake one by one."""
    noon_s = 300.0
    wakes_s = {peer: 230.0 + 2.0 * place for place, peer in enumerate(names(0, 18))}
    world = World(asleep(plan_of(20, until_s=noon_s), 30.0, wakes_s))
    world.clock.run_until(229.0)
    nights = [world.hosts["n19"].stores[fragment].version.header for fragment in range(2)]
    assert outcome(world.run()) == "ok"
    heads = [host.stores for host in world.hosts.values()]
    for fragment, night in enumerate(nights):
        given(night.number > 4 * world.plan.config.log_versions, f"a short night: {night.number}")
        assert all(night.digest() in world.watch.ancestors(stores[fragment].version) for stores in heads)


@pytest.mark.parametrize(
    ("nodes", "liars", "awake"),
    [
        pytest.param(20, 4, 5, id="four-of-twenty-alone-with-one"),
        pytest.param(10, 2, 5, id="two-of-ten-of-which-half-are-here"),
        pytest.param(10, 2, 6, id="two-of-ten-of-which-six-are-here"),
        pytest.param(6, 1, 3, id="one-of-six-of-which-half-are-here"),
    ],
)
def test_nobody_takes_a_state_that_less_than_half_of_all_seats_have(
    nodes: int, liars: int, awake: int
) -> None:
    """The liars forge it at night. The others come back together."""
    plan = asleep(plan_of(nodes, until_s=75.0), 25.0, dict.fromkeys(names(0, nodes - awake), 55.0))
    assert kept(plan, names(nodes - liars, nodes), 30.0)


def kept(plan: WorldPlan, liars: tuple[str, ...], from_s: float) -> bool:
    """Tell whether no honest member takes what these forge from then on."""
    plan = dataclasses.replace(plan, crowd=CrowdKind.FORGES, seated_riders=liars, crowd_from_s=from_s)
    world = World(plan)
    result = world.run()
    given(world.crowd is not None and world.crowd.struck, "nothing was forged")
    given(result.violation in ("", "kept") and not result.stuck, result.detail or result.stuck)
    return not result.violation


def test_one_of_two_liars_leaves_seven_and_the_other_convinces_nobody() -> None:
    """The owner ends the seat of the one that left."""
    plan = plan_of(7, until_s=70.0, owner=OWNER)
    plan = dataclasses.replace(plan, papers=PaperKind.WORDS, unseated="n5", unseated_s=22.0)
    assert kept(asleep(plan, 20.0, {"n5": 1e9}), ("n5", "n6"), 40.0)


def test_a_power_cut_of_all_from_which_a_liar_returns_first_leaves_everybody_the_true_state() -> None:
    wakes_s = {**dict.fromkeys(names(0, 9), 45.0), "n9": 30.0}
    assert kept(asleep(plan_of(10, until_s=65.0), 25.0, wakes_s), ("n9",), 30.0)


def test_a_run_goes_on_after_a_rest_that_is_longer_than_all_that_anybody_waits_for() -> None:
    """All sleep for a month, and come back one by one."""
    back_s = MONTH_S
    wakes_s = {peer: back_s + 1.5 * place for place, peer in enumerate(names(0, 8))}
    assert outcome(World(asleep(plan_of(8, until_s=back_s + 20.0), 40.0, wakes_s)).run()) == "ok"


@pytest.mark.parametrize(("nodes", "silent"), [(2, 1), (4, 2), (3, 1), (10, 3)])
def test_a_run_goes_on_beside_silent_seats(nodes: int, silent: int) -> None:
    """They answer to nothing."""
    plan = plan_of(nodes, until_s=60.0, quorum=1)
    mute = names(nodes - silent, nodes)
    world = World(dataclasses.replace(plan, crowd=CrowdKind.MUTE, seated_riders=mute, crowd_from_s=20.0))
    result = world.run()
    given(world.crowd is not None and world.crowd.struck and not result.violation, result.detail)
    given(not result.stuck or "stands at version" in result.stuck, result.stuck)
    assert not result.stuck


@pytest.mark.parametrize("seed", [4, 5])
def test_nobody_takes_what_liars_forged_in_a_quiet_hour(seed: int) -> None:
    given(draw_plan(seed, "quiet").seated_riders, "nobody lies")
    result = run_seed(seed, "quiet")
    given(result.violation in ("", "kept") and not result.stuck, result.detail or result.stuck)
    assert not result.violation


@pytest.mark.parametrize(("seed", "mix"), [(60316, "storm"), (65027, "wan")])
def test_two_sides_of_a_run_of_small_groups_come_together(seed: int, mix: str) -> None:
    result = run_seed(seed, mix)
    given(not result.violation, result.detail)
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


@pytest.mark.parametrize("papers", [None, PaperKind.WORDS])
@pytest.mark.parametrize("every_s", [5.0, 10.0])
def test_a_run_goes_on_while_its_members_are_replaced_one_by_one(
    every_s: float, papers: PaperKind | None
) -> None:
    """Eight are here. One leaves every few seconds, without a word, and another comes. The first one returns
    when it knows nobody any more."""
    here, until_s = 8, 160.0
    identities = here + int((until_s - 30.0) / every_s) + 1
    joins = [0.3 * i if i < here else 30.0 + every_s * (i - here) for i in range(identities)]
    plan = plan_of(identities, until_s, owner=OWNER, seats=names(0, here if papers else identities))
    world = World(dataclasses.replace(plan, joins_s=tuple(joins), papers=papers))
    for index in range(identities - here):
        gone_s = 30.0 + every_s * index + every_s / 2
        back_s = None if index else until_s - 20.0 - gone_s
        world.clock.at(gone_s, lambda i=index, s=back_s: world.crash(world.hosts[f"n{i}"], s))
    commits = Commits(world)
    world.clock.run_until(until_s)
    up = world.up_hosts()
    given({*names(0, here)} & {host.peer for host in up} == {"n0"}, "more of the first ones are here")
    made = commits.made(0)
    times = sorted(made.values())
    assert max(b - a for a, b in itertools.pairwise(times)) < 20.0 and len(times) > 50
    assert world.hosts["n0"].stores[0].version.header.number >= max(made) - 1
