"""Is the inner loop undisturbed? Inner steps per CPU-second of the learner process, swarm against alone.

    .venv/bin/python scripts/bench_inner.py [--rounds 3] [--seconds 40] [--preset tiny] [--json FILE]

Pairs in one run: two learner processes without any daemon, then a real swarm of two nodes, alternating, so
that both have the same company on the machine. CPU seconds are the learner process's own, so the figure
does not depend on what else runs; the longest gap between inner steps (evaluation and saving left out) does.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from pathlib import Path

import msgspec
from benchkit import NEVER, arguments, diary, events_of, finish, of_kind, running_swarm, spread, table

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.presets import for_run
from p2pdiloco.learner.channel import BaseRef, LearnerOptions, Ready, Status
from p2pdiloco.learner.host import LearnerHost
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.exchange import Exchange
from p2pdiloco.tensors.layout import gather, plan_fragments

WARM_UP_STEPS = 10


class Rate(msgspec.Struct):
    """One learner over one window."""

    steps_per_cpu_s: float
    step_s: float
    longest_gap_s: float


def rate(points: list[tuple[int, float, float, float]]) -> Rate:
    """From (inner step, cpu_s, step time, longest gap) after the warm-up."""
    points = [p for p in points if p[0] >= WARM_UP_STEPS]
    (first, first_cpu, _, _), (last, last_cpu, step_s, _) = points[0], points[-1]
    return Rate((last - first) / (last_cpu - first_cpu), step_s, max(p[3] for p in points[1:]))


async def alone(manifest: Manifest, learners: int, seconds: float, folder: Path) -> list[Rate]:
    """Learner processes with nobody to talk to: they copy nothing out that anybody reads."""
    quiet = msgspec.structs.replace(
        manifest, sync=msgspec.structs.replace(manifest.sync, inner_steps=100_000)
    )
    task = task_of(quiet)
    layouts = plan_fragments(task.specs(), quiet.sync.fragments)
    parameters = task.initial_parameters()
    hosts, points = [], [[] for _ in range(learners)]
    started = [asyncio.Event() for _ in range(learners)]
    exchanges = []
    for index in range(learners):
        exchange = Exchange.create(layouts)
        exchanges.append(exchange)
        for layout in layouts:
            gather(parameters, layout, exchange.base(layout.index, 0))

        def on_event(event: object, index: int = index) -> None:
            if isinstance(event, Status):
                points[index].append((event.inner_step, event.cpu_s, event.step_time_s, event.longest_gap_s))
            elif isinstance(event, Ready):
                started[index].set()

        options = LearnerOptions(peer=f"alone-{index}", threads=1)
        hosts.append(LearnerHost(quiet, layouts, exchange, options, on_event, folder / f"alone-{index}.log"))
    try:
        await asyncio.gather(*(host.start([BaseRef(0, 0)] * len(layouts)) for host in hosts))
        await asyncio.gather(*(event.wait() for event in started))
        await asyncio.sleep(seconds)
    finally:
        await asyncio.gather(*(host.stop(None, 3) for host in hosts))
        for exchange in exchanges:
            exchange.close()
    return [rate(p) for p in points]


def in_swarm(manifest: Manifest, nodes: int, seconds: float, folder: Path) -> list[Rate]:
    """The same learners inside a real swarm."""
    with running_swarm(folder, manifest, nodes, *NEVER) as swarm:
        time.sleep(seconds)
        found = []
        for node in swarm.nodes:
            lines = of_kind(diary(events_of(node)), "progress")
            found.append(
                rate([(p["inner_step"], p["cpu_s"], p["step_time_s"], p["longest_gap_s"]) for p in lines])
            )
    return found


def main() -> None:
    """Alternate, then print the ratios."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--preset", default="tiny")
    args = parser.parse_args()
    manifest = for_run(args.preset, "bench-inner")
    ratios, alone_rates, swarm_rates, gaps = [], [], [], []
    for index in range(args.rounds):
        with tempfile.TemporaryDirectory(prefix="p2pdiloco-bench-") as text:
            folder = Path(text)
            lone = asyncio.run(alone(manifest, 2, args.seconds, folder))
            swarm = in_swarm(manifest, 2, args.seconds, folder)
        lone_mean = sum(r.steps_per_cpu_s for r in lone) / len(lone)
        swarm_mean = sum(r.steps_per_cpu_s for r in swarm) / len(swarm)
        ratios.append(swarm_mean / lone_mean)
        alone_rates += [r.steps_per_cpu_s for r in lone]
        swarm_rates += [r.steps_per_cpu_s for r in swarm]
        gaps += [r.longest_gap_s / r.step_s for r in swarm]
        print(f"pair {index + 1}: swarm/alone {ratios[-1]:.3f}", flush=True)
    figures = {
        "ratio": spread(ratios),
        "alone_steps_per_cpu_s": spread(alone_rates),
        "swarm_steps_per_cpu_s": spread(swarm_rates),
        "longest_gap_in_steps": spread(gaps),
    }
    print(
        table(
            [
                ("alone, steps per CPU-second", figures["alone_steps_per_cpu_s"]),
                ("swarm, steps per CPU-second", figures["swarm_steps_per_cpu_s"]),
                ("swarm / alone", figures["ratio"]),
                ("longest gap / mean inner step", figures["longest_gap_in_steps"]),
            ],
            "",
        )
    )
    finish("inner", {"preset": args.preset, "seconds": args.seconds, **figures}, args.json)


if __name__ == "__main__":
    main()
