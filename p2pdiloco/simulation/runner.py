"""Plays seeds one after another and sums them up."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from p2pdiloco.simulation.node.substance import NOTHING, Substance
from p2pdiloco.simulation.report import SeedResult, Summary
from p2pdiloco.simulation.world.plan import Plan, draw_plan
from p2pdiloco.simulation.world.world import World


def run_seed(
    seed: int,
    mix: str | None = None,
    nodes: int | None = None,
    write: Callable[[str], None] | None = None,
    verbose: bool = False,
    substance: Callable[[Plan], Substance] = lambda plan: NOTHING,
) -> SeedResult:
    """Play one seed; `write` gets the trace line by line: decisions, and all else too if `verbose`.

    `substance` makes the world's arithmetic (`p2pdiloco.study`)."""
    plan = draw_plan(seed, mix, nodes)
    return World(plan, write, verbose, substance(plan)).run()


def run_seeds(
    seeds: Iterable[int],
    mix: str | None = None,
    nodes: int | None = None,
    each: Callable[[SeedResult], None] | None = None,
) -> Summary:
    """Play many seeds; `each` hears of every one as it ends."""
    summary = Summary()
    for seed in seeds:
        result = run_seed(seed, mix, nodes)
        summary.add(result)
        if each is not None:
            each(result)
    return summary
