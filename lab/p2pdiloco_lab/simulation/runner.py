"""Plays seeds one after another and sums them up."""

from __future__ import annotations

from collections.abc import Callable

from p2pdiloco_lab.simulation.node.substance import NOTHING, Substance
from p2pdiloco_lab.simulation.report import SeedResult
from p2pdiloco_lab.simulation.world.plan import WorldPlan, draw_plan
from p2pdiloco_lab.simulation.world.world import World


def run_seed(
    seed: int,
    mix: str | None = None,
    nodes: int | None = None,
    write: Callable[[str], None] | None = None,
    verbose: bool = False,
    substance: Callable[[WorldPlan], Substance] = lambda plan: NOTHING,
) -> SeedResult:
    """Play one seed; `write` gets the trace line by line: decisions, and all else too if `verbose`.

    `substance` makes the world's arithmetic (`p2pdiloco_lab.vectors`)."""
    plan = draw_plan(seed, mix, nodes)
    return World(plan, write, verbose, substance(plan)).run()
