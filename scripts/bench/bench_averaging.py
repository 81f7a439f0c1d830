"""Race of one merge of all fragments of a 25M-parameter model by 4 nodes, against hivemind's averager.

    python scripts/bench/bench_averaging.py [--repeats 5] [--width 512] [--codecs int8 bf16] [--json FILE]

Once for each codec, used both ways: int8 is what a manifest has unless it says otherwise, bf16 moves as many
bytes as hivemind's fp16. In one run, alternating. Ours: whole nodes over real p2pd processes, with elections,
signatures, digests and durable updates; the learner alone is a puppet that hands over all fragments at once.
The clock runs from then until the last node has handed the last fragment's new version to its learner.
hivemind: `DecentralizedAverager` over as many parameters in fp16 (its 8-bit codecs do not average with
current numpy). Parameters are where they are averaged from, and its matchmaking is over, before the clock
starts: only the all-reduce is counted. Processor time is of all processes of all nodes, half a second after
the end included. Not counted are one averaging of hivemind's, and one term of ours and a round: until then
the node that started the run has all offices, afterwards they are spread.

Then, with the first codec, what rounds cost learners beside the nodes (`averaging_learner.py`): inner steps
per second while a round is under way, against the seconds before. With learners that take a tenth of a core
each, as one that is paced or waits for an accelerator does, half a core, and all that is left (all nodes
share this machine, so that is also compared by the learners' own processor time). hivemind's peers stop.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from benchkit import arguments, finish, spread, table
from p2pdiloco.adapters.p2pd import socket_folder
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.presets import for_run
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.demo.guard import Guard
from p2pdiloco.demo.swarm import read_log
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.codecs import CODECS
from p2pdiloco.tensors.codecs import codec as chosen_codec
from p2pdiloco.tensors.layout import plan_fragments
from peers.averaging_peers import Peer, start_hivemind, start_learners, start_ours

SETTLE_S = 0.5
JOINED_S = 3.0
"""Time for heartbeats to name everybody, and for offices to be filled, before the first round."""
FASTER, CHEAPER, UNDISTURBED = 2.0, 0.5, 0.97
"""The goals: times as fast, share of the processor time, share of the inner steps."""
SHARES = {"a tenth of a core": 0.1, "half a core": 0.5, "busy": 1.0}
"""Shares of a core that the learners beside the nodes take, each."""
QUIET_S = 4.0
"""Time in which their undisturbed pace is measured, before every round."""


@dataclass
class Figures:
    """Figures measured with one codec."""

    codec: str
    parameters: int
    bytes_each: float
    """Bytes on the wire, of a parameter, in each direction."""
    wall_s: dict[str, list[float]] = field(default_factory=lambda: {"ours": [], "hivemind": []})
    cpu_s: dict[str, list[float]] = field(default_factory=lambda: {"ours": [], "hivemind": []})
    contributors: list[int] = field(default_factory=list)
    failed: int = 0
    learners: dict[str, list[float]] = field(default_factory=dict)
    """Shares of the undisturbed pace."""


def model_of(width: int, layers: int, fragments: int, name: str) -> Manifest:
    """A transformer of this size, 12 layers width^2 parameters, with this codec both ways."""
    replace, start = msgspec.structs.replace, for_run("small", "bench-averaging")
    return replace(
        start,
        model=start.model | {"layers": layers, "heads": 8, "width": width},
        sync=replace(start.sync, fragments=fragments),
        codec=replace(start.codec, contribution=name, update=name),
    )


def prepare(peers: Sequence[Peer]) -> None:
    """Everything that is done before the clock starts."""
    for peer in peers:
        peer.tell("match")
    for peer in peers:
        peer.wait_for("matched")


def one_round(peers: Sequence[Peer]) -> tuple[float, float, list[list[str]]]:
    """(seconds until the last is done, processor seconds of all, what they said)."""
    prepare(peers)
    before = sum(peer.cpu_s() for peer in peers)
    began_s = time.monotonic()
    for peer in peers:
        peer.tell("go")
    said = [peer.wait_for("done") for peer in peers]
    ended_s = max(float(words[-1]) for words in said)
    time.sleep(SETTLE_S)
    return ended_s - began_s, sum(peer.cpu_s() for peer in peers) - before, said


def averaged(said: Sequence[Sequence[str]], nodes: int) -> bool:
    """Tell whether every averager was in one group with all others, and holds the mean of 0 to nodes - 1."""
    mean = (nodes - 1) / 2
    return all(
        int(words[1]) == nodes and max(abs(float(v) - mean) for v in words[2:4]) < 0.01 for words in said
    )


def measure(codec: str, args: Any) -> Figures:
    """Our nodes with this codec both ways, and hivemind's peers, alternating."""
    manifest = model_of(args.width, args.layers, args.fragments, codec)
    numels = [spec.numel for spec in task_of(manifest).specs()]
    figures = Figures(codec, sum(numels), chosen_codec(codec).encoded_bytes(10**6) / 10**6)
    guard, ours, theirs = Guard(), [], []
    folder = Path(tempfile.mkdtemp(prefix="p2pdiloco-bench-"))
    guard.adopt(folder)
    try:
        ours = start_ours(folder, manifest, args.nodes, args.daemon_nice, guard)
        theirs = start_hivemind(folder, numels, args.nodes, guard)
        for peer in ours:
            peer.wait_for("trains")
        for peer in theirs:
            peer.wait_for("ready")
        time.sleep(JOINED_S)
        for _ in range(manifest.group.term_versions):
            one_round(ours)
        for counted in [False, *[True] * args.repeats]:
            for name, peers in (("ours", ours), ("hivemind", theirs)):
                seconds, cpu_s, said = one_round(peers)
                if name == "hivemind" and not averaged(said, args.nodes):
                    figures.failed += 1
                elif counted:
                    figures.wall_s[name].append(seconds)
                    figures.cpu_s[name].append(cpu_s)
        for peer in theirs:
            peer.end()
        if codec == args.codecs[0]:
            sizes = [layout.numel for layout in plan_fragments(task_of(manifest).specs(), args.fragments)]
            figures.learners = meanwhile(ours, folder, sizes, args.repeats, guard)
        for index in range(args.nodes):
            lines = read_log(folder / f"node-{index}" / "events.jsonl")
            figures.contributors += [line.contributors for line in lines if line.is_merge()]
    finally:
        for peer in (*ours, *theirs):
            peer.end()
        for index in range(args.nodes):
            shutil.rmtree(socket_folder(folder / f"node-{index}"), ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        guard.release()
    return figures


def meanwhile(
    ours: Sequence[Peer], folder: Path, numels: Sequence[int], repeats: int, guard: Guard
) -> dict[str, list[float]]:
    """Measure each kind of learner: inner steps per second during rounds, over those before; a value per
    round."""
    found: dict[str, list[float]] = {}
    for kind, share in SHARES.items():
        learners = start_learners(folder, len(ours), numels, share, guard)
        try:
            for _ in range(repeats):
                first = count(learners)
                time.sleep(QUIET_S)
                before = count(learners)
                prepare(ours)
                start = count(learners)
                for peer in (*learners, *ours):
                    peer.tell("round" if peer in learners else "go")
                for peer in ours:
                    peer.wait_for("done")
                end = count(learners)
                for what, unit in (("", 1), (" per CPU-s", 2)):
                    quiet, loud = pace(first, before, unit), pace(start, end, unit)
                    found.setdefault(kind + what, []).append(loud / quiet)
        finally:
            for learner in learners:
                learner.end()
    return found


Counts = list[tuple[int, float, float]]


def count(learners: Sequence[Peer]) -> Counts:
    """Count of every learner: inner steps, when the last ended, processor time."""
    for learner in learners:
        learner.tell("count")
    said = [learner.wait_for("count") for learner in learners]
    return [(int(words[1]), float(words[2]), float(words[3])) for words in said]


def pace(first: Counts, last: Counts, unit: int) -> float:
    """Mean of the learners: inner steps per second (unit 1), or per second of their processor time (2)."""
    return statistics.mean(
        (b[0] - a[0]) / max(b[unit] - a[unit], 1e-9) for a, b in zip(first, last, strict=True)
    )


def report(figures: Figures, args: Any) -> dict[str, Any]:
    """The table and the ratios of one codec; the same for JSON."""
    wall, cpu = figures.wall_s, figures.cpu_s
    rows = [(f"{name}: wall time", spread(wall[name])) for name in wall]
    rows += [(f"{name}: processor time, all nodes", spread(cpu[name])) for name in cpu]
    size = f"{figures.bytes_each:.2f} bytes a parameter each way, hivemind 2"
    print(f"{args.nodes} nodes, {figures.parameters / 1e6:.1f} M parameters, {args.fragments} fragments")
    print(f"ours in {figures.codec}: {size}")
    print(table(rows, "s"))
    contributors = spread([float(c) for c in figures.contributors])
    print(f"contributors per merge: {contributors['min']:.0f} to {contributors['max']:.0f}", end="")
    print(f"; averagings of hivemind's that failed or gave another result: {figures.failed}")
    found: dict[str, Any] = {"bytes_per_parameter": figures.bytes_each, "failed": figures.failed}
    found |= {"wall_s": {name: spread(wall[name]) for name in wall}, "contributors": contributors}
    found |= {"cpu_s": {name: spread(cpu[name]) for name in cpu}}
    if wall["hivemind"] and wall["ours"]:
        faster = rows[1][1]["median"] / rows[0][1]["median"]
        share = rows[2][1]["median"] / rows[3][1]["median"]
        found |= {"faster": faster, "cpu_share": share}
        print(
            f"{faster:.2f} times as fast (goal {FASTER}), {share:.2f} of the processor time (goal {CHEAPER})"
        )
    if figures.learners:
        shares = {kind: spread(values) for kind, values in figures.learners.items()}
        print(table([(f"inner steps during rounds: {kind}", share) for kind, share in shares.items()], ""))
        print(f"(goal {UNDISTURBED} of the undisturbed pace; hivemind's peers stop: 0)")
        found["learners"] = shares
    return found


def main() -> None:
    """Every codec, one after the other."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--width", type=int, default=512, help="512 with 8 layers: 25M parameters")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--fragments", type=int, default=12)
    nice = NodeSettings().daemon_nice
    parser.add_argument("--daemon-nice", default=nice, help="of our nodes; a node's default")
    parser.add_argument("--codecs", nargs="+", choices=sorted(CODECS), default=["int8", "bf16"])
    args = parser.parse_args()
    found: dict[str, Any] = {"nodes": args.nodes, "fragments": args.fragments}
    for codec in args.codecs:
        figures = measure(codec, args)
        found |= {"parameters": figures.parameters, codec: report(figures, args)}
    finish("averaging", found, args.json)


if __name__ == "__main__":
    main()
