"""Draws which members of a world lie so that it can be proved, or withhold, and how."""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pdiloco.lab.simulation.world.perjurer import PROVABLE, LieTold, Perjurer
from p2pdiloco.lab.simulation.world.plan import one_withholds
from p2pdiloco.lab.simulation.world.withholder import Kept, Withholder

if TYPE_CHECKING:
    from p2pdiloco.lab.simulation.world.world import World


def lying_members(world: World) -> dict[str, Perjurer | Withholder]:
    """Choose them: the last ones, a third of all at most."""
    plan = world.plan
    peers = [spec.peer for spec in plan.nodes]
    lying = peers[len(peers) - min(plan.mix.perjurers, len(peers) // 3) :]
    kinds = list(LieTold) if plan.config.audited else PROVABLE
    withheld = list(Kept)[plan.seed // 4 % len(Kept)]
    return {
        peer: Withholder(withheld, victim=peers[0])
        if one_withholds(plan.seed) and peer == lying[-1]
        else Perjurer(world, peer, kinds[(plan.seed + place) % len(kinds)])
        for place, peer in enumerate(lying)
    }
