"""Seeds on several cores: each seed is a world of its own, results come back in the order of the seeds."""

from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TYPE_CHECKING, TypeVar

from p2pdiloco_lab.simulation.lineage import NOTHING, Substance
from p2pdiloco_lab.simulation.seed_plan import WorldPlan
from p2pdiloco_lab.simulation.seed_report import SeedResult
from p2pdiloco_lab.simulation.sim_world import run_seed

if TYPE_CHECKING:
    from p2pdiloco_lab.bulk_world.bulk_plan import BulkResult

Job = tuple[int, str | None, int | None, bool]
Played = tuple[SeedResult, float]
W = TypeVar("W")
R = TypeVar("R")


def play(
    seeds: range, mix: str | None, nodes: int | None, jobs: int = 1, vectors: bool = False
) -> Iterator[Played]:
    """Every seed's result with the seconds that it took, in order, as they come.

    `vectors`: with real numbers. An abandoned iterator ends its processes."""
    return _shared([(seed, mix, nodes, vectors) for seed in seeds], _play, jobs)


def play_bulk(seeds: range, mix: str | None, members: int | None, jobs: int = 1) -> Iterator[BulkResult]:
    """Every seed's result in a bulk world, in order, as they come."""
    return _shared([(seed, mix, members) for seed in seeds], _play_bulk, jobs)


def _shared(work: list[W], play_one: Callable[[W], R], jobs: int) -> Iterator[R]:
    if jobs <= 1:
        before = gc.get_threshold()
        rare_collections()
        try:
            yield from map(play_one, work)
        finally:
            gc.set_threshold(*before)
            gc.unfreeze()
        return
    # Spawned, not forked: the caller may have threads (a test runner, a terminal view).
    context = multiprocessing.get_context("spawn")
    with context.Pool(min(jobs, len(work)), initializer=rare_collections) as pool, closing(pool):
        yield from pool.imap(play_one, work, chunksize=max(1, min(8, len(work) // (4 * jobs))))


def _play(job: Job) -> Played:
    started_s = time.process_time()
    seed, mix, nodes, vectors = job
    result = run_seed(seed, mix, nodes, substance=arithmetic(vectors))
    return result, time.process_time() - started_s


def _play_bulk(job: tuple[int, str | None, int | None]) -> BulkResult:
    # Imported here: worlds without bytes do without torch.
    from p2pdiloco_lab.bulk_world.bulk_world import run_bulk_seed

    return run_bulk_seed(*job)


def arithmetic(vectors: bool) -> Callable[[WorldPlan], Substance]:
    """Choose what fragments are: real vectors, or histories only."""
    if not vectors:
        return lambda plan: NOTHING
    # Imported here: histories do without torch.
    from p2pdiloco_lab.vectors import Vectors

    return Vectors


def rare_collections() -> None:
    """A world is one large web of objects that all live until its end: looking for cycles in it again and
    again takes a tenth of the time."""
    gc.collect()
    gc.freeze()  # what was imported stays
    gc.set_threshold(200_000, 50, 100)
