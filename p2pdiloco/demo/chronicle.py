"""Chronicle of a swarm: what its nodes logged, by what is asked of it. No processes and no clock here.

All times are seconds of the machine's monotonic clock, which all processes of one machine share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import chain
from math import inf

from p2pdiloco.demo.event_log import Line

MAX_VERSIONS = 4096
"""Newest versions per node and fragment whose digests are kept for comparison."""
WARM_UP_LINES = 3
"""First progress lines of a learner that say nothing about pauses: libraries warm up, others start."""


class NodeTrace:
    """Account of one node: its lives, how far it trained, which chain it follows."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = "starting"
        self.lives: list[list[Line]] = [[]]
        """Progress lines, a list for each process that the node had."""
        self.evaluations: list[Line] = []
        self.merged: list[Line] = []
        """Contributions of the node that it saw merged."""
        self.chains: dict[int, dict[int, str]] = {}
        """Fragment -> version number -> digest, along the chain that the node now follows."""

    def started(self, state: str) -> None:
        """Begin another life of the node, in this state until it trains."""
        self.state = state
        self.lives.append([])

    @property
    def progress(self) -> list[Line]:
        """Progress lines of all lives."""
        return list(chain.from_iterable(self.lives))

    @property
    def last(self) -> Line | None:
        """Newest progress line; None: it has not trained yet."""
        return next((life[-1] for life in reversed(self.lives) if life), None)

    @property
    def inner_step(self) -> int:
        """Inner step that the node is at."""
        return self.last.inner_step if self.last else 0

    @property
    def trains_since_s(self) -> float | None:
        """Time of the first progress in the present life; None: not yet."""
        return self.lives[-1][0].mono if self.lives[-1] else None

    def feed(self, line: Line) -> None:
        """Take in one line of the node's log."""
        if line.kind == "progress":
            self.state = "training"
            self.lives[-1].append(line)
        elif line.kind == "evaluation":
            self.evaluations.append(line)
        elif line.kind == "shutdown":
            self.state = "saved, left"
        elif line.is_merged():
            self.merged.append(line)
        elif line.is_head():
            followed = self.chains.setdefault(line.fragment, {})
            if line.kind == "catchup":  # a whole state was copied, which breaks the chain
                followed.clear()
            for later in [n for n in followed if n > line.number or n <= line.number - MAX_VERSIONS]:
                del followed[later]
            followed[line.number] = line.digest

    def head(self, fragment: int) -> int:
        """Number of the newest version of a fragment."""
        return max(self.chains.get(fragment, {0: ""}))


class Chronicle:
    """Account of all nodes. Lines of one kind are in the order in which they were read."""

    def __init__(self, fragments: int, names: Mapping[str, str] | None = None) -> None:
        """`names`: peer id -> node name, of the nodes that are known from the start."""
        self.fragments = fragments
        self.nodes: dict[str, NodeTrace] = {}
        self._names: dict[str, str] = {}
        for peer, name in (names or {}).items():
            self.meet(name, peer)
        self.merges: list[Line] = []
        """Rounds that were closed."""
        self.held: list[Line] = []
        """Versions that became some node's head."""
        self.published: list[Line] = []
        """Versions that were made: a part of `held`."""
        self.offices: list[Line] = []
        """Offices that were taken, and those that were laid down."""
        self.forks: list[Line] = []
        self.given_up: list[Line] = []
        """Ends of contributions whose work is in no chain."""
        self.refusals: Counter[str] = Counter()
        self._newest = dict.fromkeys(range(fragments), 0)
        self._in_office: dict[int, Line] = {}

    def meet(self, name: str, peer: str) -> None:
        """Make a node known."""
        self.nodes[name] = NodeTrace(name)
        self._names[peer] = name

    def feed(self, line: Line) -> None:
        """Take in one line of the log of `line.node`."""
        self.nodes[line.node].feed(line)
        if line.is_head():
            self.held.append(line)
        if line.is_made():
            self.published.append(line)
            self._newest[line.fragment] = max(self._newest[line.fragment], line.number)
        elif line.is_merge():
            self.merges.append(line)
        elif line.kind == "office" and (line.syncer or line.reason.startswith("laid down")):
            self.offices.append(line)
            if _rank(line) > _rank(self._in_office.get(line.fragment)):
                self._in_office[line.fragment] = line
        elif line.kind == "fork":
            self.forks.append(line)
        elif line.kind == "refusal":
            self.refusals[line.reason] += 1
        if line.lost or (line.kind == "fork" and line.reason.startswith("given up")):
            self.given_up.append(line)

    # --- offices -----------------------------------------------------------------------------------------

    def syncer(self, fragment: int, at_s: float = inf) -> str:
        """Name of the fragment's syncer at that time, as far as anybody knew; empty: none."""
        newest = self._in_office.get(fragment)
        if at_s < inf:
            known = [line for line in self.offices if line.fragment == fragment and line.mono <= at_s]
            newest = max(known, key=_rank, default=None)
        if newest is None or not newest.syncer:
            return ""
        return self._names.get(newest.syncer, f"…{newest.syncer[-6:]}")

    def offices_of(self, name: str, at_s: float = inf) -> list[int]:
        """Fragments whose syncer this node was at that time."""
        return [fragment for fragment in range(self.fragments) if self.syncer(fragment, at_s) == name]

    # --- versions ----------------------------------------------------------------------------------------

    def newest(self, fragment: int) -> int:
        """Highest number of a version of the fragment that anybody published."""
        return self._newest[fragment]

    def updates(self) -> int:
        """Outer updates so far: versions of all fragments."""
        return sum(self._newest.values())

    def published_after(self, fragment: int, at_s: float) -> float | None:
        """Time of the first version of a fragment that was published after `at_s`; None: none yet."""
        times = (line.mono for line in self.published if line.fragment == fragment and line.mono > at_s)
        return min(times, default=None)

    def participation(self) -> float | None:
        """Share of live learners whose work was merged, over all merges; None before the first merge."""
        live = sum(line.live for line in self.merges)
        return sum(line.contributors for line in self.merges) / live if live else None

    def wrong_digests(self) -> list[str]:
        """Sentence about states that nodes computed otherwise than a version's header says; empty: none."""
        count = self.refusals["digest-differs"] + self.refusals["false-state"]
        return [f"{count} times a node computed another state than the syncer"] if count else []

    def heldout_losses(self) -> list[tuple[float, float]]:
        """(time, held-out loss of the global parameters) as any node measured it, in the order of time."""
        lines = chain.from_iterable(trace.evaluations for trace in self.nodes.values())
        return sorted((line.mono, line.loss) for line in lines if line.loss is not None)


def _rank(line: Line | None) -> tuple[int, bool]:
    """Order of what is known of an office: by term, and within one the end of it counts."""
    return (line.term, not line.syncer) if line else (-1, False)
