"""Is the inner loop undisturbed? Inner steps of a learner in a swarm against those of one alone.

    .venv/bin/python scripts/bench/bench_inner.py [--rounds 3] [--seconds 40] [--preset tiny] [--json FILE]
    python scripts/bench/bench_inner.py --device cuda --preset gpt2    # two learners share the device

Pairs in one run: learner processes without any daemon, then a real swarm of as many nodes, alternating, so
that both have the same company on the machine. On a CPU the figure is inner steps per CPU-second of the
learner process, which does not depend on what else runs; on other devices inner steps per second. The longest
gap between inner steps (evaluation and saving left out) depends on the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import msgspec

from benchkit import NEVER, arguments, finish, running_swarm, spread, table, wait_until
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.presets import for_run
from p2pdiloco.config.settings import Compile
from p2pdiloco.daemon.learner_host import LearnerExited, LearnerHost
from p2pdiloco.demo.swarm import of_kind, read_log
from p2pdiloco.learner.channel import BaseRef, LearnerOptions, Note, Status
from p2pdiloco.learner.ranks import choose_device
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.layout import Exchange, gather, plan_fragments

WARM_UP_STEPS = 10
WARM_UP_TIMEOUT_S = 600.0


class Point(msgspec.Struct, frozen=True):
    """Word of a learner at some time."""

    inner_step: int
    cpu_s: float
    step_s: float
    gap_s: float
    at_s: float


class Rate(msgspec.Struct):
    """One learner over one window."""

    steps_per_cpu_s: float
    steps_per_s: float
    step_s: float
    longest_gap_s: float


class Ended(Exception):
    """A learner process ended by itself, or said too little."""


class Alone:
    """One learner process with nobody to talk to: it copies nothing out that anybody reads."""

    def __init__(self, manifest: Manifest, options: LearnerOptions, log: Path) -> None:
        sync = msgspec.structs.replace(manifest.sync, inner_steps=100_000)
        quiet = msgspec.structs.replace(manifest, sync=sync)
        task = task_of(quiet)
        self._layouts = plan_fragments(task.specs(), quiet.sync.fragments)
        self._exchange = Exchange.create(self._layouts)
        parameters = task.initial_parameters()
        for layout in self._layouts:
            gather(parameters, layout, self._exchange.base(layout.index, 0))
        self.points: list[Point] = []
        self.notes: list[str] = []
        self._warm = asyncio.Event()
        self._exit = asyncio.Event()
        self._exit_reason = ""
        self._host = LearnerHost(quiet, self._layouts, self._exchange, options, self._on_event, log)

    async def start(self) -> None:
        """Begin to train."""
        await self._host.start([BaseRef(0, 0)] * len(self._layouts))

    async def warmed_up(self) -> None:
        """Wait for so many inner steps. Raises: Ended, TimeoutError."""
        try:
            await asyncio.wait_for(self._warm.wait(), WARM_UP_TIMEOUT_S)
        except TimeoutError as error:
            raise TimeoutError(
                f"fewer than {WARM_UP_STEPS} inner steps in {WARM_UP_TIMEOUT_S:.0f} s"
            ) from error
        self._check()

    async def go_on(self, seconds: float) -> None:
        """Train for so long. Raises: Ended."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._exit.wait(), seconds)
        self._check()

    async def end(self) -> None:
        """Whatever happened."""
        try:
            await self._host.stop(None, 3)
        finally:
            self._exchange.close()

    def _check(self) -> None:
        if self._exit.is_set():
            raise Ended(self._exit_reason)

    def _on_event(self, event: object) -> None:
        if isinstance(event, Status):
            point = Point(
                event.inner_step, event.cpu_s, event.step_time_s, event.longest_gap_s, time.monotonic()
            )
            self.points.append(point)
            if event.inner_step >= WARM_UP_STEPS:
                self._warm.set()
        elif isinstance(event, Note):
            self.notes.append(event.text)
        elif isinstance(event, LearnerExited):
            self._exit_reason = event.reason
            self._exit.set()
            self._warm.set()  # nobody is to wait for it


def rate(points: Sequence[Point]) -> Rate:
    """After the warm-up. Raises: Ended."""
    points = [point for point in points if point.inner_step >= WARM_UP_STEPS]
    if len(points) < 2:
        raise Ended("fewer than two reports of inner steps in the time: give it more --seconds")
    first, last = points[0], points[-1]
    steps = last.inner_step - first.inner_step
    return Rate(
        steps / (last.cpu_s - first.cpu_s),
        steps / (last.at_s - first.at_s),
        last.step_s,
        max(point.gap_s for point in points[1:]),
    )


