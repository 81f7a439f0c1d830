"""Facts of one run of a swarm: what its nodes logged, and what was done to them. No processes here.

All times are seconds of the machine's monotonic clock, which all processes of one machine share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from p2pdiloco.demo.swarm import Chronicle, Line

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
"""State of a node. "resumed" goes back to what it was before it was stopped or cut."""
HELD = ("stopped", "cut")
DEAD = ("killed", "left", "gone")
WARM_UP_S = 3.0
"""Time after a learner's first inner step in which its pace says nothing."""


class Act(Struct, frozen=True):
    """Change of a node's state: the supervisor changed it, or the node's log says so."""

    at_s: float
    node: str
    state: State


class Facts:
    """Record of one run: `log` of the nodes, and `acts`, which were done to them or which they logged."""

    def __init__(self, log: Chronicle, began_s: float = 0.0, ended_s: float = 0.0) -> None:
        self.log = log
        self.began_s = began_s
        self.ended_s = ended_s
        self.acts: list[Act] = []

    def feed(self, line: Line) -> None:
        """Take in one line of a node's event log."""
        self.log.feed(line)
        if line.kind == "learner" and line.reason == "running":
            self.acts.append(Act(line.mono, line.node, "training"))
        elif line.kind == "learner" and line.reason.startswith(("ended", "lost")):
            self.acts.append(Act(line.mono, line.node, "learner-down"))

    def sort(self) -> None:
        """Bring everything into the order of time: nodes' logs arrive one after the other."""
        self.acts.sort(key=lambda act: act.at_s)
        for lines in (self.log.merges, self.log.held, self.log.published):
            lines.sort(key=lambda line: line.mono)


class StateSpan(Struct, frozen=True):
    """Time in which a node was in one state."""

    from_s: float
    to_s: float
    state: State


def spans(acts: Sequence[Act], node: str, ends_s: float) -> list[StateSpan]:
    """List the node's states, one after the other, from its start on. `acts` in the order of time.

    While a node is stopped or cut, what its learner does counts only afterwards; what a dead node logged
    (a line may be timed after its death was) does not count.
    """
    found: list[StateSpan] = []
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
            found.append(StateSpan(since_s, act.at_s, state))
        state, since_s = new, act.at_s
    if state is not None:
        found.append(StateSpan(since_s, max(ends_s, since_s), state))
    return found
