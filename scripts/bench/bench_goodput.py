"""Share of the compute that trains: the paper's table, p2pdiloco beside it, and swarms of volunteers.

    .venv/bin/python scripts/bench/bench_goodput.py [--json FILE] [--plots DIR] [--seeds 5] [--group-size G]
                                              [--only chips|recovery|homes] [--nodes 8,32,128]

1. Chips: the failure process of arXiv 2604.21428 (scripts/bench/goodput/chips.py) for elastic data
   parallel and M = 2...16, beside the paper's figures and the closed form.
2. p2pdiloco in the same process. What the paper assumes to be zero is measured in the protocol's simulator
   (scripts/bench/goodput/recovery.py) and drawn from those measurements at every failure.
3. Homes: 8, 32, 128 volunteers in the protocol's simulator (scripts/bench/goodput/sessions.py).

Everything is virtual time and seeded: the figures do not depend on the machine.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

from benchkit import arguments, finish, spread, table
from goodput import plots as goodput_plots
from goodput.chips import ChipTimes, Mishap, goodput, no_mishap
from goodput.homes import measure_homes, print_homes
from goodput.recovery import KINDS, STEP_S, Costs, Death, measure

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
PAPER = {
    1: (88, 80, 69, 58, 40),
    2: (94, 88, 80, 70, 54),
    4: (96, 93, 89, 82, 73),
    8: (98, 96, 94, 88, 80),
    16: (99, 98, 96, 93, 86),
}
"""Learners -> goodput in per cent; one learner is elastic data parallel."""
TOLERANCE = 3.0
FAILURES = 20_000
CHIPS_PER_HOST = 8
DEATHS = 30


def row_name(learners: int) -> str:
    """Name a row as the paper does."""
    return "data parallel, elastic" if learners == 1 else f"decoupled, M = {learners}"


def cell(chips: int, learners: int, seeds: int, mishap: Mishap = no_mishap) -> dict[str, float]:
    """Goodput in per cent over the seeds."""
    values = [
        100.0
        * goodput(
            chips, learners, ChipTimes(), Random(f"{seed}/{chips}/{learners}"), FAILURES, mishap
        ).goodput
        for seed in range(seeds)
    ]
    return {"mean": statistics.fmean(values), "min": min(values), "max": max(values)}


def paper_table(seeds: int) -> list[dict[str, Any]]:
    """Every cell: process, closed form, paper."""
    cells = []
    for learners, row in PAPER.items():
        for chips, paper in zip(CHIPS, row, strict=True):
            got = cell(chips, learners, seeds)
            closed = 100.0 * ChipTimes().closed_form(chips, learners)
            cells.append(
                {"learners": learners, "chips": chips, "paper": paper, "closed_form": closed, "process": got}
            )
    return cells


def print_paper(cells: Sequence[dict[str, Any]]) -> None:
    """Process (difference to the paper; closed form), row by row."""
    print("\n1. Goodput %, chip-level process: mean of the seeds (minus the paper's; closed form)")
    print(f"{'chips':24}" + "".join(f"{chips:>22,}" for chips in CHIPS))
    for learners in PAPER:
        line = ""
        for c in (c for c in cells if c["learners"] == learners):
            mean = c["process"]["mean"]
            line += f"{mean:>9.1f} ({mean - c['paper']:+.1f}; {c['closed_form']:.1f})"
        print(f"{row_name(learners):24}{line}")
    off = [c["process"]["mean"] - c["paper"] for c in cells]
    widest = max(c["process"]["max"] - c["process"]["min"] for c in cells)
    rms = statistics.fmean(d * d for d in off) ** 0.5
    outside = [c for c in cells if abs(c["process"]["mean"] - c["paper"]) > TOLERANCE]
    print(
        f"worst {max(off, key=abs):+.2f} points, RMS {rms:.2f}, widest spread between seeds {widest:.2f};",
        end=" ",
    )
    print(f"{len(outside)} of {len(cells)} cells are more than {TOLERANCE:.0f} points away")


def mishap_of(deaths: Sequence[Death], machines_share: float, machines: Sequence[Death]) -> Mishap:
    """Failures cost what one of `deaths` cost (nothing, if there are none); a share what `machines` cost.

    One fragment's lost steps are drawn, not their mean: what can be lost is capped per fragment.
    """

    def draw(rng: Random) -> tuple[float, float]:
        pool = machines if rng.random() < machines_share else deaths
        if not pool:
            return 0.0, 0.0
        death = rng.choice(pool)
        return death.idle_s or 0.0, STEP_S * rng.choice(death.lost_steps)

    return draw


def own_rows(costs: dict[int, Costs], seeds: int) -> list[dict[str, Any]]:
    """p2pdiloco at the paper's scale: see `print_own` for what the cases are."""
    cells = []
    for learners, measured in costs.items():
        machines = measured.of("machine")
        for chips in CHIPS:
            share = CHIPS_PER_HOST * learners / chips
            cases = {
                "kept": mishap_of([], share, machines),
                "restarts": mishap_of(measured.of("learner"), share, machines),
                "replaced": mishap_of(machines, 1.0, machines),
            }
            got = {case: cell(chips, learners, seeds, mishap) for case, mishap in cases.items()}
            cells.append({"learners": learners, "chips": chips, **got})
    return cells


