#!/usr/bin/env python3
"""What simulated swarms make of their time, by mix, and over what another tree made of the same seeds.

    python scripts/bench/worlds/bench_figures.py [--mixes calm …] [--seed 700] [--seeds 48] [--jobs 2]
                                                 [--json FILE] [--against FILE …]

For each virtual second: versions in the heaviest chains of the end, contributions in them, control messages
that left, and their bytes; and all bytes, with labels of streams and payloads of 9 kB, as model `micro` has.
`--against`: what `--json` wrote of another tree of the code, which is
played where PYTHONPATH names its root and its `lab`. Ratios are geometric means over the seeds that hold in
both, with standard errors.
"""

from __future__ import annotations

import json
import math
import sys
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean, stdev

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/bench: what benchmarks share

from benchkit import arguments, finish
from p2pdiloco.core.api.types import Wire, signed_bytes
from p2pdiloco_lab.simulation.seed_plan import MIXES, draw_plan
from p2pdiloco_lab.simulation.sim_world import World

FIGURES = "versions", "contributions", "messages", "bytes", "all bytes"
BY = {"contributors a version": ("contributions", "versions"), "bytes a message": ("bytes", "messages")}
PAYLOAD_BYTES = 9_000


class Meter:
    """Counts of what leaves (`Network.meter`)."""

    def __init__(self) -> None:
        self.messages = self.bytes = self.streamed_bytes = 0

    def control(self, _source: str, _target: str, size_bytes: int, _message: object) -> None:
        """A control message leaves."""
        self.messages += 1
        self.bytes += size_bytes

    def streamed(self, _source: str, _target: str, label: Wire | None, payload_bytes: int) -> None:
        """A part of a stream leaves."""
        self.streamed_bytes += (
            len(signed_bytes("version", label)) if label is not None else 0
        ) + PAYLOAD_BYTES * bool(payload_bytes)


def play(asked: tuple[str, int]) -> tuple[str, list[float] | None]:
    """Play one world: its name, and its figures; None: a rule was broken, or it stood still."""
    mix, seed = asked
    world, meter = World(draw_plan(seed, mix)), Meter()
    world.network.meter = meter  # type: ignore[assignment]
    result, versions, contributions = world.run(), 0, 0
    for fragment in range(world.plan.config.fragments):
        heads = [host.stores[fragment].version for host in world.up_hosts()]
        best = max(heads, key=lambda version: version.header.head().weight)
        for digest in world.watch.ancestors(best):
            made = world.watch.headers.get(digest)
            if made is not None and made.header.number:
                versions, contributions = versions + 1, contributions + len(made.header.contributors)
    counted = meter.messages, meter.bytes, meter.bytes + meter.streamed_bytes
    found = [each / world.clock.now for each in (versions, contributions, *counted)]
    return f"{mix} {seed}", found if result.ok else None


def ratio(ours: list[float], theirs: list[float]) -> str:
    """Word a geometric mean of ratios, and its standard error."""
    logs = [math.log(a / b) for a, b in zip(ours, theirs, strict=True) if a and b]
    error = stdev(logs) / len(logs) ** 0.5 if len(logs) > 1 else math.nan
    return f"{math.exp(fmean(logs)):.3f} ± {error:.3f}"


def main() -> int:
    """Play the worlds, and print a row for each mix."""
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--mixes", nargs="+", choices=MIXES, default=["calm", "churn", "partition", "storm", "wan"]
    )
    parser.add_argument("--seed", type=int, default=700)
    parser.add_argument("--seeds", type=int, default=48)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--against", type=Path, nargs="+", metavar="FILE")
    chosen = parser.parse_args()
    seeds = range(chosen.seed, chosen.seed + chosen.seeds)
    with get_context("spawn").Pool(chosen.jobs) as pool:
        found = dict(pool.imap(play, [(mix, seed) for mix in chosen.mixes for seed in seeds], 2))
    finish("figures", {"worlds": found}, chosen.json)
    other: dict[str, list[float] | None] = {}
    for path in chosen.against or ():
        other |= json.loads(path.read_text())["worlds"]
    for mix in [*chosen.mixes, ""]:
        names = [
            name for name in found if name.startswith(mix) and found[name] and other.get(name, found[name])
        ]
        ours = {key: [found[name][at] for name in names] for at, key in enumerate(FIGURES)}  # type: ignore[index]
        base = {key: [(other or found)[name][at] for name in names] for at, key in enumerate(FIGURES)}  # type: ignore[index]
        for key, (above, below) in BY.items():
            for figures in (ours, base):
                figures[key] = [
                    a / b if b else 0.0 for a, b in zip(figures[above], figures[below], strict=True)
                ]
        words = [
            f"{key} {ratio(ours[key], base[key]) if other else f'{fmean(ours[key]):.2f}'}" for key in ours
        ]
        print(f"{mix or 'all':10} {len(names):4} seeds  {'  '.join(words)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
