"""Comparison on equal home links: ours beside OpenDiLoCo's and torchft's ways; 4 real nodes each.

    python scripts/bench/bench_rivals.py [--quick] [--cell 10/100 ...] [--way ours ...] [--seconds 45]
        [--json FILE]

Linux, root. Links, cells, model and scaling are those of `bench_links.py`: 10.7 M parameters in 3 fragments,
H = 11, inner steps of 0.97 s, tau up to 6 steps, as many bytes a second as 100 M parameters and H = 100 ask
for. Every way gets fresh links of the same kind, one after the other, in one run. Learners are paced: ours
train on a few tokens, the others' inner steps are sleeps, so that the links are what is measured.

ours          whole nodes, as in bench_links, e3m0 both ways.
opendiloco    H inner steps, then everybody stands still while hivemind's real `DecentralizedAverager`
              averages all pseudo-gradients in fp16, and goes on when it has. Not modelled, all in its favour:
              its progress tracker, with which peers find out over the DHT that all are ready (here they are
              in lockstep); 15 s of matchmaking by default (here 3 s, begun 4 inner steps before the end, so
              that it costs nothing unless it takes longer); the averaging of the parameters themselves which
              it does as well after each outer step, as many bytes again; the outer step's arithmetic.
torchft       Streaming DiLoCo in lockstep, as in torchft 0.2.0 (`local_sgd.DiLoCo`): fragment i's
              pseudo-gradient is due at H (i + 1) / P; its all-reduce starts `fragment_sync_delay` inner steps
              before, in the background, and at the due step everybody stands still until it has come. One
              fragment is on its way at a time (torchft refuses a delay as long as H / P), so the delay is
              what is left of the 6 steps under that rule: 2, 3 and 3, so 8 of 11 steps overlap. (Against it:
              of the H = 100 that is scaled down here its rule allows 96.) `torch.distributed` with gloo, a
              real ring all-reduce in fp32. Not modelled, in its favour: lighthouse, quorum and commit, by
              which replicas agree before and after each sync; one all-reduce for each parameter tensor (here
              one for the whole fragment, its option `use_bucketization`); the outer step. It also insists
              that P divides H, which is not asked for here. torchft itself is not imported.
torchft-bf16  the same with pseudo-gradients in bf16, as it has them where the parameters are in bf16.
torchft-fp8   the same with one byte a parameter (an all-reduce of as many bytes of uint8): what its
              `should_quantize` moves, which needs CUDA and Triton, without scales.

Each sync of the others' is checked: it counts if it gave the mean of all nodes.

* utilised: inner steps made over those that the pace allows, of the slowest node. Of the others' whole sync
  intervals, from the start until the first one that ends after `--seconds`: at least one.
* merges: syncs of a fragment (OpenDiLoCo: of everything) over those that H allows at the pace.
* participation: nodes in a merge over nodes. Who stands still for the others is always in it.
* sent: Mbit/s at the switch, mean of the nodes.
* stands still: seconds in every sync interval, mean.

So `utilised` is what the others pay with; ours never stand still, and what a slow link costs them is merges,
participation, and how late a version comes (`bench_links`).
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

import bench_links
from bench_links import CELLS, GOALS, NODES, STEP_S, Homes, scaled, shapes
from benchkit import arguments, finish
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.demo.guard import Guard
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.layout import plan_fragments
from peers.averaging_peers import Peer
from peers.rival_peer import Work

WAYS = ("ours", "opendiloco", "torchft", "torchft-bf16", "torchft-fp8")
RIVAL_CELLS = tuple(cell for cell in CELLS if cell != "1")
"""Cells for the others. A sync of theirs takes minutes at 1 Mbit/s, and that cell is about elections."""
QUICK = ("10/100", "50/100")
READY_S = 120.0
CYCLE_S = 900.0
"""The longest sync interval that is waited for."""


class Cycle(msgspec.Struct, frozen=True):
    """Word of a node at the end of a sync interval, about everything since the start."""

    steps: int
    mono: float
    stood_s: float
    good: int
    bad: int

    @classmethod
    def of(cls, words: Sequence[str]) -> Cycle:
        """A line of `rival_peer`'s."""
        return cls(int(words[1]), float(words[2]), float(words[3]), int(words[4]), int(words[5]))


def start(way: str, manifest: Manifest, links: Homes, folder: Path, guard: Guard) -> list[Peer]:
    """Nodes that synchronise so, each behind its own link."""
    specs, sync = task_of(manifest).specs(), manifest.sync
    numels = [spec.numel for spec in specs]
    if way != "opendiloco":
        numels = [layout.numel for layout in plan_fragments(specs, sync.fragments)]
    peers: list[Peer] = []
    join = ""
    for rank in range(NODES):
        wrapper, address = links.add(f"node-{rank}")
        guarded(links, guard)
        where = str(folder), address, join
        work = Work(way, rank, NODES, *where, numels, STEP_S, sync.inner_steps, sync.delay_steps)
        words = [msgspec.json.encode(work).decode()]
        peers.append(Peer("rival_peer.py", words, folder / f"{way}-{rank}.log", guard, wrapper))
        if not rank:
            join = peers[0].wait_for("address ", READY_S)[1]
    for peer in peers:
        peer.wait_for("ready", READY_S)
    return peers


