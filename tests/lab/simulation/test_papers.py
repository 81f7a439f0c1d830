"""Worlds in which few have a founding seat: others get theirs by papers, and learners without one have their
turns."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from itertools import pairwise

import pytest
from msgspec.structs import replace
from sim_kit import calm_plan

from p2pdiloco.core import seating
from p2pdiloco.core.api.events import CommitVersion, Effect
from p2pdiloco.core.api.versions import VersionHeader, leaf_index
from p2pdiloco.core.chain import AWAKE_VERSIONS
from p2pdiloco_lab.simulation.seed_plan import (
    DRAWN,
    MIXES,
    OWNER,
    RUN,
    SURE,
    PaperKind,
    draw_plan,
    genesis_version,
)
from p2pdiloco_lab.simulation.seed_report import Violation
from p2pdiloco_lab.simulation.sim_host import Host
from p2pdiloco_lab.simulation.sim_world import World

UNTIL_S = 40.0
ENDED, ENDED_S = "n1", 20.0


def papers_world(kind: PaperKind, nodes: int = 4, unseated: str = "") -> World:
    """A calm swarm in which one node has a founding seat."""
    plan = calm_plan(nodes, until_s=UNTIL_S, quorum=2)
    config = replace(plan.config, owner=OWNER, seats=(SURE,), group_size=64)
    return World(dataclasses.replace(plan, config=config, papers=kind, unseated=unseated, unseated_s=ENDED_S))


def seats(world: World) -> set[frozenset[str]]:
    """Rosters of all nodes and fragments."""
    return {fragment.chain.marks.seats for host in world.core_hosts() for fragment in host.core.fragments}


def merged_after(world: World, learner: str, from_s: float) -> list[float]:
    """Note the times at which a version with a learner's work is committed."""
    times: list[float] = []

    def look(host: Host, effect: Effect) -> None:
        if isinstance(effect, CommitVersion) and host.now > from_s:
            times.extend(host.now for part in effect.version.header.contributors if part.learner == learner)

    world.on_effect = look
    return times


@pytest.mark.parametrize("kind", [*PaperKind])
def test_everybody_has_a_seat_in_the_end_by_the_owners_words_or_by_an_invite(kind: PaperKind) -> None:
    world = papers_world(kind)
    result = world.run()
    world.clock.run_until(2 * UNTIL_S)
    assert result.ok, result.detail or result.stuck
    assert seats(world) == {frozenset(world.specs)}


def test_an_invite_fills_the_first_places_only_and_learners_without_a_seat_are_merged() -> None:
    world = papers_world(PaperKind.INVITE, nodes=9)
    result = world.run()
    world.clock.run_until(3 * UNTIL_S)
    assert result.ok, result.detail or result.stuck
    assert {len(roster) for roster in seats(world)} == {seating.LINK_PLACES}
    tables = [store.watermarks for host in world.core_hosts() for store in host.stores]
    assert all({mark.learner for mark in table if mark.merges} == world.specs.keys() for table in tables)


@pytest.mark.parametrize("kind", [*PaperKind])
def test_whose_seat_has_ended_goes_on_learning_and_decides_nothing(kind: PaperKind) -> None:
    world = papers_world(kind, unseated=ENDED)
    times = merged_after(world, ENDED, ENDED_S + 20.0)
    result = world.run()
    world.clock.run_until(2 * UNTIL_S)
    assert result.ok, result.detail or result.stuck
    assert seats(world) == {frozenset(world.specs) - {ENDED}} and times
    offices = [fragment.office.holding for fragment in world.hosts[ENDED].core.fragments]
    assert not any(offices)


def test_the_rule_of_seats_misses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = papers_world(PaperKind.WORDS)
    world.clock.run_until(ENDED_S)
    paper = world.owner.papers.pop(ENDED)
    with pytest.raises(Violation, match="no paper says so"):
        world.watch._seated(world.hosts[SURE], 0)
    world.owner.papers[ENDED] = paper
    world.watch._seats = dict.fromkeys(world.watch._seats, frozenset())
    with pytest.raises(Violation, match="have seats there, elsewhere"):
        world.watch._seated(world.hosts[SURE], 0)
    monkeypatch.setattr(seating, "LINK_PLACES", 64)
    monkeypatch.setattr("p2pdiloco.core.roster.LINK_PLACES", 64)
    world = papers_world(PaperKind.INVITE, nodes=9)
    with pytest.raises(Violation, match="beyond its places"):
        world.clock.run_until(3 * UNTIL_S)


