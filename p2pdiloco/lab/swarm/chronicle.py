"""What the demo knows of its swarm: read from the nodes' event logs (docs/events.md), line by line.

All times are seconds of the machine's monotonic clock, which all processes of one machine share.
"""

from __future__ import annotations

from collections import Counter, deque
from pathlib import Path
from typing import Any

import msgspec

MAX_KEPT = 100_000
"""Of progress and evaluation lines per node: more than a day."""
MAX_VERSIONS = 4096
"""Newest versions per node and fragment whose digests are kept for comparison."""
MAX_LINE_BYTES = 1 << 20
WARM_UP_LINES = 3
"""First progress lines of a learner that say nothing about pauses: libraries warm up, others start."""


class Tail:
    """The complete lines that a growing file has gained."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""

    def lines(self) -> list[dict[str, Any]]:
        """New lines as objects; torn ones are left out."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        self._offset += len(data)
        *whole, rest = (self._rest + data).split(b"\n")
        self._rest = rest[-MAX_LINE_BYTES:]
        found = []
        for line in whole:
            try:
                entry = msgspec.json.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError):
                continue
            if isinstance(entry, dict) and "kind" in entry:
                found.append(entry)
        return found


class Progress(msgspec.Struct, frozen=True):
    """One progress line of a node."""

    at_s: float
    loss: float | None
    step_time_s: float
    longest_gap_s: float
    warm: bool
    """Past its learner's start-up."""


class NodeTrace:
    """What one node has told so far."""

    def __init__(self, name: str, peer: str) -> None:
        self.name = name
        self.peer = peer
        self.state = "starting"
        self.inner_step = 0
        self.tokens_total = 0
        self.loss: float | None = None
        self.heldout_loss: float | None = None
        self.tokens_per_s = 0.0
        self.progress: deque[Progress] = deque(maxlen=MAX_KEPT)
        self.evaluations: deque[tuple[float, float]] = deque(maxlen=MAX_KEPT)
        self.chains: dict[int, dict[int, str]] = {}
        """Fragment -> version number -> digest, along the chain that the node now follows."""
        self._lines_since_start = 0

    def started(self, state: str) -> None:
        """A new process of this node begins."""
        self.state = state
        self.tokens_per_s = 0.0
        self._lines_since_start = 0

    def on_progress(self, line: dict[str, Any]) -> bool:
        """A progress line; True: the first one since the node was started."""
        first = self._lines_since_start == 0
        self._lines_since_start += 1
        warm = self._lines_since_start > WARM_UP_LINES
        self.state = "training"
        self.inner_step, self.tokens_total = line["inner_step"], line["tokens_total"]
        self.tokens_per_s, self.loss = line["tokens_per_s"], line["loss"]
        self.progress.append(
            Progress(line["mono"], line["loss"], line["step_time_s"], line["longest_gap_s"], warm)
        )
        return first

    def on_version(self, fragment: int, number: int, digest: str, copied: bool) -> None:
        """The node's head of a fragment is now this. `copied`: as a whole state, which breaks the chain."""
        chain = self.chains.setdefault(fragment, {})
        if copied:
            chain.clear()
        for later in [n for n in chain if n > number or n <= number - MAX_VERSIONS]:
            del chain[later]
        chain[number] = digest

    def head(self, fragment: int) -> int:
        """Number of the newest version of a fragment."""
        return max(self.chains.get(fragment, {0: ""}))