def guarded(links: Homes, guard: Guard) -> None:
    """Have the guard remove what there is by now if we are killed."""
    for words in links.clear_words():
        guard.on_end(words)


def measure(way: str, cell: str, manifest: Manifest, seconds: float) -> dict[str, Any]:
    """One of the others, on links of this kind."""
    guard, peers = Guard(), []
    folder = Path(tempfile.mkdtemp(prefix="p2pdiloco-bench-"))
    guard.adopt(folder)
    try:
        links = Homes(shapes(cell))
        try:
            peers = start(way, manifest, links, folder, guard)
            before, began = links.counts(), time.monotonic()
            for peer in peers:
                peer.tell("go")
            last: list[Cycle] = []
            while not last or time.monotonic() < began + seconds:
                last = [Cycle.of(peer.wait_for("cycle", CYCLE_S)) for peer in peers]
            took, after = time.monotonic() - began, links.counts()
        finally:
            for peer in peers:
                peer.hang_up()  # one that waits for the others' goodbye gets it
            for peer in peers:
                peer.end()
            links.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        guard.release()
    sent = {name: 8e-6 * (after[name]["bytes"] - before[name]["bytes"]) / took for name in before}
    nodes = {name: sent[name] for name in sent if name.startswith("node-")}
    return reading(last, began, manifest, way) | {"seconds": took, "sent_mbit_per_s": nodes}


def reading(last: Sequence[Cycle], began: float, manifest: Manifest, way: str) -> dict[str, Any]:
    """The figures of what the nodes said last. `began`: monotonic."""
    sync = manifest.sync
    each = 1 if way == "opendiloco" else sync.fragments
    shares = {f"node-{rank}": cycle.steps * STEP_S / (cycle.mono - began) for rank, cycle in enumerate(last)}
    slowest = min(last, key=lambda cycle: cycle.steps / (cycle.mono - began))
    possible = each * (slowest.mono - began) / (sync.inner_steps * STEP_S)
    good = min(cycle.good for cycle in last)
    return {
        "utilisation": shares,
        "merges": good / possible,
        "participation": 1.0 if good else 0.0,
        "failed": max(cycle.bad for cycle in last),
        "intervals": slowest.steps // sync.inner_steps,
        "stood_s": statistics.mean(cycle.stood_s * sync.inner_steps / cycle.steps for cycle in last),
    }


def of_ours(cell: str, manifest: Manifest, seconds: float) -> dict[str, Any]:
    """Collect what `bench_links` finds; a learner that does not wait stands still for nobody."""
    found = bench_links.measure(cell, manifest, seconds)
    least = min(found["utilisation"].values())
    interval_s = manifest.sync.inner_steps * STEP_S
    return found | {
        "stood_s": max(0.0, interval_s / least - interval_s) if least else interval_s,
        "failed": 0,
    }


def row(cell: str, way: str, found: dict[str, Any]) -> str:
    """A line of the table."""
    least, sent = min(found["utilisation"].values()), found["sent_mbit_per_s"].values()
    cells = f"{cell:8}{way:14}{100 * least:8.1f} %{100 * found['merges']:8.0f} %"
    cells += f"{100 * found['participation']:8.0f} %{statistics.mean(sent):8.2f}{found['stood_s']:10.1f}"
    cells += f"{found['failed']:8}"
    goal = goal_of(cell)
    return cells if goal is None else f"{cells}   {100 * goal:.0f} %: {'yes' if least >= goal else 'NO'}"


def goal_of(cell: str) -> float | None:
    """The utilisation that is asked for there."""
    return GOALS.get(cell.partition("/")[0])


def verdict(way: str, cells: dict[str, dict[str, Any]]) -> str:
    """Count the cells with a goal in which this way reaches it."""
    asked = {cell: goal for cell in cells if way in cells[cell] and (goal := goal_of(cell)) is not None}
    reached = sum(min(cells[cell][way]["utilisation"].values()) >= goal for cell, goal in asked.items())
    return f"{way}: reaches the goal in {reached} of {len(asked)} cells"


def main() -> None:
    """Cell after cell, way after way."""
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--cell", action="append", help=f"only these, of {', '.join(RIVAL_CELLS)}, or any N/MS"
    )
    parser.add_argument("--way", action="append", choices=WAYS, help="only these")
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--seconds", type=float, default=45.0, help="of each way in each cell")
    parser.add_argument("--codec", default="e3m0", help="ours, both ways")
    args = parser.parse_args()
    manifest, ways = scaled(args.codec), args.way or WAYS
    cells: dict[str, dict[str, Any]] = {}
    heads = f"{'Mbit/ms':8}{'way':14}{'utilised':>10}{'merges':>10}{'particip.':>10}{'sent':>8}"
    print(f"{heads}{'still, s':>10}{'failed':>8}   goal", flush=True)
    for cell in args.cell or (QUICK if args.quick else RIVAL_CELLS):
        cells[cell] = {}
        for way in ways:
            ours = way == "ours"
            found = (
                of_ours(cell, manifest, args.seconds) if ours else measure(way, cell, manifest, args.seconds)
            )
            cells[cell][way] = found
            print(row(cell, way, found), flush=True)
    for way in ways:
        print(verdict(way, cells))
    finish("rivals", {"nodes": NODES, "step_s": STEP_S, "goals": GOALS, "cells": cells}, args.json)


if __name__ == "__main__":
    main()
