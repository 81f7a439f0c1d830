"""Length of a round, and the daemon's cost: 4 nodes, `small` (about 10M parameters).

    .venv/bin/python scripts/bench/bench_round.py [--nodes 4] [--seconds 120] [--preset small] [--json FILE]

Round: from quorum (the K-th contribution's arrival) at the syncer to the moment when the last live peer has
decoded the update and made the outer step, per version; on one machine all diaries share a clock. The grace
window, which waits for the slower learners on purpose, is shown apart: "after closing" starts when it ends.
Cost: CPU seconds of daemon and p2pd per version and million parameters of the fragment; resident memory.
Inner steps are short here (few tokens) so that rounds are frequent; learners keep both cores busy.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil

from benchkit import NEVER, arguments, finish, running_swarm, spread, table
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.presets import for_run
from p2pdiloco.demo.swarm import Line, SwarmNode, of_kind, read_log
from p2pdiloco.tasks.registry import task_of

MEGABYTE = 1e6


def short_steps(manifest: Manifest, inner_steps: int) -> Manifest:
    """The preset's model with one window per inner step and frequent rounds."""
    inner = msgspec.structs.replace(manifest.inner, tokens_per_step=task_of(manifest).tokens_per_sample)
    delay = min(manifest.sync.delay_steps, inner_steps - 1)
    sync = msgspec.structs.replace(manifest.sync, inner_steps=inner_steps, delay_steps=delay)
    return msgspec.structs.replace(manifest, inner=inner, sync=sync)


def rounds(diaries: dict[str, list[Line]]) -> tuple[list[float], list[float]]:
    """(quorum to applied everywhere, closing to applied everywhere) of every version that all nodes have."""
    begun: dict[tuple[int, int], float] = {}
    closed: dict[tuple[int, int], float] = {}
    done: dict[tuple[int, int], list[float]] = {}
    for lines in diaries.values():
        for line in lines:
            key = line.version
            if line.kind == "closing":
                begun[key] = line.mono
            elif line.kind == "merge":
                closed[key] = line.mono
            elif line.kind in ("publish", "apply"):
                done.setdefault(key, []).append(line.mono)
    whole = {k: max(v) for k, v in done.items() if len(v) == len(diaries) and k in begun and k in closed}
    return [at - begun[k] for k, at in whole.items()], [at - closed[k] for k, at in whole.items()]


class Cost(msgspec.Struct):
    """CPU seconds and resident megabytes of a node's three processes."""

    daemon_cpu_s: float
    p2pd_cpu_s: float
    daemon_mb: float
    p2pd_mb: float
    learner_mb: float


def cost(node: SwarmNode) -> Cost:
    """Cost as the operating system counts it now."""
    daemon = psutil.Process(node.pid)
    p2pd = next(c for c in daemon.children(recursive=True) if c.name() == "p2pd")
    learner = next(c for c in daemon.children(recursive=True) if "p2pdiloco.learner" in c.cmdline())

    def cpu_s(process: psutil.Process) -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    sizes = [process.memory_info().rss / MEGABYTE for process in (daemon, p2pd, learner)]
    return Cost(cpu_s(daemon), cpu_s(p2pd), *sizes)


def main() -> None:
    """Run the swarm once and print the figures."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--preset", default="small")
    parser.add_argument("--inner-steps", type=int, default=12)
    args = parser.parse_args()
    manifest = short_steps(for_run(args.preset, "bench-round"), args.inner_steps)
    with (
        tempfile.TemporaryDirectory(prefix="p2pdiloco-bench-") as text,
        running_swarm(Path(text), manifest, args.nodes, *NEVER) as swarm,
    ):
        before, began_s = [cost(node) for node in swarm.nodes], time.monotonic()
        time.sleep(args.seconds)
        after, ended_s = [cost(node) for node in swarm.nodes], time.monotonic()
        diaries = {node.name: read_log(node.events) for node in swarm.nodes}
    latency, after_closing = rounds(diaries)
    made = sum(
        1 for lines in diaries.values() for line in of_kind(lines, "publish") if began_s < line.mono < ended_s
    )
    parameters = sum(spec.numel for spec in task_of(manifest).specs())
    cpu = [
        b.daemon_cpu_s + b.p2pd_cpu_s - a.daemon_cpu_s - a.p2pd_cpu_s
        for a, b in zip(before, after, strict=True)
    ]
    millions = parameters / manifest.sync.fragments / 1e6
    figures: dict[str, Any] = {
        "parameters": parameters,
        "versions": made,
        "round_s": spread(latency),
        "after_closing_s": spread(after_closing),
        "cpu_s_per_node_version_million": spread([c / made / millions for c in cpu]),
        "idle_and_rounds_cpu_share": spread([c / (ended_s - began_s) for c in cpu]),
        "daemon_mb": spread([c.daemon_mb for c in after]),
        "p2pd_mb": spread([c.p2pd_mb for c in after]),
        "learner_mb": spread([c.learner_mb for c in after]),
    }
    names = {
        "round_s": "quorum to applied everywhere, s",
        "after_closing_s": "closing to applied everywhere, s",
        "cpu_s_per_node_version_million": "daemon+p2pd CPU-s per node, version, M parameters",
        "idle_and_rounds_cpu_share": "daemon+p2pd, share of one core per node",
        "daemon_mb": "daemon, resident MB",
        "p2pd_mb": "p2pd, resident MB",
        "learner_mb": "learner, resident MB",
    }
    print(f"{args.nodes} nodes, {parameters / 1e6:.1f} M parameters, {made} versions in {args.seconds:.0f} s")
    print(table([(text, figures[key]) for key, text in names.items()], ""))
    finish("round", {"preset": args.preset, "nodes": args.nodes, **figures}, args.json)


if __name__ == "__main__":
    main()