class Chronicle:
    """All nodes' logs together."""

    def __init__(self, peers: dict[str, str], fragments: int) -> None:
        """peers: node name -> peer id."""
        self.nodes = {name: NodeTrace(name, peer) for name, peer in peers.items()}
        self.fragments = fragments
        self._names = {peer: name for name, peer in peers.items()}
        self.offices: dict[int, tuple[int, str]] = {}
        """Fragment -> newest term, its syncer's name."""
        self.newest: dict[int, int] = dict.fromkeys(range(fragments), 0)
        """Fragment -> highest version number that anybody published."""
        self.merges = 0
        self.contributors = 0
        self.live = 0
        """Sums over all merges: contributions merged, learners that were live."""
        self.last_merge: dict[int, tuple[int, int]] = {}
        self.forks = 0
        self.wrong_digests = 0
        """How often a node computed another state than a version's header says."""
        self.refusals: Counter[str] = Counter()
        self.first_training_s: dict[str, float] = {}
        """Node -> when its newest process made its first inner step."""
        self.first_publish_after: dict[int, float] = {}
        """Fragment -> when a version of it was first published after `mark_s`."""
        self.mark_s: float | None = None
        self.offices_at_mark: dict[int, tuple[int, str]] = {}

    def mark(self, at_s: float) -> None:
        """Note who is in office at this moment (that of the kill), and the first publications after it.

        The logs must be read once more before `offices_at_mark` is complete.
        """
        self.mark_s = at_s
        self.offices_at_mark = dict(self.offices)
        self.first_publish_after = {}

    def held_by(self, name: str) -> list[int]:
        """Fragments whose newest known syncer this node is."""
        return sorted(fragment for fragment, (_, syncer) in self.offices.items() if syncer == name)

    def held_at_mark(self, name: str) -> list[int]:
        """Fragments whose syncer this node was at the marked moment."""
        return sorted(fragment for fragment, (_, syncer) in self.offices_at_mark.items() if syncer == name)

    def updates(self) -> int:
        """Outer updates so far: versions of all fragments."""
        return sum(self.newest.values())

    def feed(self, name: str, line: dict[str, Any]) -> str:
        """Take in one line of one node. Returns words for people where it is worth it, else ""."""
        node = self.nodes[name]
        fragment = -1 if line.get("fragment") is None else int(line["fragment"])
        match line["kind"]:
            case "progress":
                if node.on_progress(line):
                    self.first_training_s[name] = line["mono"]
                    return f"{name} trains, from inner step {node.inner_step}"
            case "evaluation":
                node.heldout_loss = line["loss"]
                node.evaluations.append((line["mono"], line["loss"]))
            case "join" if line["reason"].startswith("full member"):
                return f"{name} joins: {line['reason'].partition(': ')[2]}"
            case "merge" if "contributors" in line:
                self.merges += 1
                self.contributors += line["contributors"]
                self.live += line["live"]
                self.last_merge[fragment] = (line["contributors"], line["live"])
            case "publish" if "digest" in line:
                self._published(node, fragment, line)
            case "apply" | "catchup" if "digest" in line:
                node.on_version(fragment, line["number"], line["digest"], line["kind"] == "catchup")
            case "office" if "syncer" in line:
                self._office(fragment, line)
            case "refusal":
                self.refusals[line["reason"]] += 1
                if line["reason"] == "digest-differs":
                    self.wrong_digests += 1
                    return f"{name} computes another state of fragment {fragment} than its syncer"
            case "fork":
                self.forks += 1
                return f"{name}: fragment {fragment} has two heads: {line['reason']}"
            case "learner" if (
                line["reason"].startswith(("ended: ", "lost")) and "stopped" not in line["reason"]
            ):
                return f"{name}: learner {line['reason']}"
            case "shutdown":
                node.state = "saved, left"
        return ""

    def _published(self, node: NodeTrace, fragment: int, line: dict[str, Any]) -> None:
        node.on_version(fragment, line["number"], line["digest"], copied=False)
        self.newest[fragment] = max(self.newest[fragment], line["number"])
        if self.mark_s is not None and line["mono"] > self.mark_s:
            self.first_publish_after.setdefault(fragment, line["mono"])

    def _office(self, fragment: int, line: dict[str, Any]) -> None:
        term, syncer = line["term"], self._names.get(line["syncer"], f"…{line['syncer'][-6:]}")
        if term > self.offices.get(fragment, (0, ""))[0]:
            self.offices[fragment] = (term, syncer)
            if self.mark_s is not None and line["mono"] <= self.mark_s:
                self.offices_at_mark[fragment] = (term, syncer)