def test_a_third_of_the_ordinary_worlds_have_papers_of_both_kinds_and_one_node_that_stays() -> None:
    plans = [draw_plan(seed, mix) for mix in DRAWN for seed in range(60)]
    drawn = [plan for plan in plans if plan.papers is not None]
    ordinary = [plan for plan in plans if not plan.mix.crowd]
    assert 0.25 < len(drawn) / len(ordinary) < 0.42
    assert {plan.papers for plan in drawn} == {*PaperKind}
    assert {len(plan.config.seats) for plan in drawn} == {1, 3}
    assert {bool(plan.unseated) for plan in drawn} == {False, True}
    assert all(plan.config.owner == OWNER and SURE in plan.config.seats for plan in drawn)
    assert not any(SURE in plan.hidden or plan.unseated == SURE for plan in drawn)
    others = [draw_plan(seed, mix) for mix in {*MIXES} - {*DRAWN} | {"crowd"} for seed in range(20)]
    by_hand = [draw_plan(seed, "calm", 4) for seed in range(20)]
    assert not any(plan.papers or plan.config.owner for plan in (*others, *by_hand))


# --- learners without a seat, in runs of groups -------------------------------------------------------------


def world_of(nodes: int, seats: tuple[str, ...], groups: int) -> World:
    """An open run of one fragment, in groups of about two seats, whose terms are longer than the world."""
    plan = calm_plan(nodes, fragments=1)
    config = replace(
        plan.config,
        group_size=2,
        term_versions=500,
        seats=seats,
        admits=False,
        genesis_versions=(genesis_version(0, groups),),
    )
    return World(dataclasses.replace(plan, config=config, faults=False))


def versions_until(world: World, time_s: float) -> list[VersionHeader]:
    """Versions made until then, in order."""
    world.clock.run_until(time_s)
    headers = [version.header for version in world.watch.headers.values()]
    return sorted((header for header in headers if header.number), key=lambda header: header.number)


def merged_in(versions: list[VersionHeader]) -> dict[str, list[int]]:
    """Versions in which each learner's work is."""
    found: dict[str, list[int]] = defaultdict(list)
    for header in versions:
        for part in header.contributors:
            found[part.learner].append(header.number)
    return found


def leaf(peer: str, epoch: int = 0) -> int:
    return leaf_index(RUN, 0, epoch, 2, peer)


def test_learners_of_a_leaf_without_a_seat_wait_a_few_versions() -> None:
    names = [f"n{index}" for index in range(16)]
    seats = tuple(name for name in names if leaf(name) == leaf("n0"))[:4]
    guests = [name for name in names if leaf(name) != leaf("n0")]
    assert len(seats) == 4 and len(guests) > 4
    versions = versions_until(world_of(len(names), seats, groups=2), 60.0)
    rotates = next(header.number for header in versions if header.epoch)
    assert rotates <= AWAKE_VERSIONS + 1 and {header.epoch for header in versions} > {0}
    found = merged_in(versions)
    assert found.keys() == set(names)
    assert max(found[guest][0] for guest in guests) <= rotates + AWAKE_VERSIONS


def test_learners_without_a_seat_that_are_more_than_a_round_takes_have_their_turns() -> None:
    names = [f"n{index}" for index in range(16)]
    versions = versions_until(world_of(len(names), ("n0", "n1"), groups=1), 90.0)
    found, last = merged_in(versions), versions[-1].number
    assert last > 20 and max(len(header.contributors) for header in versions) == 2 + 4
    guests = names[2:]
    turn = -(-len(guests) // 4)
    pauses = [after - before for guest in guests for before, after in pairwise([*found[guest], last])]
    assert max(found[guest][0] for guest in guests) <= 2 * turn, "newcomers have a place beside the others"
    assert max(pauses) <= 3 * turn, "whose place is taken when its turn comes has another soon"
    assert max(len(found[guest]) for guest in guests) <= 2 * min(len(found[guest]) for guest in guests)
