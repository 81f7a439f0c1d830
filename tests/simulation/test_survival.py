"""The figures of a run that survives: a long partition, seven of eight nodes killed, a syncer that leaves."""

from __future__ import annotations

from sim_kit import Commits, calm_plan

from p2pdiloco.simulation.lineage import missing_spans
from p2pdiloco.simulation.world import World

SIDES = (("n0", "n1", "n2", "n3", "n4"), ("n5", "n6", "n7"))


def agreed(world: World) -> list[bool]:
    """Per fragment, whether all running nodes hold the same version."""
    up = world.up_hosts()
    return [len({h.stores[f].version.header.digest() for h in up}) == 1 for f in range(2)]


def test_two_minutes_of_partition_cost_no_token_of_either_side() -> None:
    world = World(calm_plan(8, until_s=140.0, quorum=2))
    links = [(a, b) for a in SIDES[0] for b in SIDES[1]]
    for source, target in [*links, *((b, a) for a, b in links)]:
        world.clock.at(15.0, world.network.block, source, target)
        world.clock.at(135.0, world.network.unblock, source, target)
    commits = Commits(world)
    equal_s: list[float] = []

    def look() -> None:
        if all(agreed(world)):
            equal_s.append(world.clock.now)
        world.clock.after(0.05, look)

    world.clock.at(135.0, look)
    result = world.run()
    assert result.ok, (result.detail, result.stuck)
    for side in SIDES:
        numbers = [n for t, p, f, n in commits.seen if 115.0 < t < 135.0 and p in side and f == 0]
        assert len(set(numbers)) > 5, "both sides made versions to the end"
    assert equal_s and equal_s[0] < 135.0 + 30.0
    for fragment in range(2):
        best = max((h.stores[fragment] for h in world.up_hosts()), key=lambda s: s.state.number).state
        for host in world.up_hosts():
            first = host.learner.model.fragments[fragment].life_from
            trained = host.learner.model.step_at(world.clock.now) - 40
            assert trained > 600
            assert not missing_spans(best.covered[host.peer], first, trained), f"{host.peer}: steps are lost"
