"""Draws which members of a world lie so that it can be proved, or withhold, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pdiloco_lab.simulation.world.past import old_liars
from p2pdiloco_lab.simulation.world.perjurer import LieTold, Perjurer, lie_of
from p2pdiloco_lab.simulation.world.plan import MAX_JOINS, one_withholds
from p2pdiloco_lab.simulation.world.withholder import Kept, Withholder

if TYPE_CHECKING:
    from p2pdiloco_lab.simulation.world.world import World


def lying_members(world: World) -> dict[str, Perjurer | Withholder]:
    """Choose them: the last ones, a third of all at most."""
    plan = world.plan
    peers = [spec.peer for spec in plan.nodes]
    lying = peers[len(peers) - min(plan.mix.perjurers, len(peers) // 3) :]
    if plan.mix.old:
        return {peer: Perjurer(world, peer, LieTold.HISTORIES) for peer in old_liars(plan)}
    kind = plan.config.audited, len(peers)
    # Of two groups' syncers one that withholds is no minority: nobody could be elected in its place.
    one_group = len(peers) + MAX_JOINS <= plan.config.group_size
    withheld = list(Kept)[plan.seed // 4 % len(Kept)] if one_group else Kept.WORK
    return {
        peer: Withholder(withheld, victim=peers[0])
        if one_withholds(plan.seed) and peer == lying[-1]
        else Perjurer(world, peer, lie_of(plan.seed, place, *kind))
        for place, peer in enumerate(lying)
    }
