"""Seeds on several cores: each seed is a world of its own, results come back in the order of the seeds."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import closing

from p2pdiloco.simulation.node.substance import NOTHING, Substance
from p2pdiloco.simulation.report import SeedResult
from p2pdiloco.simulation.runner import run_seed
from p2pdiloco.simulation.world.plan import WorldPlan

Job = tuple[int, str | None, int | None, bool]
Played = tuple[SeedResult, float]


def play(
    seeds: range, mix: str | None, nodes: int | None, jobs: int = 1, vectors: bool = False
) -> Iterator[Played]:
    """Every seed's result with the seconds that it took, in order, as they come.

    `vectors`: with real numbers. An abandoned iterator ends its processes."""
    work = [(seed, mix, nodes, vectors) for seed in seeds]
    if jobs <= 1:
        before = gc.get_threshold()
        rare_collections()
        try:
            yield from map(_play, work)
        finally:
            gc.set_threshold(*before)
            gc.unfreeze()
        return
    # Spawned, not forked: the caller may have threads (a test runner, a terminal view).
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(jobs, len(work)), initializer=rare_collections) as pool, closing(pool):
        yield from pool.imap(_play, work, chunksize=max(1, min(8, len(work) // (4 * jobs))))


def _play(job: Job) -> Played:
    started_s = time.process_time()
    seed, mix, nodes, vectors = job
    result = run_seed(seed, mix, nodes, substance=arithmetic(vectors))
    return result, time.process_time() - started_s


def arithmetic(vectors: bool) -> Callable[[WorldPlan], Substance]:
    """Choose what fragments are: real vectors, or histories only."""
    if not vectors:
        return lambda plan: NOTHING
    # Imported here: histories do without torch.
    from p2pdiloco.lab.vectors.vectors import Vectors

    return Vectors


def rare_collections() -> None:
    """A world is one large web of objects that all live until its end: looking for cycles in it again and
    again takes a tenth of the time."""
    gc.collect()
    gc.freeze()  # what was imported stays
    gc.set_threshold(200_000, 50, 100)
