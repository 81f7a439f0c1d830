#!/usr/bin/env python3
"""Outer steps that production does not have, against production's (study.outer.variants).

`gain`: production's outer step, gain-normalised Nesterov (s), the correction q in place of the warm-up, both;
H = 24 and 100, 4 and 16 learners. `keep`: rho = 1 and 0 at 8 and 16 learners. `top`: top-k with two bits,
error feedback and no outer momentum, against int8 with and without momentum. Figure: held-out loss of the
result, virtual time, as bench_learning.py. A run is a line of --out, and is not made again.

    python scripts/bench/study/outer/bench_outer.py gain keep top --out outer.jsonl [--seeds 0 1 2]
    python scripts/bench/study/outer/bench_outer.py gain keep top --out outer.jsonl --table
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # scripts/bench: what its studies share

import msgspec
import torch
from msgspec import Struct

from study.outer.variants import Seen, Variant, VariantSwarm
from study.setting import HELDOUT_TOKENS, Setting
from study.suites import every

replace = msgspec.structs.replace
BASE = Setting(inner_rate=6e-3, beta1=0.8)
"""`mini` over 700 steps, as in experiments-settings.md."""
STEPS = {"usual": Variant(), "s": Variant(gain=True)}
STEPS |= {"q": Variant(corrected=True), "s and q": Variant(gain=True, corrected=True)}


class Cell(Struct, frozen=True):
    """One row of a table."""

    name: str
    setting: Setting
    variant: Variant


class Line(Struct):
    """One line of results. `cosine`, `gain`, `factor`: means over the merges of the second half."""

    suite: str
    name: str
    seed: int
    run: str
    """Equal for equal runs, of whichever suite."""
    loss: float
    curve: list[tuple[int, float]]
    cosine: float
    gain: float
    factor: float
    cosines: list[float]
    """Cosine of each fragment."""
    wall_s: float


def gain(base: Setting) -> Iterator[Cell]:
    """Gain-normalised Nesterov, and q for the warm-up."""
    for learners, period in ((4, 24), (4, 100), (16, 24), (16, 100)):
        setting = every(replace(base, learners=learners), period)
        for name, variant in STEPS.items():
            yield Cell(f"{learners} learners, H = {period}: {name}", setting, variant)


def keep(base: Setting) -> Iterator[Cell]:
    """Keep what was trained in flight, or overwrite it."""
    for learners in (8, 16):
        for rho in (1.0, 0.0):
            setting = every(replace(base, learners=learners, keep=rho), 24)
            yield Cell(f"{learners} learners, rho = {rho:g}", setting, Variant())


def top(base: Setting) -> Iterator[Cell]:
    """Top-k of two bits without outer momentum, against int8."""
    usual = every(base, 24)
    plain = replace(usual, momentum=0.0, outer_rate=1.0, merge="mean")
    yield Cell("int8, momentum", usual, Variant())
    yield Cell("int8, no momentum, mean", plain, Variant())
    yield Cell("top 6.25 %, two bits, no momentum, mean", plain, Variant(top=0.0625))
    yield Cell("int8, no momentum, RDA", replace(plain, merge="rda"), Variant())
    yield Cell("top 6.25 %, two bits, no momentum, RDA", replace(plain, merge="rda"), Variant(top=0.0625))


SUITES = {"gain": gain, "keep": keep, "top": top}


def key_of(cell: Cell, seed: int) -> str:
    """Name a run by what decides it."""
    return replace(cell.setting, seed=seed).key + msgspec.json.encode(cell.variant).decode()


def run(suite: str, cell: Cell, seed: int, heldout_tokens: int = HELDOUT_TOKENS) -> Line:
    """Play one cell."""
    began, setting = time.perf_counter(), replace(cell.setting, seed=seed)
    swarm = VariantSwarm(setting, cell.variant, heldout_tokens)
    try:
        curve = swarm.play(setting.steps, max(1, setting.steps // 4))
    finally:
        swarm.close()
    most = max(one.number for one in swarm.seen)
    late = [one for one in swarm.seen if 2 * one.number > most]
    fragments = range(len(swarm.layouts))
    return Line(
        suite,
        cell.name,
        seed,
        key_of(cell, seed),
        curve[-1][1],
        curve,
        statistics.fmean(one.cosine for one in late),
        statistics.fmean(one.gain for one in late),
        statistics.fmean(one.factor for one in late),
        [_mean_cosine(late, fragment) for fragment in fragments],
        time.perf_counter() - began,
    )


def _mean_cosine(late: list[Seen], fragment: int) -> float:
    return statistics.fmean(one.cosine for one in late if one.fragment == fragment)


def table(lines: list[Line], suite: str) -> Iterator[str]:
    """A suite's rows, as Markdown; losses by seed."""
    names = list(dict.fromkeys(line.name for line in lines if line.suite == suite))
    yield f"| {suite} | loss by seed | cosine | A | s |\n|---|---|---|---|---|"
    for name in names:
        its = sorted((one for one in lines if (one.suite, one.name) == (suite, name)), key=lambda x: x.seed)
        losses = ", ".join(f"{one.loss:.4f} ({one.seed})" for one in its)
        seen = [statistics.fmean(getattr(one, what) for one in its) for what in ("cosine", "gain", "factor")]
        yield f"| {name} | {losses} | {seen[0]:.2f} | {seen[1]:.2f} | {seen[2]:.2f} |"


def main() -> int:
    """Run what is not there yet, or print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("suites", nargs="+", choices=list(SUITES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="cells whose name has this in it")
    parser.add_argument("--steps", type=int, default=BASE.steps)
    parser.add_argument("--table", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = options.out.read_text() if options.out.exists() else ""
    lines = [msgspec.json.decode(line, type=Line) for line in text.splitlines()]
    done = {(line.suite, line.name, line.seed) for line in lines}
    if options.table:
        for suite in options.suites:
            print("\n".join(table(lines, suite)), end="\n\n")
        return 0
    for seed in options.seeds:
        for suite in options.suites:
            for cell in SUITES[suite](replace(BASE, steps=options.steps)):
                if (suite, cell.name, seed) in done or options.only not in cell.name:
                    continue
                same = [line for line in lines if line.run == key_of(cell, seed)]
                line = replace(same[0], suite=suite, name=cell.name) if same else run(suite, cell, seed)
                lines.append(line)
                with options.out.open("ab") as file:
                    file.write(msgspec.json.encode(line) + b"\n")
                print(f"{cell.name}, seed {seed}: {line.loss:.4f}, {line.wall_s:.0f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
