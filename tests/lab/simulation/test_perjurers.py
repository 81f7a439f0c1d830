"""Members whose lies can be proved, or found by everybody, are found out, whichever they tell."""

from __future__ import annotations

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
