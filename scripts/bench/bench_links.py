"""Share of their time that learners compute on home links, by rate and delay of the links; 4 real nodes.

    .venv/bin/python scripts/bench/bench_links.py [--quick] [--cell 10/100 ...] [--seconds 120] [--json FILE]

Linux, root: each node is in a network namespace behind a router of its own (`scripts/bench/shaped/homes.py`):
the rate, both ways, by tbf, with 0.4 s of queue; the delay by a switch in user space. A cell is Mbit/s and
the round trip between two nodes in ms.

Scaling. The run that is meant: 100 M parameters, H = 100, P = 24, e3m0 both ways, a consumer GPU that needs 1
s for an inner step. It sends 100 M / 100 = 1 M parameters per inner step and direction, 0.53 MB; a fragment
of 4.2 M parameters, 2.2 MB, is due every 4.2 s. Here: the preset `small` (10.7 M parameters), H = 11, P = 3,
inner steps of 0.97 s. So 10.7 M / 11 = 0.97 M parameters per inner step, 1 M a second; a fragment of 3.6 M,
1.9 MB, is due every 3.6 s; tau is 6 s in both. Of such a run each node sends, with its share of the syncers'
work (3/4), 1 M * 0.531 * 1.75 * 8 * 1.04 = 7.7 Mbit/s on the average, and receives as much. What is harder
here: a fragment has 11 s from one contribution to the next, not 100 s; there are nine times as many elections
per second; and three offices among four nodes are often two at one of them, while 24 are spread more evenly.
In a run's first term the node that began it is the syncer of everything, for which it has to receive 13
Mbit/s: so terms are 4 versions long here, and measured is what comes after the first (not in "1", where that
would be a quarter of an hour).

Learners are paced (--min-step-s) and train on 32 tokens an inner step, so that the processors of one machine
carry four of them and the links are what is measured.

* utilised: inner steps made over those that the pace allows, of the slowest node, good to one step. A learner
  never waits for the network; the cost of a slow link is in the next columns.
* merges: versions of a fragment over those that H allows.
* participation: contributors of a merge over nodes.
* delay: seconds from a version's publication to the moment when another node has it: median, 95th percentile.
* silent, suspicion, void: times that a member took another for silent, a syncer for failed, a certificate
  for void. All nodes live, so each is false. Heartbeats come every 0.5 s and a member is silent after 3 s,
  so a 0 bounds the worst gap. `lag`: times that a node itself did not run for half a second.
* ratio: payload that the syncer of a version sends over what a member does (`bench_wire.py`), at most 2.
* every: the link watch's verdict, contributing to one in so many versions (of each node).

Cells with a name: "1" is 1 Mbit/s and 50 ms for all, an eighth of what the run asks: elections and heartbeats
have to stay healthy. "slow" is 50 Mbit/s for all but one node with 2 Mbit/s, which has to take part less
often, and the others' merges must not suffer.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from bench_wire import MOST_OF_A_MEMBERS, everywhere, given, numels_of, paced, roles, versions
from benchkit import NEVER, arguments, finish, running_swarm, spread, wait_until
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.presets import for_run
from p2pdiloco.demo.swarm import Line, Swarm, of_kind, read_log
from shaped.homes import Shape, ShapedLinks

NODES = 4
STEP_S = 0.97
TERM_VERSIONS = 4
CELLS = ("10/20", "10/100", "50/20", "50/100", "200/20", "200/100", "1", "slow")
QUICK = ("10/100", "50/100", "1", "slow")
GOALS = {"10": 0.80, "50": 0.95, "200": 0.95}
FALSE_ALARMS = ("silent", "suspicion", "void")
START_S = 180.0
THIN_START_S = 600.0
"""Patience at 1 Mbit/s, where the first versions alone are some minutes of bytes."""
SLOW_NODE = 2e6


def scaled(codec: str) -> Manifest:
    """See above."""
    manifest = for_run("small", "bench-links")
    sync = msgspec.structs.replace(manifest.sync, fragments=3, inner_steps=11, delay_steps=6)
    return paced(msgspec.structs.replace(manifest, sync=sync), codec, 0, TERM_VERSIONS)


def shapes(cell: str) -> list[Shape]:
    """A link for every node."""
    if cell == "1":
        return [Shape.of(1e6, 0.05)] * NODES
    if cell == "slow":
        fast = Shape.of(50e6, 0.05)
        return [*[fast] * (NODES - 1), Shape.of(SLOW_NODE, 0.05)]
    rate, _, round_trip = cell.partition("/")
    return [Shape.of(1e6 * float(rate), float(round_trip) / 1000)] * NODES


class Homes(ShapedLinks):
    """Links whose homes get the given shapes, one after the other."""

    def __init__(self, of: list[Shape]) -> None:
        """Raises: LinksRefused."""
        super().__init__()
        self._shapes = iter(of)

    def add(self, node: str, shape: Shape | None = None, hidden: bool = False) -> tuple[list[str], str]:
        """See ShapedLinks."""
        return super().add(node, shape or next(self._shapes), hidden)


def paces(lines: list[Line]) -> tuple[float, float]:
    """(inner steps a second, longest gap between two of them) by the learner's own word."""
    said = of_kind(lines, "progress")
    if len(said) < 2:
        return 0.0, 0.0
    first, last = said[0], said[-1]
    steps = last.inner_step - first.inner_step
    return steps / (last.mono - first.mono), max(line.longest_gap_s for line in said)


