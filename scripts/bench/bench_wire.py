"""Cost of an outer step on the wire: bytes per parameter and direction, everything included; 4 nodes.

    python scripts/bench/bench_wire.py [--codec e3m0 ...] [--preset small] [--cycles 2] [--json FILE]

Linux, root: every node gets a network namespace, and its link's counters are read when no round is under way,
`cycles` sync intervals apart. So all that a node sends and receives is counted, whoever it talks to: payload,
labels, heartbeats, elections, DHT, libp2p's encryption and multiplexing. "Sockets" is what TCP connections
carry, "frames" what a cable does: TCP, IP and Ethernet headers and bare acknowledgements too (segmented as on
one: the kernel's offload is switched off).

Readings, per parameter and outer step:
* transfer: all bytes over all parameters that had to move: a contribution from every other contributor to the
  syncer, an update to every other member. So it is what one direction costs a member, wherever it fetches
  updates. The goal is measured on it, at the sockets.
* node: the mean over all nodes, up and down, with the offices as they were.
* member and syncer: payload that a node in either role sends: a member its contribution, and what it passes
  on of the update; the syncer the update to those that get it from itself. As the nodes count it (`progress`
  lines of their diaries, so to a second). Fan-out's goal is on it: a syncer sends at most twice what a member
  does.

"Control" is what a node sent, per second, while no round was under way: its share of an outer step is the
smaller the longer a sync interval takes (48 s with the defaults).

The codec is the same in both directions. Learners train on 32 tokens an inner step, and no faster than
`--min-step-s`: what is sent depends on neither, but the share of heartbeats on the length of a sync interval.
"""

from __future__ import annotations

import subprocess
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchkit import NEVER, arguments, finish, running_swarm, spread
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.presets import for_run
from p2pdiloco.demo.swarm import Line, Swarm, of_kind, read_log
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tensors.codecs import codec
from p2pdiloco.tensors.layout import plan_fragments
from p2pdiloco_lab.namespaces import Links

GOALS = {"int8": 1.06, "int4": 0.56, "e3m0": 0.56, "topk": 0.05}
MOST_OF_A_MEMBERS = 2.0
"""Most that a syncer may send, in what a member sends."""
TOKENS_PER_STEP = 32
HEADER_BYTES = 66
"""Ethernet, IPv4 and TCP with time stamps, of every frame: the rest of it is what the sockets carry."""
POLL_S = 0.5
QUIET_BYTES_PER_S = 40_000
"""Rate of one node above which a transfer is under way."""
START_TIMEOUT_S = 120.0
KINDS = ("upload", "download")


class Count(msgspec.Struct, frozen=True):
    """Count of what has crossed a node's link, in frames."""

    up_bytes: int
    up_frames: int
    down_bytes: int
    down_frames: int

    def since(self, earlier: Count) -> Count:
        """The difference."""
        pairs = zip(msgspec.structs.astuple(self), msgspec.structs.astuple(earlier), strict=True)
        return Count(*(b - a for b, a in pairs))

    def in_sockets(self) -> tuple[int, int]:
        """(sent, received) without the headers of frames."""
        return (
            self.up_bytes - HEADER_BYTES * self.up_frames,
            self.down_bytes - HEADER_BYTES * self.down_frames,
        )

    def in_frames(self) -> tuple[int, int]:
        """(sent, received)."""
        return self.up_bytes, self.down_bytes


class Given(msgspec.Struct, frozen=True):
    """Payload that all nodes have sent (as in `progress` lines)."""

    pushed_bytes: int
    updates_given_bytes: int
    updates_passed_on_bytes: int


class Made(msgspec.Struct, frozen=True):
    """A version that was made."""

    fragment: int
    number: int
    syncer: str
    contributors: int


def paced(manifest: Manifest, name: str, inner_steps: int, term_versions: int) -> Manifest:
    """The preset's model and fragments with tiny inner steps, and this codec both ways."""
    replace = msgspec.structs.replace
    sync = manifest.sync
    if inner_steps:
        sync = replace(sync, inner_steps=inner_steps, delay_steps=min(sync.delay_steps, inner_steps - 1))
    return replace(
        manifest,
        model=manifest.model | {"context_tokens": TOKENS_PER_STEP},
        inner=replace(manifest.inner, tokens_per_step=TOKENS_PER_STEP),
        sync=sync,
        codec=replace(manifest.codec, contribution=name, update=name),
        group=replace(manifest.group, term_versions=term_versions),
    )


def counter(device: str) -> Count:
    """Read the kernel's counters: what our end of the link receives is what the node sends."""
    folder = Path("/sys/class/net") / device / "statistics"
    names = ("rx_bytes", "rx_packets", "tx_bytes", "tx_packets")
    return Count(*(int((folder / name).read_text()) for name in names))


