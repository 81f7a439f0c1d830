#!/usr/bin/env python3
"""Cost of liars among the learners in the simulator, where production's cores decide.

    python scripts/bench/worlds/bench_lying_worlds.py [--only LIE,…] [--cells 1/5 2/10 6/32]
        [--speeds equal spread] [--data equal different] [--seeds 0] [--jobs 2] [--json FILE]

Each cell is a small calm world (`worlds.cells`) with that many liars of so many learners, held
against its honest learners alone. Cells are whole: elections, rounds, offices, merges and outer steps are
production's. The model is a bigram model whose loss is exact.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/bench: what benchmarks share

import msgspec
from msgspec import Struct

from benchkit import arguments, finish
from worlds.cells import CALM, Cell, CellResult, LiarCellRow, play, row_of
from worlds.kinds import OF_TEXT, Lie

CELLS = ("1/5", "1/10", "2/10", "3/10", "3/32", "6/32", "10/32")
"""Liars of learners: a tenth, a fifth and a third of them."""


class WorstRow(Struct, frozen=True, kw_only=True):
    """Worst of a lie's cells, and their mean."""

    attack: str
    cells: int
    mean_loss_ratio: float
    worst_loss_ratio: float
    worst_gain_lost: float
    worst: str
    """Cell of the worst loss ratio."""
    worst_token_loss_ratio: float
    honest_doubted: float
    violations: int


def main(words: Sequence[str] | None = None) -> int:
    """Play the matrix, and print the worst cells."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--only", help="lies, by name (default: all, and none)")
    parser.add_argument("--cells", nargs="+", default=CELLS, metavar="LIARS/OF")
    parser.add_argument("--speeds", nargs="+", default=("equal", "spread"), choices=("equal", "spread"))
    parser.add_argument("--data", nargs="+", default=("equal", "different"), choices=("equal", "different"))
    parser.add_argument("--seeds", nargs="+", type=int, default=(0,))
    parser.add_argument("--jobs", type=int, default=2)
    chosen = parser.parse_args(words)
    known = [CALM, *(lie.value for lie in Lie if lie not in OF_TEXT)]
    chosen.attacks = chosen.only.split(",") if chosen.only else known
    if wrong := [name for name in chosen.attacks if name not in known]:
        parser.error(f"no lie: {', '.join(wrong)} (there are: {', '.join(known)})")
    rows = list(_rows(list(_cells(chosen)), chosen.jobs))
    worst = [_worst(attack, rows) for attack in dict.fromkeys(row.attack for row in rows)]
    for row in worst:
        print(
            f"{row.attack:20}{row.cells:4} cells, ratio {row.mean_loss_ratio:.3f} in the mean, "
            f"{row.worst_loss_ratio:.3f} at worst ({row.worst}), one token {row.worst_token_loss_ratio:.3f}, "
            f"doubted {row.honest_doubted:.3f}"
        )
    finish(
        "lying-worlds", {"rows": msgspec.to_builtins(rows), "worst": msgspec.to_builtins(worst)}, chosen.json
    )
    return 0


def _cells(chosen: argparse.Namespace) -> Iterator[Cell]:
    for size, speeds, data, seed in product(chosen.cells, chosen.speeds, chosen.data, chosen.seeds):
        liars, of = map(int, size.split("/"))
        for attack in chosen.attacks:
            yield Cell(attack=attack, liars=liars, of=of, speeds=speeds, data=data, seed=seed)


def _rows(cells: list[Cell], jobs: int) -> Iterator[LiarCellRow]:
    every = list(dict.fromkeys([*(cell.alone for cell in cells), *cells]))
    found: dict[Cell, CellResult] = {}
    with get_context("spawn").Pool(jobs) as pool:
        for cell, result in zip(every, pool.imap(play, every), strict=True):
            found[cell] = result
            if cell != cell.alone:
                row = row_of(cell, result, found[cell.alone])
                print(msgspec.json.encode(row).decode(), file=sys.stderr, flush=True)
                yield row


def _worst(attack: str, rows: Sequence[LiarCellRow]) -> WorstRow:
    mine = [row for row in rows if row.attack == attack]
    most = max(mine, key=lambda row: row.loss_ratio)
    return WorstRow(
        attack=attack,
        cells=len(mine),
        mean_loss_ratio=round(fmean(row.loss_ratio for row in mine), 4),
        worst_loss_ratio=most.loss_ratio,
        worst_gain_lost=max(row.gain_lost for row in mine),
        worst=f"{most.liars}/{most.of} {most.speeds} {most.data} seed {most.seed}",
        worst_token_loss_ratio=max(row.token_loss_ratio for row in mine),
        honest_doubted=max(row.honest_doubted for row in mine),
        violations=sum(bool(row.violation) for row in mine),
    )


if __name__ == "__main__":
    sys.exit(main())
