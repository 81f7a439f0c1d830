#!/usr/bin/env python3
"""Doubts of honest learners in a long run: is one of them left without weight, or excluded?

    python scripts/bench/worlds/bench_long_worlds.py [--hours 10] [--seeds 1 2 3] [--jobs 2] [--json FILE]

Long simulated worlds of honest learners of different speeds and data, with faults and cuts
(`worlds.hours`). An hour takes two or three CPU-s.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from multiprocessing import get_context
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/bench: what benchmarks share

import msgspec

from benchkit import arguments, finish
from worlds.hours import play_hours


def main(words: Sequence[str] | None = None) -> int:
    """Play the worlds, and print a row of each."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--hours", type=float, default=10.0, help="virtual time of each world")
    parser.add_argument("--seeds", nargs="+", type=int, default=(1,))
    parser.add_argument("--jobs", type=int, default=1)
    chosen = parser.parse_args(words)
    rows = []
    with get_context("spawn").Pool(chosen.jobs) as pool:
        for row in pool.imap(partial(play_hours, hours=chosen.hours), chosen.seeds):
            rows.append(row)
            print(msgspec.json.encode(row).decode(), flush=True)
    hours, doubted = sum(row.hours for row in rows), sum(row.doubted for row in rows)
    contributions, longest = sum(row.contributions for row in rows), max(row.longest_doubt for row in rows)
    print(
        f"{hours:.0f} hours, {sum(row.versions for row in rows)} versions, {sum(row.faults for row in rows)} "
        f"faults: {sum(row.excluded for row in rows)} excluded, {doubted} of {contributions} contributions "
        f"doubted, {longest} in a row at most, {sum(bool(row.violation) for row in rows)} violations"
    )
    finish("long-worlds", {"rows": msgspec.to_builtins(rows)}, chosen.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
