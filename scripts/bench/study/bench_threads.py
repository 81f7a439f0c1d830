#!/usr/bin/env python3
"""Loss of a learner with several threads when it does not have the processors for itself.

    python scripts/bench/study/bench_threads.py [--presets micro tiny] [--others 0 2] [--rounds 3]

A learner process without a daemon, with as many threads as there are processors, alone (`--others 0`) or
beside processes that never pause. Threads that wait for each other at the end of an operation spin, as
libgomp has it unless it is told otherwise, spin briefly, as learners do (`daemon.learner_host.ENVIRONMENT`),
or sleep at once. Also with one thread. Alternating, in one run; inner steps per second of wall time, after
the warm-up.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/bench: what its studies share

from benchkit import arguments, finish, spread, table
from p2pdiloco.config.presets import for_run
from p2pdiloco.daemon.learner_host import LearnerHost
from p2pdiloco.learner.channel import BaseRef, LearnerOptions, Status
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.layout import Exchange, gather, plan_fragments

WARM_UP_STEPS = 5
LIBGOMP_SPINS = "300000"
"""Spins that libgomp chooses itself, where no policy is given."""
WAITS: dict[str, tuple[int, dict[str, str]]] = {
    "spinning": (0, {"GOMP_SPINCOUNT": LIBGOMP_SPINS}),
    "briefly": (0, {}),
    "asleep": (0, {"OMP_WAIT_POLICY": "PASSIVE"}),
    "one thread": (1, {}),
}


def _never_pause() -> None:
    os.nice(10)  # as learners
    while True:
        pass


@contextmanager
def company(processes: int) -> Iterator[None]:
    """Start so many other processes that compute."""
    others = [multiprocessing.Process(target=_never_pause, daemon=True) for _ in range(processes)]
    for other in others:
        other.start()
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.join()


@contextmanager
def environment(changes: dict[str, str]) -> Iterator[None]:
    """Environment that a learner inherits which is started now."""
    os.environ.update(changes)
    try:
        yield
    finally:
        for name in changes:
            del os.environ[name]


async def steps_per_s(preset: str, threads: int, seconds: float) -> float:
    """Measure the pace of a learner with nobody to talk to."""
    manifest = for_run(preset, "bench-threads")
    task = task_of(manifest)
    layouts = plan_fragments(task.specs(), manifest.sync.fragments)
    parameters = task.initial_parameters()
    points: list[tuple[float, int]] = []
    enough = asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_event(event: object) -> None:
        if isinstance(event, Status) and event.inner_step >= WARM_UP_STEPS:
            points.append((loop.time(), event.inner_step))
            if points[-1][0] - points[0][0] >= seconds:
                enough.set()

    with tempfile.TemporaryDirectory(prefix="p2pdiloco-bench-") as folder:
        exchange = Exchange.create(layouts)
        for layout in layouts:
            gather(parameters, layout, exchange.base(layout.index, 0))
        options = LearnerOptions(peer="alone", threads=threads)
        host = LearnerHost(manifest, layouts, exchange, options, on_event, Path(folder) / "learner.log")
        try:
            await host.start([BaseRef(0, 0)] * len(layouts))
            await enough.wait()
        finally:
            await host.stop(None, 3)
            exchange.close()
    (first_s, first), (last_s, last) = points[0], points[-1]
    return (last - first) / (last_s - first_s)


def main() -> None:
    """Alternate, then print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--presets", nargs="+", default=["micro", "tiny"])
    parser.add_argument("--others", type=int, nargs="+", default=[0, os.cpu_count() or 1])
    args = parser.parse_args()
    rows = []
    for preset in args.presets:
        for others in args.others:
            rates: dict[str, list[float]] = {name: [] for name in WAITS}
            for _ in range(args.rounds):
                for name, (threads, changes) in WAITS.items():
                    with company(others), environment(changes):
                        rates[name].append(asyncio.run(steps_per_s(preset, threads, args.seconds)))
            rows += [
                (f"{preset}, {others} others, {name}: steps/s", spread(found))
                for name, found in rates.items()
            ]
            pairs = [new / old for new, old in zip(rates["briefly"], rates["spinning"], strict=True)]
            rows.append((f"{preset}, {others} others, briefly / spinning", spread(pairs)))
            print(table(rows[-len(WAITS) - 1 :], ""), flush=True)
    finish("threads", {name: figures for name, figures in rows}, args.json)


if __name__ == "__main__":
    main()
