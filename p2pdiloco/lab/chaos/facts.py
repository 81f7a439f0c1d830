"""What happened in one run of a swarm: what its nodes logged, and what was done to them. No processes here.

All times are seconds of the machine's monotonic clock, which all processes of one machine share.
"""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

from msgspec import Struct, field

State = Literal[
    "starting",
    "training",
    "learner-down",
    "stopped",
    "resumed",
    "cut",
    "killed",
    "left",
    "gone",
]
"""Of a node. "resumed" goes back to what it was before it was stopped or cut."""
HELD = ("stopped", "cut")
DEAD = ("killed", "left", "gone")
WARM_UP_S = 3.0
"""Of a learner: what it does for so long after its first inner step says nothing about its pace."""


class Act(Struct, frozen=True):
    """A node's state changed: the supervisor changed it, or its log says so."""

    at_s: float
    node: str
    state: State


class Merge(Struct, frozen=True):
    """A syncer closed a round."""

    at_s: float
    fragment: int
    contributors: int
    live: int
    """Learners that the syncer counted on."""


class Version(Struct, frozen=True):
    """A version was published."""

    at_s: float
    fragment: int
    number: int
    tokens: int
    """Cumulative, in its chain."""
    node: str


class Office(Struct, frozen=True):
    """Somebody learned who is syncer; `node` is empty: the holder laid the office down."""

    at_s: float
    fragment: int
    term: int
    node: str


class Pace(Struct, frozen=True):
    """One progress line."""

    at_s: float
    inner_step: int
    tokens_total: int
    cpu_s: float
    loss: float | None


class Facts(Struct, kw_only=True):
    """One run."""

    fragments: int
    began_s: float = 0.0
    ended_s: float = 0.0
    acts: list[Act] = field(default_factory=list)
    merges: list[Merge] = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    offices: list[Office] = field(default_factory=list)
    merged_s: dict[str, list[float]] = field(default_factory=dict)
    """Node -> when it saw its contributions merged."""
    paces: dict[str, list[Pace]] = field(default_factory=dict)
    evaluations: list[tuple[float, float]] = field(default_factory=list)
    """(time, held-out loss of Theta)."""
    refusals: Counter[str] = field(default_factory=Counter)
    names: dict[str, str] = field(default_factory=dict)
    """Peer id -> name."""

    def feed(self, node: str, line: dict[str, Any]) -> None:
        """Take in one line of a node's event log (docs/events.md)."""
        at_s, reason = line["mono"], line["reason"]
        fragment = -1 if line.get("fragment") is None else int(line["fragment"])
        match line["kind"]:
            case "progress":
                pace = Pace(at_s, line["inner_step"], line["tokens_total"], line["cpu_s"], line["loss"])
                self.paces.setdefault(node, []).append(pace)
            case "learner" if reason == "running":
                self.acts.append(Act(at_s, node, "training"))
            case "learner" if reason.startswith(("ended", "lost")):
                self.acts.append(Act(at_s, node, "learner-down"))
            case "merge" if "contributors" in line:
                self.merges.append(Merge(at_s, fragment, line["contributors"], line["live"]))
            case "publish" if "digest" in line:
                self.versions.append(Version(at_s, fragment, line["number"], line["tokens"], node))
            case "office" if "syncer" in line:
                name = self.names.get(line["syncer"], line["syncer"])
                self.offices.append(Office(at_s, fragment, line["term"], name))
            case "office" if "term" in line and reason.startswith("laid down"):
                self.offices.append(Office(at_s, fragment, line["term"], ""))
            case "contribution" if reason == "merged":
                self.merged_s.setdefault(node, []).append(at_s)
            case "evaluation":
                self.evaluations.append((at_s, line["loss"]))
            case "refusal":
                self.refusals[reason] += 1

    def sort(self) -> None:
        """Bring everything into the order of time: nodes' logs arrive one after the other."""
        for found in (self.acts, self.merges, self.versions, self.offices):
            found.sort(key=lambda item: item.at_s)
        self.evaluations.sort()

    def holder(self, fragment: int, at_s: float) -> str:
        """Name of the fragment's syncer at that time as far as anybody knew; empty: none. Needs `sort`."""
        return holder(self.offices, fragment, at_s)


class Span(Struct, frozen=True):
    """A node was in this state from one time to another."""

    from_s: float
    to_s: float
    state: State


def holder(offices: Sequence[Office], fragment: int, at_s: float) -> str:
    """See `Facts.holder`; `offices` in the order of time."""
    term, name = -1, ""
    for office in offices[: bisect.bisect_right(offices, at_s, key=lambda o: o.at_s)]:
        newer = office.term > term or (office.term == term and not office.node)
        if office.fragment == fragment and newer:
            term, name = office.term, office.node
    return name


def spans(acts: Sequence[Act], node: str, ends_s: float) -> list[Span]:
    """The node's states, one after the other, from its start on. `acts` in the order of time.

    While a node is stopped or cut, what its learner does counts only afterwards; what a dead node logged
    (a line may be timed after its death was) does not count.
    """
    found: list[Span] = []
    state: State | None = None
    beneath: State = "starting"
    since_s = 0.0
    for act in acts:
        if act.node != node or (state in DEAD and act.state != "starting"):
            continue
        new: State = act.state
        if state in HELD:
            if new in ("training", "learner-down"):
                beneath = new
                continue
            new = beneath if new == "resumed" else new
        elif new in HELD:
            beneath = state or "starting"
        elif new == "resumed":
            continue
        if new == state:
            continue
        if state is not None:
            found.append(Span(since_s, act.at_s, state))
        state, since_s = new, act.at_s
    if state is not None:
        found.append(Span(since_s, max(ends_s, since_s), state))
    return found
