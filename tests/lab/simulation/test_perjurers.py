"""Members whose lies can be proved, or found by everybody, are found out, whichever they tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from p2pdiloco.lab.simulation.node.host import Host
from p2pdiloco.lab.simulation.rules.exclusion import WITHIN_S, Exclusion
from p2pdiloco.lab.simulation.rules.violation import Violation
from p2pdiloco.lab.simulation.world.clock import Clock
from p2pdiloco.lab.simulation.world.perjurer import LieTold
from p2pdiloco.lab.simulation.world.plan import draw_plan
from p2pdiloco.lab.simulation.world.world import World

SEEDS = (34, 40, 49, 57)
"""One in which each kind is noticed."""


def test_every_kind_of_lie_is_seen_through() -> None:
    seen: set[LieTold] = set()
    for seed in SEEDS:
        world = World(draw_plan(seed, "liars"))
        result = world.run()
        assert result.ok, result.detail or result.stuck
        found = set(world.exclusion.seen)
        seen |= {world.perjurers[peer].kind for peer in found}
        for host in world.core_hosts():
            assert set(host.core.shared.excluded.peers) == found
            assert {proof.culprit() for proof in host.disk.proofs} == found
    assert seen == set(LieTold)


def test_who_was_confirmed_a_moment_ago_has_as_long_as_the_others() -> None:
    clock = Clock()
    core = SimpleNamespace(confirmed=True, shared=SimpleNamespace(excluded=set[str]()))
    newcomer = SimpleNamespace(peer="n0", core=core, frozen=False, confirmed_at_s=WITHIN_S - 1)
    world = SimpleNamespace(clock=clock, perjurers={"n1"}, core_hosts=lambda: [newcomer])
    Exclusion(cast(World, world)).excluded(cast(Host, newcomer), "n1")
    clock.run_until(2 * WITHIN_S - 2)
    with pytest.raises(Violation, match="n0 still count n1"):
        clock.run_until(2 * WITHIN_S)


def test_where_merges_are_audited_liars_are_in_one_group_from_the_first_version_on() -> None:
    audited = [plan.config for seed in range(60) if (plan := draw_plan(seed, "liars")).config.audited]
    assert len(audited) > 15
    assert all(version.header.groups == 1 for config in audited for version in config.genesis_versions)
    assert all(config.group_size > 8 for config in audited)
