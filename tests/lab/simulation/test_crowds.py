"""Crowds: identities of one process that trains nothing, in young and old runs, open and by invite.

They are merged like everybody, and none of them has a seat: so they decide nothing, and weigh little.
"""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from known_flaws import given
from msgspec.structs import replace
from sim_kit import calm_plan

from p2pdiloco.core.fork_choice import ForkChoice
from p2pdiloco_lab.simulation.seed_plan import MIXES, CrowdKind, draw_plan
from p2pdiloco_lab.simulation.seed_report import SeedResult, Violation
from p2pdiloco_lab.simulation.sim_crowd import OPEN_SHARE
from p2pdiloco_lab.simulation.sim_world import World

HONEST, CROWD = 4, 6
YOUNG_S, OLD_S = 40.0, 60.0
AGES = ("young", "old")
DOORS = ("open", "invite")
RUNS = pytest.mark.parametrize(("age", "door"), [*itertools.product(AGES, DOORS)])


def world_of(kind: CrowdKind, age: str, door: str, riders: int = CROWD, fragments: int = 2) -> World:
    """Four honest members, and nothing that goes wrong but the crowd."""
    plan = calm_plan(HONEST, OLD_S if age == "old" else YOUNG_S, quorum=2, fragments=fragments)
    config = replace(plan.config, admits=door == "invite", audited=True, group_size=64)
    mix = dataclasses.replace(plan.mix, old=age == "old")
    return World(dataclasses.replace(plan, mix=mix, config=config, faults=False, crowd=kind, riders=riders))


def played(world: World) -> SeedResult:
    """Play it. The crowd did what its kind says."""
    result = world.run()
    given(world.crowd is not None and world.crowd.struck, "the crowd never began")
    given(result.violation != "crashed", result.detail)
    return result


def seated(world: World) -> set[str]:
    """Identities of the crowd that have a seat, by anybody's chain of any fragment."""
    assert world.crowd is not None
    fragments = [fragment for host in world.core_hosts() for fragment in host.core.fragments]
    return {peer for fragment in fragments for peer in fragment.chain.marks.seats & world.crowd.riders.keys()}


def merged(world: World) -> set[str]:
    """Identities of the crowd that were merged."""
    assert world.crowd is not None
    tables = [store.watermarks for host in world.core_hosts() for store in host.stores]
    return {mark.learner for table in tables for mark in table if mark.merges} & world.crowd.riders.keys()


def counted(world: World) -> float:
    """Tokens of the chain over those that honest learners trained."""
    assert world.crowd is not None
    return world.crowd.counted()


@RUNS
def test_members_keep_their_state_when_three_forge_one_in_a_fragment_each(age: str, door: str) -> None:
    world = world_of(CrowdKind.FORGES, age, door, riders=3, fragments=3)
    result = played(world)
    assert result.ok, result.detail or result.stuck
    assert merged(world) == world.crowd.riders.keys() and not seated(world)


@pytest.mark.parametrize("kind", [CrowdKind.ACCUSES, CrowdKind.MUTE])
@RUNS
def test_a_run_goes_on_and_excludes_no_honest_member_when_a_crowd_accuses_or_falls_silent(
    kind: CrowdKind, age: str, door: str
) -> None:
    result = played(world_of(kind, age, door))
    assert result.ok, result.detail or result.stuck


@pytest.mark.parametrize("kind", [CrowdKind.RIDES, CrowdKind.CLAIMS])
@RUNS
def test_a_chain_counts_hardly_more_tokens_than_were_trained_and_who_is_merged_has_no_seat(
    kind: CrowdKind, age: str, door: str
) -> None:
    world = world_of(kind, age, door)
    played(world)
    assert counted(world) <= 1.0 + OPEN_SHARE
    if kind is CrowdKind.RIDES:
        assert merged(world) == world.crowd.riders.keys() and not seated(world)


@pytest.mark.parametrize("age", AGES)
def test_versions_come_as_fast_beside_a_crowd_that_rides_or_claims(age: str) -> None:
    def versions(kind: CrowdKind, riders: int) -> int:
        world = world_of(kind, age, "open", riders=riders)
        world.clock.run_until(YOUNG_S)
        return world.watch.versions

    calm = versions(CrowdKind.RIDES, 0)
    assert min(versions(kind, CROWD) for kind in (CrowdKind.RIDES, CrowdKind.CLAIMS)) >= 0.9 * calm > 20


def test_without_a_crowd_the_same_worlds_count_what_was_trained() -> None:
    world = world_of(CrowdKind.RIDES, "young", "open", riders=0)
    result = world.run()
    assert result.ok and 0.5 < counted(world) <= 1.0


def test_the_rules_of_crowds_miss_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    world = world_of(CrowdKind.CLAIMS, "young", "open")
    world.plan = dataclasses.replace(world.plan, config=replace(world.plan.config, open_share=100.0))
    world.clock.run_until(YOUNG_S)
    assert world.crowd is not None
    with pytest.raises(Violation, match="counted"):
        world.crowd.check_tokens()
    monkeypatch.setattr(ForkChoice, "_is_wanted", lambda self, peer, head: self._is_heavier(head))
    monkeypatch.setattr(ForkChoice, "may_copy", lambda self, version, giver, now: True)
    monkeypatch.setattr(ForkChoice, "must_be_tried", lambda self, version: False)
    world = world_of(CrowdKind.FORGES, "young", "open", riders=1)
    with pytest.raises(Violation, match="kept"):
        world.clock.run_until(YOUNG_S)


def test_seeds_of_the_mix_have_crowds_of_all_kinds_in_runs_of_all_kinds_and_others_none() -> None:
    plans = [draw_plan(seed, "crowd") for seed in range(40)]
    assert {plan.crowd for plan in plans} == {*CrowdKind}
    assert {(plan.mix.old, plan.config.admits) for plan in plans} == {
        *itertools.product((False, True), (False, True))
    }
    assert all(3 <= plan.riders <= MIXES["crowd"].crowd and plan.config.audited for plan in plans)
    others = [draw_plan(seed, mix) for mix in MIXES if mix not in ("crowd", "quiet") for seed in range(8)]
    assert not any(plan.crowd or plan.riders for plan in others)
