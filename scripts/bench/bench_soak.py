#!/usr/bin/env python3
"""Growth of a node while it runs: memory, descriptors, threads and disk, per thousand versions.

    .venv/bin/python scripts/bench/bench_soak.py [--minutes 60] [--nodes 4] [--preset micro] [--json FILE]

Real nodes on loopback at the pace that they make (`--min-step-s` slows it down).
Of every daemon and its network process (p2pd) the resident memory that is its own is read every ten seconds,
not that of files and of what it shares with its learner. After `--warm-up-s` a line is fitted through them.
Nobody is killed and nothing measured meanwhile: what grows, grows by versions and messages. States are
saved, for old updates are deleted then.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import psutil

from benchkit import MIB, arguments, finish, running_swarm
from p2pdiloco.config.presets import for_run
from p2pdiloco.demo.swarm import SwarmNode, Tail

SAMPLE_S = 10.0
P2PD = "p2pd"


class Sample(msgspec.Struct, frozen=True):
    """State of one node at one time."""

    at_s: float
    versions: int
    """Versions that it has committed, of all fragments."""
    daemon_bytes: int
    p2pd_bytes: int
    descriptors: int
    threads: int
    disk_bytes: int


class Watched:
    """One node, and what was read of it."""

    def __init__(self, node: SwarmNode) -> None:
        self.node = node
        self.samples: list[Sample] = []
        self._tail = Tail(node.events)
        self._versions: dict[int, int] = {}

    def look(self, at_s: float) -> Sample:
        """Read the node's state. Raises: psutil.Error (it has ended)."""
        for line in self._tail.lines():
            if line.number >= 0 and line.about is not None:
                self._versions[line.about] = max(line.number, self._versions.get(line.about, 0))
        daemon, p2pd = psutil.Process(self.node.pid), self.node.child(P2PD)
        folder = self.node.data_dir
        sample = Sample(
            at_s,
            sum(self._versions.values()),
            own_bytes(daemon.pid),
            own_bytes(p2pd.pid) if p2pd is not None else 0,
            daemon.num_fds(),
            daemon.num_threads(),
            sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        )
        self.samples.append(sample)
        return sample


def own_bytes(pid: int) -> int:
    """Resident memory of a process that belongs to no file and is shared with no other process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    return 0


def per_thousand(samples: Sequence[Sample], figure: str) -> float:
    """Growth of a figure per thousand versions: the slope of the line through the samples."""
    versions = np.array([sample.versions for sample in samples], dtype=float)
    values = np.array([getattr(sample, figure) for sample in samples], dtype=float)
    return float(np.polyfit(versions, values, 1)[0]) * 1000


def watch(args: argparse.Namespace) -> list[Watched]:
    """Run the nodes, read their state, and say once a minute where they are."""
    flags = ["--eval-every-s", "100000", "--min-step-s", str(args.min_step_s)]
    with (
        tempfile.TemporaryDirectory(prefix="p2pdiloco-soak-") as text,
        running_swarm(Path(text), for_run(args.preset, "bench-soak"), args.nodes, *flags) as swarm,
    ):
        watched = [Watched(node) for node in swarm.nodes]
        began_s = said_s = time.monotonic()
        while (now_s := time.monotonic()) < began_s + 60 * args.minutes:
            time.sleep(SAMPLE_S)
            swarm.watch()
            seen = [each.look(now_s - began_s) for each in watched]
            if now_s >= said_s:
                said_s = now_s + 60.0
                each = ", ".join(f"{sample.daemon_bytes / MIB:.1f}" for sample in seen)
                print(f"{now_s - began_s:6.0f} s  {seen[0].versions} versions  {each} MiB", flush=True)
    return watched


def told(each: Watched, warm_up_s: float) -> dict[str, object]:
    """Print one node's growth; returns its figures."""
    kept = [sample for sample in each.samples if sample.at_s >= warm_up_s]
    first, last = kept[0], kept[-1]
    grown = {name: per_thousand(kept, name) for name in Sample.__struct_fields__[2:]}
    words = (
        each.node.name,
        f"{last.versions - first.versions} versions in {(last.at_s - first.at_s) / 60:.0f} min",
        f"daemon {first.daemon_bytes / MIB:.1f} to {last.daemon_bytes / MIB:.1f} MiB, "
        f"{grown['daemon_bytes'] / 1024:.0f} KiB a thousand",
        f"p2pd {first.p2pd_bytes / MIB:.1f} to {last.p2pd_bytes / MIB:.1f} MiB",
        f"descriptors {first.descriptors} to {last.descriptors}",
        f"threads {first.threads} to {last.threads}",
        f"disk {first.disk_bytes / MIB:.1f} to {last.disk_bytes / MIB:.1f} MiB",
    )
    print("; ".join(words))
    return {"samples": [msgspec.to_builtins(sample) for sample in kept], "per_thousand": grown}


def main() -> None:
    """Watch, then print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--preset", default="micro")
    parser.add_argument("--min-step-s", type=float, default=0.02)
    parser.add_argument("--warm-up-s", type=float, default=120.0)
    args = parser.parse_args()
    if 60 * args.minutes < args.warm_up_s + 2 * SAMPLE_S:
        parser.error("--minutes must leave some samples after --warm-up-s")
    figures = {each.node.name: told(each, args.warm_up_s) for each in watch(args)}
    finish("soak", {"minutes": args.minutes, "preset": args.preset, **figures}, args.json)


if __name__ == "__main__":
    main()