def alarms(diaries: dict[str, list[Line]]) -> dict[str, int]:
    """Count how often something was taken for failed, by kind, at all nodes."""
    every = [line for lines in diaries.values() for line in lines]
    voided = [line for line in of_kind(every, "office") if line.reason.startswith("void")]
    counts = {kind: len(of_kind(every, kind)) for kind in ("silent", "suspicion")}
    return {**counts, "void": len(voided), "lag": len(of_kind(every, "health"))}


def reading(diaries: dict[str, list[Line]], manifest: Manifest, seconds: float) -> dict[str, Any]:
    """The figures of the lines of so many seconds."""
    speeds = {name: paces(lines) for name, lines in diaries.items()}
    made = versions(diaries)
    published: dict[tuple[int, int], float] = {}
    for lines in diaries.values():
        published |= {line.version: line.mono for line in lines if line.is_made()}
    delays = [
        line.mono - published[line.version]
        for lines in diaries.values()
        for line in of_kind(lines, "apply")
        if line.version in published
    ]
    sync = manifest.sync
    possible = sync.fragments * seconds / (sync.inner_steps * STEP_S)
    members = [version.contributors for version in made.values() if version.contributors]
    merged = {name: sum(line.is_merged() for line in lines) for name, lines in diaries.items()}
    return {
        "utilisation": {name: speed * STEP_S for name, (speed, _) in speeds.items()},
        "longest_gap_s": max(gap for _, gap in speeds.values()),
        "merges": len(made) / possible,
        "versions": len(made),
        "participation": sum(members) / len(members) / NODES if members else 0.0,
        "contributions_merged": merged,
        "delay_s": spread(delays),
        **alarms(diaries),
    }


def since(swarm: Swarm, mono: float) -> dict[str, list[Line]]:
    """Read all nodes' diaries from a moment on."""
    return {node.name: [line for line in read_log(node.events) if line.mono >= mono] for node in swarm.nodes}


def begun(swarm: Swarm, fragments: int, least: int, followers: int) -> bool:
    """Tell whether every fragment has had so many versions, which the first so many nodes have."""
    swarm.watch()
    diaries = since(swarm, 0.0)
    made = versions(diaries)
    last = [(fragment, least) for fragment in range(fragments)]
    follow = {node.name: diaries[node.name] for node in swarm.nodes[:followers]}
    return made.keys() >= set(last) and everywhere(follow, last)


