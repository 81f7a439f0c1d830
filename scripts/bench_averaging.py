"""All fragments of a 25M-parameter model merged once by 4 nodes, against hivemind's averager.

    .venv/bin/python scripts/bench_averaging.py [--repeats 5] [--width 512] [--codecs int8 bf16] [--json FILE]

Once for each codec, used both ways: int8 is what a manifest has unless it says otherwise, bf16 moves as many
bytes as hivemind's fp16. In one run, alternating, after one round of each that is not counted. Ours: whole
nodes over real p2pd processes, with elections, signatures, digests and durable updates; the learner alone is
a puppet that hands over all fragments at once. The clock runs from then until the last node has handed the
last fragment's new version to its learner. hivemind: `DecentralizedAverager` over as many parameters in fp16
(its 8-bit codecs do not average with current numpy); its matchmaking is over before the clock starts, only
the all-reduce is counted. Processor time is of all processes of all nodes, half a second after the end
included.
"""

from __future__ import annotations

import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import psutil
from benchkit import arguments, diary, finish, of_kind, spread, table

from p2pdiloco.adapters.p2pd import socket_folder
from p2pdiloco.cli.guard import Guard
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.presets import for_run
from p2pdiloco.tasks.manifests import render_toml
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.codec import CODECS
from p2pdiloco.tensors.codec import codec as chosen_codec

HERE = Path(__file__).parent
PATIENCE_S = 90.0
SETTLE_S = 0.5
JOINED_S = 3.0
"""For heartbeats to name everybody, and for offices to be filled, before the first round."""
FASTER, CHEAPER = 2.0, 0.5
"""The goals: times as fast, and share of the processor time."""


@dataclass
class Figures:
    """What was measured with one codec."""

    codec: str
    parameters: int
    bytes_each: float
    """On the wire, of a parameter, in each direction."""
    wall_s: dict[str, list[float]] = field(default_factory=lambda: {"ours": [], "hivemind": []})
    cpu_s: dict[str, list[float]] = field(default_factory=lambda: {"ours": [], "hivemind": []})
    contributors: list[int] = field(default_factory=list)
    failed: int = 0


