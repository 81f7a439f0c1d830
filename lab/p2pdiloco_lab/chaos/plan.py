"""Schedule of faults of a chaos run: drawn from a seed before anything starts. Pure."""

from __future__ import annotations

import random
from typing import Literal

from msgspec import Struct

Kind = Literal[
    "kill-syncer",
    "kill-daemon",
    "kill-learner",
    "kill-p2pd",
    "stop-daemon",
    "stop-node",
    "disk-full",
    "leave",
    "newcomer",
    "kill-bootstraps",
    "cut-link",
    "slow-link",
]
WEIGHTS: dict[Kind, float] = {
    "kill-syncer": 5,
    "kill-daemon": 3,
    "kill-learner": 3,
    "kill-p2pd": 2,
    "stop-daemon": 2,
    "stop-node": 2,
    "disk-full": 1,
    "leave": 2,
    "newcomer": 1,
    "kill-bootstraps": 1,
}
LINK_WEIGHTS: dict[Kind, float] = {"cut-link": 2, "slow-link": 1}
"""Only where every node has a network namespace of its own."""
LASTS_S: dict[Kind, tuple[float, float]] = {
    "kill-syncer": (2.0, 15.0),
    "kill-daemon": (2.0, 15.0),
    "stop-daemon": (1.0, 8.0),
    "stop-node": (1.0, 8.0),
    "disk-full": (5.0, 15.0),
    "leave": (2.0, 15.0),
    "newcomer": (2.0, 15.0),
    "kill-bootstraps": (10.0, 30.0),
    "cut-link": (2.0, 12.0),
    "slow-link": (5.0, 20.0),
}
"""Bounds of the time until a fault is mended: the victim started again or continued, disk or link restored.

The daemon itself mends what is not listed.
"""
QUIET = 0.15
"""The last part of a run without new faults, at most `QUIET_S`: all have to be back at its end."""
QUIET_S = 45.0


class Fault(Struct, frozen=True):
    """One fault of the schedule."""

    at_s: float
    """Seconds after all nodes train."""
    kind: Kind
    target: int
    """Index of the node; for kill-syncer the fragment whose syncer is meant. If that one is disturbed
    already, the next one in order is taken."""
    lasts_s: float
    """Until it is mended; 0: nothing to mend."""


def draw(
    seed: int, nodes: int, fragments: int, seconds: float, per_hour: float, links: bool
) -> tuple[Fault, ...]:
    """The schedule: at least `per_hour` faults an hour over `seconds`, one in each of as many equal parts
    of the time in which faults come; every kind comes before the first one comes twice as often as its
    weight says. Same arguments, same schedule."""
    rng = random.Random(f"chaos/{seed}/{nodes}/{fragments}/{float(seconds)}/{float(per_hour)}/{links}")
    count = max(1, -int(-per_hour * seconds // 3600))
    faulty_s = seconds - min(QUIET_S, QUIET * seconds)
    found = []
    for index, kind in enumerate(_kinds(rng, count, links)):
        at_s = (index + rng.random()) * faulty_s / count
        target = rng.randrange(fragments if kind == "kill-syncer" else nodes)
        low_s, high_s = LASTS_S.get(kind, (0.0, 0.0))
        longest_s = max(low_s, min(high_s, seconds / 8))
        found.append(Fault(round(at_s, 3), kind, target, round(rng.uniform(low_s, longest_s), 3)))
    return tuple(found)


def _kinds(rng: random.Random, count: int, links: bool) -> list[Kind]:
    """Draw so many kinds, spread by weight: each next one is the kind that is furthest behind its share.

    So short runs see different kinds too; ties and the starting points are drawn.
    """
    weights = WEIGHTS | (LINK_WEIGHTS if links else {})
    total = sum(weights.values())
    debt = {kind: rng.random() for kind in weights}
    kinds = []
    for _ in range(count):
        for kind, weight in weights.items():
            debt[kind] += weight / total
        kind = max(debt, key=lambda k: debt[k])
        debt[kind] -= 1
        kinds.append(kind)
    return kinds