def frame_by_frame(wrapper: Sequence[str], device: str) -> None:
    """No bulk segmentation at either end of a link: every frame is counted with its headers."""
    listed = subprocess.run([*wrapper, "ip", "-br", "link"], capture_output=True, text=True, check=True)
    names = [line.split()[0].partition("@")[0] for line in listed.stdout.splitlines()]
    ends = [(wrapper, name) for name in names if name != "lo"] + [([], device)]
    for words, name in ends:
        subprocess.run([*words, "ip", "link", "set", "dev", name, "gso_max_segs", "1"], check=True)


def versions(diaries: dict[str, list[Line]]) -> dict[tuple[int, int], Made]:
    """Collect the versions that somebody published, with the contributors of the merge before it."""
    found: dict[tuple[int, int], Made] = {}
    for name, lines in diaries.items():
        merged: dict[tuple[int, int], int] = {}
        for line in lines:
            if line.is_merge():
                merged[line.version] = line.contributors
            elif line.is_made():
                found[line.version] = Made(*line.version, name, merged.get(line.version, 0))
    return found


def everywhere(diaries: dict[str, list[Line]], keys: Iterable[tuple[int, int]]) -> bool:
    """Tell whether every node has each of these versions, or a later one of its fragment."""
    for lines in diaries.values():
        heads: dict[int, int] = {}
        for line in lines:
            if line.is_head():
                heads[line.fragment] = max(heads.get(line.fragment, 0), line.number)
        if any(heads.get(fragment, 0) < number for fragment, number in keys):
            return False
    return True


def numels_of(manifest: Manifest) -> list[int]:
    """Parameters of every fragment."""
    return [f.numel for f in plan_fragments(task_of(manifest).specs(), manifest.sync.fragments)]


def given(before: dict[str, list[Line]], now: dict[str, list[Line]]) -> Given:
    """Compute what the nodes have given between two looks at their diaries."""

    def total(diaries: dict[str, list[Line]], key: str) -> int:
        said = [of_kind(lines, "progress") for lines in diaries.values()]
        return sum(getattr(lines[-1], key) for lines in said if lines)

    sums = (total(now, key) - total(before, key) for key in Given.__struct_fields__)
    return Given(*sums)


def roles(found: Given, made: Iterable[Made], numels: Sequence[int], nodes: int) -> dict[str, float]:
    """Payload that a member and a syncer send, bytes per parameter and outer step, and their ratio."""
    whole = sum(numels[v.fragment] for v in made)
    member = (found.pushed_bytes + found.updates_passed_on_bytes) / (whole * (nodes - 1)) if whole else 0.0
    syncer = found.updates_given_bytes / whole if whole else 0.0
    return {"member": member, "syncer": syncer, "ratio": syncer / member if member else 0.0}


def reading(
    counts: dict[str, tuple[int, int]], made: Sequence[Made], numels: Sequence[int]
) -> dict[str, Any]:
    """Bytes (sent, received) of every node, and the versions that they were for: what one direction costs."""
    whole = float(sum(numels[v.fragment] for v in made))
    moved = sum(numels[v.fragment] * (v.contributors - 1 + len(counts) - 1) for v in made)
    figures: dict[str, Any] = {"transfer": sum(up + down for up, down in counts.values()) / 2 / moved}
    for index, kind in enumerate(KINDS):
        figures[kind] = sum(count[index] for count in counts.values()) / len(counts) / whole
    return figures


class Probe:
    """Reads links and diaries of a running swarm."""

    def __init__(self, swarm: Swarm, links: Links, fragments: int) -> None:
        self._swarm, self._fragments = swarm, fragments
        self._devices = {node.name: links.device(node.name) for node in swarm.nodes}
        self.control: list[float] = []
        """Rates at which a node sent through its sockets while nothing was under way, bytes a second."""
        self.diaries: dict[str, list[Line]] = {}
        """Diaries as they were in the last quiet moment."""

    def counts(self) -> dict[str, Count]:
        """Read the counters of all nodes, now."""
        return {name: counter(device) for name, device in self._devices.items()}

    def quiet(self, at_least: dict[int, int], timeout_s: float) -> tuple[dict[str, Count], list[Made]]:
        """Wait until every fragment has reached `at_least` and nothing is under way: (counters, versions).

        Raises:
            TimeoutError: that did not come about.
        """
        until, before, before_s = time.monotonic() + timeout_s, self.counts(), time.monotonic()
        while before_s < until:
            time.sleep(POLL_S)
            now, last, now_s = self.counts(), before, time.monotonic()
            passed_s, before, before_s = now_s - before_s, now, now_s
            self._swarm.watch()
            moved = [now[name].since(last[name]) for name in now]
            if any(max(m.up_bytes, m.down_bytes) > QUIET_BYTES_PER_S * passed_s for m in moved):
                continue
            self.control += [m.in_sockets()[0] / passed_s for m in moved]
            self.diaries = diaries = {node.name: read_log(node.events) for node in self._swarm.nodes}
            made = versions(diaries)
            heads = {f: max((n for g, n in made if g == f), default=0) for f in range(self._fragments)}
            if all(heads[f] >= at_least.get(f, 1) for f in heads) and everywhere(diaries, made):
                return now, list(made.values())
        raise TimeoutError(f"no quiet moment within {timeout_s:.0f} s")