def print_own(cells: Sequence[dict[str, Any]], costs: dict[int, Costs]) -> None:
    """Rows for p2pdiloco, and what they are made of."""
    print("\n2. Goodput %, p2pdiloco in the same process, with what the simulated protocol really costs")
    print(f"{'chips':34}" + "".join(f"{chips:>12,}" for chips in CHIPS))
    for learners in costs:
        for case in ("kept", "restarts", "replaced"):
            row = [c[case]["mean"] for c in cells if c["learners"] == learners]
            print(f"{f'M = {learners}, {case}':34}" + "".join(f"{value:>12.1f}" for value in row))
    print("kept: a chip failure leaves the learner's parameters in the other chips, as the paper assumes.")
    print(
        "restarts: it ends the learner process, which goes on from the daemon's parameters after the stall."
    )
    print(f"In both, 1 failure in chips/({CHIPS_PER_HOST} M) is that of the daemon's own host.")
    print("replaced: at every chip failure the daemon's host is lost with its disk, the worst there is.")
    for learners, measured in costs.items():
        print()
        print(table(recovery_rows(measured), f"M = {learners}"))


def recovery_rows(measured: Costs) -> list[tuple[str, dict[str, float]]]:
    """Spreads of everything that was measured."""
    dead = [*measured.of("node"), *measured.of("machine")]
    rows = [
        ("quiet: any moment to the next version, s", spread(measured.quiet_s)),
        (
            "syncer's death to the next certificate, s",
            spread([s for d in dead for s in d.elected_s.values()]),
        ),
        ("syncer's death to the next version, s", spread([s for d in dead for s in d.resumed_s.values()])),
    ]
    for kind in KINDS:
        of_kind = measured.of(kind)
        rows += [
            (f"{kind}: inner steps lost, per fragment", spread([s for d in of_kind for s in d.lost_steps])),
            (
                f"{kind}: restart to first inner step, s",
                spread([d.idle_s for d in of_kind if d.idle_s is not None]),
            ),
            (
                f"{kind}: restart to first merged, s",
                spread([d.back_s for d in of_kind if d.back_s is not None]),
            ),
        ]
    return rows


def options() -> argparse.Namespace:
    """Parse the options."""
    parser = arguments(__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--seeds", type=int, default=5, help="seeds of the chip-level process per cell")
    parser.add_argument("--plots", type=Path, metavar="DIR", help="write PNG files there")
    parser.add_argument("--only", choices=("chips", "recovery", "homes"), help="one part of the whole")
    parser.add_argument("--nodes", default="8,32,128", help="sizes of the volunteers' swarms")
    parser.add_argument("--group-size", type=int, default=16, help="of the volunteers' swarms")
    parser.add_argument("--deaths", type=int, default=DEATHS, help="deaths per number of learners")
    return parser.parse_args()


def main() -> None:
    """Measure, print, write."""
    chosen = options()
    figures: dict[str, Any] = {}
    if chosen.only in (None, "chips"):
        figures["paper"] = paper_table(chosen.seeds)
        print_paper(figures["paper"])
    if chosen.only in (None, "recovery"):
        costs = {m: measure(m, seed=1, deaths=chosen.deaths) for m in PAPER if m > 1}
        figures["p2pdiloco"] = own_rows(costs, chosen.seeds)
        figures["recovery"] = {m: dict(recovery_rows(c)) for m, c in costs.items()}
        print_own(figures["p2pdiloco"], costs)
    if chosen.only in (None, "homes"):
        sizes = [int(size) for size in chosen.nodes.split(",")]
        figures["homes"] = measure_homes(sizes, chosen.group_size)
        print_homes(figures["homes"])
    if chosen.plots is not None:
        for path in goodput_plots.draw(figures, chosen.plots):
            print(f"written to {path}")
    finish("goodput", figures, chosen.json)


if __name__ == "__main__":
    main()
