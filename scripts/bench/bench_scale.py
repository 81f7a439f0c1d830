#!/usr/bin/env python3
"""Cost of a swarm for each of its nodes as it grows: the simulator's large calm worlds, one after the other.

python scripts/bench/bench_scale.py [--sizes 4,8,16] [--json FILE] [--plot FILE.png]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib
from msgspec import to_builtins

from p2pdiloco_lab.seed_pool import rare_collections
from p2pdiloco_lab.simulation.scale import run_scale

SIZES = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 10000)
COLUMNS = (
    ("nodes", "nodes"),
    ("levels", "levels"),
    ("messages", "messages_mean"),
    ("(max)", "messages_max"),
    ("control kB", "control_bytes_mean"),
    ("labels kB", "label_bytes_mean"),
    ("payload kB", "payload_bytes_mean"),
    ("(max)", "payload_bytes_max"),
    ("peers", "peers_mean"),
    ("(max)", "peers_max"),
    ("interval s", "update_interval_s"),
    ("latency s", "latency_median_s"),
    ("p95", "latency_p95_s"),
    ("spread s", "spread_median_s"),
    ("p95", "spread_p95_s"),
    ("partic.", "participation"),
    ("CPU s", "cpu_s"),
)
Row = dict[str, Any]


def measure(sizes: list[int], seed: int) -> list[Row]:
    """One row per size, printed as it comes."""
    rare_collections()
    print("  ".join(f"{title:>10}" for title, _ in COLUMNS))
    rows = []
    for nodes in sizes:
        started_s = time.process_time()
        row: Row = to_builtins(run_scale(nodes, seed))
        row["cpu_s"] = round(time.process_time() - started_s, 1)
        rows.append(row)
        print("  ".join(f"{_shown(name, row[name]):>10}" for _, name in COLUMNS), flush=True)
    return rows


def _shown(name: str, value: float) -> str:
    return f"{value / 1000:.1f}" if "bytes" in name else f"{value:g}"


def plot(rows: list[Row], path: Path) -> None:
    """Messages, bytes, peers and latency over the number of nodes."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = (
        ("messages per outer update", (("mean", "messages_mean"), ("max", "messages_max"))),
        ("peers talked to", (("mean", "peers_mean"), ("max", "peers_max"))),
        (
            "bytes sent per outer update",
            (
                ("control", "control_bytes_mean"),
                ("labels", "label_bytes_mean"),
                ("payload", "payload_bytes_mean"),
            ),
        ),
        (
            "seconds",
            (
                ("copy-out to applied", "latency_median_s"),
                ("p95", "latency_p95_s"),
                ("spread", "spread_p95_s"),
            ),
        ),
    )
    figure, axes = plt.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
    for axis, (title, lines) in zip(axes.flat, panels, strict=True):
        for label, name in lines:
            axis.plot([row["nodes"] for row in rows], [row[name] for row in rows], marker="o", label=label)
        axis.set_xscale("log")
        axis.set_ylim(bottom=0)
        if "bytes" in title:
            axis.set_yscale("log")
        axis.set_title(title)
        axis.set_xlabel("nodes")
        axis.legend()
        axis.grid(alpha=0.3)
    figure.suptitle("One node of a p2pdiloco swarm, simulated, groups of 16, wide-area links")
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main(arguments: list[str]) -> int:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default=",".join(map(str, SIZES)), help="numbers of nodes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    parser.add_argument("--plot", type=Path, help="write a PNG to this file")
    options = parser.parse_args(arguments)
    rows = measure([int(size) for size in options.sizes.split(",")], options.seed)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    if options.plot:
        plot(rows, options.plot)
    return 0 if all(row["updates"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
