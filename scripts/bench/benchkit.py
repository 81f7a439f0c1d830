"""Kit of the benchmarks: swarms, quantiles, tables, and the JSON result."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.presets import without_end
from p2pdiloco.daemon.run_files.ownership import Ownership
from p2pdiloco.demo.swarm import Swarm, SwarmNode, of_kind, read_log
from p2pdiloco.tasks.registry import render_toml
from p2pdiloco_lab.namespaces import Links, place
from shaped.homes import ShapedLinks

if TYPE_CHECKING:
    from torch import nn

    from p2pdiloco.tasks.task import Batch, Task

START_TIMEOUT_S = 240.0
MIB = 1 << 20
INVITED = 64
"""Nodes that an invite of a swarm lets in."""
AT_ONCE = {"MALLOC_MMAP_THRESHOLD_": "65536"}
"""Environment in which freed memory goes back to the machine: else what was used at the start hides later
use."""
NEVER = ("--eval-every-s", "100000", "--checkpoint-every-s", "100000")


@contextmanager
def running_swarm(
    folder: Path,
    manifest: Manifest,
    nodes: int,
    *flags: str,
    each: Sequence[Sequence[str]] = (),
    links: Links | ShapedLinks | None = None,
    wrappers: Sequence[Sequence[str] | None] = (),
) -> Iterator[Swarm]:
    """A bootstrap and training nodes on loopback, ended whatever happens, but not by their schedule.
    Of a flag the last one wins.
    `each`: more flags of every single node. With `links`, which are the caller's to close, every node is in a
    network namespace of its own. `wrappers`: words before single nodes' commands."""
    manifest = without_end(manifest)
    run_file = folder / "run.toml"
    run_file.write_text(render_toml(manifest))
    swarm = Swarm(folder, run_file, manifest, nodes, temporary=True)
    try:
        if links is not None:
            place(swarm, links)
        address = swarm.start_bootstrap(time.sleep)
        invited = invites(swarm, manifest, address)
        for node, its in zip(swarm.nodes, each or [()] * nodes, strict=True):
            node.arguments += [*invited, *flags, *its]
        for node, words in zip(swarm.nodes, wrappers, strict=False):
            node.wrapper = [*node.wrapper, *(words or ())]
        swarm.start_nodes(address)
        for node in swarm.nodes:
            wait_until(partial(_trains, node), START_TIMEOUT_S)
            swarm.watch()
        yield swarm
    finally:
        swarm.leave(time.sleep)
        swarm.end()


def invites(swarm: Swarm, manifest: Manifest, address: str) -> list[str]:
    """Words with which a node joins a run that takes members by invite only; none where the run is open."""
    if manifest.admission.mode != "invite":
        return []
    owned = Ownership.find(manifest.run.name, swarm.bootstrap.data_dir)
    return [owned.link(owned.invite(0, INVITED, "", (address,)))]


def _trains(node: SwarmNode) -> bool:
    return bool(of_kind(read_log(node.events), "progress"))


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Poll a condition. Raises: TimeoutError."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {timeout_s:.0f} s in vain")
        time.sleep(0.05)


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there as well")
    return parser


def peak_bytes() -> int:
    """Most resident memory since `forget_peak`."""
    return 1024 * int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def forget_peak() -> int:
    """Resident memory now, from where the peak is counted."""
    Path("/proc/self/clear_refs").write_text("5")
    return peak_bytes()


def processor_s(work: Callable[[], object]) -> float:
    """Processor time that it takes."""
    start = time.process_time()
    work()
    return time.process_time() - start


def both_passes(task: Task, model: nn.Module, batch: Batch, bf16: bool) -> None:
    """Forward and backward on a CPU, as a learner makes them."""
    import torch  # most benchmarks do without, and their processes are measured

    from p2pdiloco.learner.ranks import autocast

    with autocast(torch.device("cpu"), bf16):
        loss = task.loss(model, batch)
    torch.autograd.backward(loss)


def spread(values: Sequence[float]) -> dict[str, float]:
    """min, median, p95 (nearest rank), max and how many."""
    if not values:
        return {"n": 0}
    ranked = sorted(values)
    p95 = ranked[min(len(ranked) - 1, max(0, -(-95 * len(ranked) // 100) - 1))]
    return {
        "n": len(ranked),
        "min": ranked[0],
        "median": statistics.median(ranked),
        "p95": p95,
        "max": ranked[-1],
    }


def table(rows: Sequence[tuple[str, dict[str, float]]], unit: str) -> str:
    """Rows of spreads as aligned text."""
    head = f"{'':44}{'n':>6}{'min':>10}{'median':>10}{'p95':>10}{'max':>10}  {unit}"
    body = []
    for name, values in rows:
        cells = "".join(f"{values[key]:10.3f}" for key in ("min", "median", "p95", "max") if key in values)
        body.append(f"{name:44}{values['n']:>6}{cells}")
    return "\n".join([head, *body])


def machine() -> dict[str, Any]:
    """Enough to judge a figure by."""
    return {
        "cores": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "load_at_end": os.getloadavg()[0],
    }


def finish(name: str, figures: dict[str, Any], path: Path | None) -> None:
    """Write the JSON result where it was asked for."""
    if path is not None:
        path.write_text(json.dumps({"benchmark": name, "machine": machine(), **figures}, indent=2) + "\n")
        print(f"written to {path}")
