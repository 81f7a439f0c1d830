"""Strangers that boast of heads which they never give: the swarm goes on as if they were not there."""

from __future__ import annotations

import pytest
from sim_kit import Commits, calm_plan

from p2pdiloco.core.api.events import Effect, FetchState, FetchUpdate
from p2pdiloco_lab.simulation.sim_host import Host
from p2pdiloco_lab.simulation.sim_liars import Stranger
from p2pdiloco_lab.simulation.sim_world import World

UNTIL_S = 60.0


def played(strangers: int) -> tuple[int, list[float]]:
    """Play a swarm of three: the versions that all of them had, and when a stranger was asked."""
    world = World(calm_plan(3, until_s=UNTIL_S, seed=8, fragments=4))
    boasting = {Stranger(world, i).peer for i in range(strangers)}
    asked: list[float] = []

    def act(host: Host, effect: Effect) -> None:
        if isinstance(effect, FetchUpdate | FetchState) and effect.peer in boasting:
            asked.append(host.now)

    commits = Commits(world, act)
    result = world.run()
    assert not result.violation and not result.stuck, result.stuck or result.detail
    holders: dict[tuple[int, int], set[str]] = {}
    for at_s, peer, fragment, number in commits.seen:
        if at_s <= UNTIL_S:
            holders.setdefault((fragment, number), set()).add(peer)
    return sum(len(peers) == 3 for peers in holders.values()), asked


@pytest.mark.parametrize("strangers", [1, 5])
def test_heads_that_are_never_given_slow_nobody_down(strangers: int) -> None:
    alone, _ = played(0)
    versions, asked = played(strangers)
    assert not asked, "no seat names these heads"
    assert versions > 0.8 * alone
