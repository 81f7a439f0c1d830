"""Learners without a seat in runs of groups: each has its turn, in a leaf group that has a seat."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from itertools import pairwise

from msgspec.structs import replace
from sim_kit import calm_plan

from p2pdiloco.core.api.versions import VersionHeader, leaf_index
from p2pdiloco.core.chain import AWAKE_VERSIONS
from p2pdiloco_lab.simulation.seed_plan import RUN, genesis_version
from p2pdiloco_lab.simulation.sim_world import World


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