async def alone(
    manifest: Manifest, learners: int, seconds: float, folder: Path, options: LearnerOptions
) -> list[Alone]:
    """Run so many learners at once, for so long after their first steps. Raises: Ended, TimeoutError."""
    made: list[Alone] = []
    try:
        for index in range(learners):
            its = msgspec.structs.replace(options, peer=f"alone-{index}")
            made.append(Alone(manifest, its, folder / f"alone-{index}.log"))
        await asyncio.gather(*(learner.start() for learner in made))
        await asyncio.gather(*(learner.warmed_up() for learner in made))
        await asyncio.gather(*(learner.go_on(seconds) for learner in made))
    finally:
        await asyncio.gather(*(learner.end() for learner in made))
    return made


def in_swarm(
    manifest: Manifest, nodes: int, seconds: float, folder: Path, options: LearnerOptions
) -> tuple[list[Rate], int]:
    """Run as many learners inside a real swarm: (their rates, versions merged). Raises:
    Ended, TimeoutError."""
    flags = ["--device", options.device, "--threads", str(options.threads), "--precision", options.precision]
    flags += ["--micro-batch-tokens", str(options.micro_batch_tokens), "--compile", options.compile]
    with running_swarm(folder, manifest, nodes, *NEVER, *flags) as swarm:
        diaries = [node.events for node in swarm.nodes]

        def check() -> None:
            for node, path in zip(swarm.nodes, diaries, strict=True):
                ends = [line for line in of_kind(read_log(path), "learner") if line.code is not None]
                if ends or not node.alive:
                    raise Ended(ends[0].reason if ends else node.last_words())

        def warm() -> bool:
            check()
            steps = [of_kind(read_log(path), "progress")[-1].inner_step for path in diaries]
            return min(steps) >= WARM_UP_STEPS

        wait_until(warm, WARM_UP_TIMEOUT_S)
        time.sleep(seconds)
        check()
        found = [read_log(path) for path in diaries]
    points = [
        [
            Point(p.inner_step, p.cpu_s, p.step_time_s, p.longest_gap_s, p.mono)
            for p in of_kind(lines, "progress")
        ]
        for lines in found
    ]
    merges = [line for lines in found for line in lines if line.is_merge()]
    return [rate(its) for its in points], len(merges)


def main() -> None:
    """Alternate, then print the ratios."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--learners", type=int, default=2)
    parser.add_argument("--device", default="cpu", help="of all learners, as of a node")
    parser.add_argument("--micro-batch-tokens", type=int, default=0, help="0: as a node chooses")
    parser.add_argument("--compile", default="never", choices=get_args(Compile))
    args = parser.parse_args()
    manifest = for_run(args.preset, "bench-inner")
    options = LearnerOptions(
        peer="",
        device=args.device,
        threads=1,
        micro_batch_tokens=args.micro_batch_tokens,
        compile=args.compile,
    )
    kind = "steps_per_cpu_s" if choose_device(args.device).type == "cpu" else "steps_per_s"
    ratios, alone_rates, swarm_rates, gaps, merges = [], [], [], [], []
    for index in range(args.rounds):
        with tempfile.TemporaryDirectory(prefix="p2pdiloco-bench-") as text:
            folder = Path(text)
            made = asyncio.run(alone(manifest, args.learners, args.seconds, folder, options))
            swarm, merged = in_swarm(manifest, args.learners, args.seconds, folder, options)
        lone = [rate(learner.points) for learner in made]
        means = [sum(getattr(r, kind) for r in rates) / len(rates) for rates in (lone, swarm)]
        ratios.append(means[1] / means[0])
        alone_rates += [getattr(r, kind) for r in lone]
        swarm_rates += [getattr(r, kind) for r in swarm]
        gaps += [r.longest_gap_s / r.step_s for r in swarm]
        merges.append(merged)
        print(f"pair {index + 1}: swarm/alone {ratios[-1]:.3f}, {merged} merges", flush=True)
    words = "steps per CPU-second" if kind == "steps_per_cpu_s" else "steps per second"
    figures = {
        "ratio": spread(ratios),
        f"alone_{kind}": spread(alone_rates),
        f"swarm_{kind}": spread(swarm_rates),
        "longest_gap_in_steps": spread(gaps),
        "merges": spread(merges),
    }
    print(
        table(
            [
                (f"alone, {words}", figures[f"alone_{kind}"]),
                (f"swarm, {words}", figures[f"swarm_{kind}"]),
                ("swarm / alone", figures["ratio"]),
                ("longest gap / mean inner step", figures["longest_gap_in_steps"]),
                ("merges", figures["merges"]),
            ],
            "",
        )
    )
    told = {"preset": args.preset, "seconds": args.seconds, "device": args.device, "learners": args.learners}
    finish("inner", {**told, **figures}, args.json)


if __name__ == "__main__":
    try:
        main()
    except (Ended, TimeoutError) as error:
        sys.exit(f"{type(error).__name__}: {error}")