class Peer:
    """One of the processes, and what it says."""

    def __init__(self, script: str, words: Sequence[str], log: Path, guard: Guard) -> None:
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [sys.executable, str(HERE / script), *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | guard.environment(),
                start_new_session=True,
            )
        self._log = log
        self._said: queue.Queue[str] = queue.Queue()
        self._family: set[psutil.Process] = set()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put(line.strip())
        self._said.put("")

    def wait_for(self, beginning: str) -> list[str]:
        """The next line that begins so, in words.

        Raises:
            RuntimeError: the process ended, or said no such thing in time.
        """
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                line = self._said.get(timeout=max(0.01, until - time.monotonic()))
            except queue.Empty:
                raise RuntimeError(f"{self._log.name}: no {beginning!r} in {PATIENCE_S:.0f} s") from None
            if not line:
                end = self._log.read_text(errors="replace")[-1500:]
                raise RuntimeError(f"{self._log.name} ended before {beginning!r}: {end}")
            if line.startswith(beginning):
                return line.split()

    def tell(self, word: str) -> None:
        """One line."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def cpu_s(self) -> float:
        """Processor time of it and of everything that it has started and that runs."""
        own = psutil.Process(self._process.pid)
        self._family |= {own, *own.children(recursive=True)}
        times = [process.cpu_times() for process in self._family if process.is_running()]
        return float(sum(t.user + t.system for t in times))

    def end(self) -> None:
        """Gone, with all that it has started."""
        if self._process.poll() is None:
            self._family |= set(psutil.Process(self._process.pid).children(recursive=True))
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        left = [process for process in self._family if process.is_running()]
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=5)


def model_of(width: int, layers: int, fragments: int, name: str) -> Manifest:
    """A transformer of this size, 12 layers width^2 parameters, with this codec both ways."""
    replace, start = msgspec.structs.replace, for_run("small", "bench-averaging")
    return replace(
        start,
        model=start.model | {"layers": layers, "heads": 8, "width": width},
        sync=replace(start.sync, fragments=fragments),
        codec=replace(start.codec, contribution=name, update=name),
    )


def start_ours(folder: Path, manifest: Manifest, nodes: int, guard: Guard) -> list[Peer]:
    """Nodes that train; the first one owns the run."""
    run_file = folder / "run.toml"
    run_file.write_text(render_toml(manifest))
    peers: list[Peer] = []
    address = ""
    for index in range(nodes):
        data_dir = folder / f"node-{index}"
        guard.adopt(socket_folder(data_dir))
        words = [str(data_dir), address, "" if index else str(run_file), data_dir.name]
        peers.append(Peer("averaging_node.py", words, folder / f"node-{index}.log", guard))
        if not index:
            address = peers[0].wait_for("p2pdiloco node --join ")[3]
    return peers


def start_hivemind(folder: Path, numels: Sequence[int], nodes: int, guard: Guard) -> list[Peer]:
    """Averagers; peer i holds the value i."""
    peers: list[Peer] = []
    address, sizes = "", ",".join(map(str, numels))
    for index in range(nodes):
        words = [sizes, address, str(nodes), str(index)]
        peers.append(Peer("averaging_hivemind.py", words, folder / f"hivemind-{index}.log", guard))
        if not index:
            address = peers[0].wait_for("address ")[1]
    return peers


def one_round(peers: Sequence[Peer], match: bool) -> tuple[float, float, list[list[str]]]:
    """(seconds until the last is done, processor seconds of all, what they said)."""
    if match:
        for peer in peers:
            peer.tell("match")
        for peer in peers:
            peer.wait_for("matched")
    before = sum(peer.cpu_s() for peer in peers)
    began_s = time.monotonic()
    for peer in peers:
        peer.tell("go")
    said = [peer.wait_for("done") for peer in peers]
    ended_s = max(float(words[-1]) for words in said)
    time.sleep(SETTLE_S)
    return ended_s - began_s, sum(peer.cpu_s() for peer in peers) - before, said


def averaged(said: Sequence[Sequence[str]], nodes: int) -> bool:
    """Whether every averager was in one group with all others, and holds the mean of 0 to nodes - 1."""
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
        ours = start_ours(folder, manifest, args.nodes, guard)
        theirs = start_hivemind(folder, numels, args.nodes, guard)
        for peer in ours:
            peer.wait_for("trains")
        for peer in theirs:
            peer.wait_for("ready")
        time.sleep(JOINED_S)
        for counted in [False, *[True] * args.repeats]:
            for name, peers in (("ours", ours), ("hivemind", theirs)):
                seconds, cpu_s, said = one_round(peers, match=name == "hivemind")
                if name == "hivemind" and not averaged(said, args.nodes):
                    figures.failed += 1
                elif counted:
                    figures.wall_s[name].append(seconds)
                    figures.cpu_s[name].append(cpu_s)
        for index in range(args.nodes):
            merges = of_kind(diary(folder / f"node-{index}" / "events.jsonl"), "merge")
            figures.contributors += [line["contributors"] for line in merges if "contributors" in line]
    finally:
        for peer in (*ours, *theirs):
            peer.end()
        for index in range(args.nodes):
            shutil.rmtree(socket_folder(folder / f"node-{index}"), ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
        guard.release()
    return figures


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
    return found


def main() -> None:
    """Every codec, one after the other."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--width", type=int, default=512, help="512 with 8 layers: 25M parameters")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--fragments", type=int, default=12)
    parser.add_argument("--codecs", nargs="+", choices=sorted(CODECS), default=["int8", "bf16"])
    args = parser.parse_args()
    found: dict[str, Any] = {"nodes": args.nodes, "fragments": args.fragments}
    for codec in args.codecs:
        figures = measure(codec, args)
        found |= {"parameters": figures.parameters, codec: report(figures, args)}
    finish("averaging", found, args.json)


if __name__ == "__main__":
    main()