def measure(manifest: Manifest, nodes: int, cycles: int, min_step_s: float) -> dict[str, Any]:
    """One swarm with one codec."""
    numels = numels_of(manifest)
    patience_s = START_TIMEOUT_S + 4 * cycles * manifest.sync.inner_steps * min_step_s
    links = Links()
    try:
        # Paced learners leave the machine alone; nobody else on it shall make their steps longer.
        flags = (*NEVER, "--min-step-s", str(min_step_s), "--learner-nice", "0")
        with (
            tempfile.TemporaryDirectory(prefix="p2pdiloco-bench-") as text,
            running_swarm(Path(text), manifest, nodes, *flags, links=links) as swarm,
        ):
            for node in swarm.nodes:
                frame_by_frame(node.wrapper, links.device(node.name))
            probe = Probe(swarm, links, len(numels))
            first, earlier = probe.quiet({}, patience_s)
            before = probe.diaries
            began_s = time.monotonic()
            heads = {f: max(v.number for v in earlier if v.fragment == f) for f in range(len(numels))}
            last, all_made = probe.quiet({f: n + cycles for f, n in heads.items()}, patience_s)
            seconds = time.monotonic() - began_s
    finally:
        links.close()
    made = [v for v in all_made if v not in earlier]
    spent = {name: last[name].since(first[name]) for name in first}
    chosen = codec(manifest.codec.update)
    return {
        "seconds": seconds,
        "versions": len(made),
        "contributors": sum(v.contributors for v in made) / len(made),
        "control_bytes_per_s": spread(probe.control),
        "roles": roles(given(before, probe.diaries), made, numels, nodes),
        "payload": sum(chosen.encoded_bytes(n) for n in numels) / sum(numels),
        "sockets": reading({name: c.in_sockets() for name, c in spent.items()}, made, numels),
        "frames": reading({name: c.in_frames() for name, c in spent.items()}, made, numels),
    }


def row(name: str, found: dict[str, Any]) -> str:
    """A line of the table."""
    sockets, goal = found["sockets"], GOALS.get(name)
    cells = [found["payload"], sockets["transfer"], found["frames"]["transfer"]]
    cells += [sockets[kind] for kind in KINDS]
    cells += found["roles"].values()
    told = f"  {found['versions']} versions in {found['seconds']:.0f} s"
    told += f", {found['contributors']:.2f} contributors"
    told += f", control {found['control_bytes_per_s']['median'] / 1e3:.1f} kB/s"
    if goal is not None:
        told += f"; at most {goal}: {'yes' if sockets['transfer'] <= goal else 'NO'}"
    fair = found["roles"]["ratio"] <= MOST_OF_A_MEMBERS
    told += f"; syncer / member at most {MOST_OF_A_MEMBERS:g}: {'yes' if fair else 'NO'}"
    return f"{name:6}" + "".join(f"{cell:9.4f}" for cell in cells) + told


def main() -> None:
    """One swarm after the other, then the table."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--codec", action="append", help="only these (default: int8, int4, e3m0, topk)")
    parser.add_argument("--preset", default="small")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--cycles", type=int, default=2, help="sync intervals that are measured")
    parser.add_argument("--min-step-s", type=float, default=1.0)
    parser.add_argument("--inner-steps", type=int, default=0, help="H; 0: the preset's")
    parser.add_argument("--term-versions", type=int, default=2, help="elections are counted this often")
    args = parser.parse_args()
    figures: dict[str, Any] = {}
    print("bytes per parameter and outer step")
    heads = ("payload", "transfer", "(frames)", "up", "down", "member", "syncer", "ratio")
    print(f"{'':6}" + "".join(f"{head:>9}" for head in heads), flush=True)
    for name in args.codec or list(GOALS):
        manifest = for_run(args.preset, f"bench-wire-{name}")
        manifest = paced(manifest, name, args.inner_steps, args.term_versions)
        figures[name] = found = measure(manifest, args.nodes, args.cycles, args.min_step_s)
        print(row(name, found), flush=True)
    settings = {"preset": args.preset, "nodes": args.nodes, "min_step_s": args.min_step_s}
    settings["sync_interval_s"] = manifest.sync.inner_steps * args.min_step_s
    finish("wire", {**settings, "goals": GOALS, "most_of_a_members": MOST_OF_A_MEMBERS, **figures}, args.json)


if __name__ == "__main__":
    main()