def measure(cell: str, manifest: Manifest, seconds: float) -> dict[str, Any]:
    """One swarm on links of this kind."""
    links = Homes(shapes(cell))
    try:
        flags = (*NEVER, "--min-step-s", str(STEP_S), "--learner-nice", "0")
        with (
            tempfile.TemporaryDirectory(prefix="p2pdiloco-bench-") as text,
            running_swarm(Path(text), manifest, NODES, *flags, links=links) as swarm,
        ):
            least, patience_s = (1, THIN_START_S) if cell == "1" else (TERM_VERSIONS, START_S)
            # Updates come four times as fast as the slow link carries: that node is behind, and stays so.
            followers = NODES - 1 if cell == "slow" else NODES
            wait_until(lambda: begun(swarm, manifest.sync.fragments, least, followers), patience_s)
            earlier, before, began = since(swarm, 0.0), links.counts(), time.monotonic()
            while time.monotonic() < began + seconds:
                time.sleep(1.0)
                swarm.watch()
            took, after = time.monotonic() - began, links.counts()
            found = reading(since(swarm, began), manifest, took)
            made = versions(since(swarm, began)).values()
            moved = given(earlier, since(swarm, 0.0))
            said = {node.name: of_kind(read_log(node.events), "link") for node in swarm.nodes}
    finally:
        links.close()
    names = found["utilisation"]
    found["every"] = {name: said[name][-1].every if said[name] else 1 for name in names}
    found["sent_mbit_per_s"] = {
        name: 8e-6 * (after[name]["bytes"] - before[name]["bytes"]) / took for name in names
    }
    return {"seconds": took, "roles": roles(moved, made, numels_of(manifest), NODES), **found}


def row(cell: str, found: dict[str, Any]) -> str:
    """A line of the table."""
    least, delay = min(found["utilisation"].values()), found["delay_s"]
    sent = found["sent_mbit_per_s"].values()
    cells = f"{cell:8}{100 * least:8.1f} %{100 * found['merges']:8.0f} %{100 * found['participation']:8.0f} %"
    cells += (
        f"{delay.get('median', 0):7.2f}{delay.get('p95', 0):7.2f}{sum(sent) / len(sent):8.2f}{max(sent):8.2f}"
    )
    cells += "  " + "".join(f"{found[kind]:6}" for kind in (*FALSE_ALARMS, "lag"))
    ratio = found["roles"]["ratio"]
    cells += f"{ratio:8.2f}{'' if ratio <= MOST_OF_A_MEMBERS else ' NO'}"
    cells += "   " + ",".join(str(every) for every in found["every"].values())
    goal = GOALS.get(cell.partition("/")[0])
    if goal is not None:
        cells += f"   at least {100 * goal:.0f} %: {'yes' if least >= goal else 'NO'}"
    elif cell == "1":
        cells += f"   no false alarm: {'NO' if any(found[kind] for kind in FALSE_ALARMS) else 'yes'}"
    return cells


def main() -> None:
    """One swarm after the other."""
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--cell", action="append", help=f"only these, of {', '.join(CELLS)}, or any other N/MS"
    )
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}")
    parser.add_argument("--seconds", type=float, default=120.0, help="of each cell, after its first merges")
    parser.add_argument("--codec", default="e3m0", help="both ways")
    args = parser.parse_args()
    manifest = scaled(args.codec)
    figures: dict[str, Any] = {}
    heads = f"{'Mbit/ms':8}{'utilised':>10}{'merges':>10}{'particip.':>10}{'delay':>7}{'p95':>7}"
    print(
        f"{heads}{'sent':>8}{'most':>8}{'silent':>8}{'susp':>6}{'void':>6}{'lag':>6}{'ratio':>8}   every",
        flush=True,
    )
    for cell in args.cell or (QUICK if args.quick else CELLS):
        figures[cell] = found = measure(cell, manifest, args.seconds)
        print(row(cell, found), flush=True)
    finish(
        "links",
        {
            "nodes": NODES,
            "step_s": STEP_S,
            "goals": GOALS,
            "most_of_a_members": MOST_OF_A_MEMBERS,
            "cells": figures,
        },
        args.json,
    )


if __name__ == "__main__":
    main()
