"""Verdict on the demo: pure arithmetic, no processes, no torch."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence

from msgspec import Struct

from p2pdiloco.demo.chronicle import WARM_UP_LINES, Chronicle, NodeTrace


class Kill(Struct, frozen=True):
    """One `kill -9`, and what followed."""

    node: str
    at_s: float
    fragments: tuple[int, ...]
    """Fragments whose syncer it was."""
    resumed_s: dict[int, float]
    """Fragment -> seconds from the kill to the next published version of it."""
    back_s: float | None
    """Seconds from the restart of the process to its first inner step; None: it did not come back."""


class DemoSummary(Struct, kw_only=True, frozen=True):
    """The report. Losses are in nats per byte (`loss_unit`); unknown is None."""

    preset: str
    nodes: int
    seconds: float
    """Time of training, from the last node's first inner step on."""
    loss_before: float
    loss_after: float
    outer_updates: int
    inner_steps: int
    """Inner steps of all nodes together."""
    tokens: int
    kills: int
    participation: float | None
    """Contributions merged / learners that were live, over all merges."""
    longest_pause_s: float | None
    """Longest time from the end of one inner step to the end of the next, over all survivors, without
    evaluations and checkpoints."""
    longest_aside_s: float | None
    """Longest evaluation or checkpoint of a survivor, in which it made no inner step."""
    median_inner_step_s: float | None
    t_resume_s: float | None
    """The slowest fragment's."""
    t_resume_by_fragment_s: dict[str, float]
    t_back_s: float | None
    digests_agree: bool
    versions_compared: int
    """Versions of which at least two nodes had a digest to compare."""
    forks: int
    refusals: dict[str, int]
    failures: tuple[str, ...]
    """Reasons why the demo did not show what it is about; empty: all is well."""
    sample: str


def choose_victim(chronicle: Chronicle, alive: Sequence[str]) -> str:
    """The node that is syncer of most fragments; "" if nobody is, or if it is the only one alive."""
    if len(alive) < 2:
        return ""
    best = max(alive, key=lambda name: (len(chronicle.offices_of(name)), name))
    return best if chronicle.offices_of(best) else ""


class Pauses(Struct, frozen=True):
    """Pauses of learners, and their median inner step, in seconds."""

    longest_s: float
    longest_aside_s: float
    median_step_s: float


def pauses(traces: Iterable[NodeTrace], began_s: float, ended_s: float) -> Pauses | None:
    """Pauses between two moments, start-up of learners left out; None: no learner said anything."""
    lives = itertools.chain.from_iterable(trace.lives for trace in traces)
    warm = itertools.chain.from_iterable(life[WARM_UP_LINES:] for life in lives)
    lines = [line for line in warm if began_s <= line.mono <= ended_s]
    if not lines:
        return None
    return Pauses(
        max(line.longest_gap_s for line in lines),
        max(line.longest_aside_s for line in lines),
        statistics.median(line.step_time_s for line in lines),
    )


def failures(
    loss_before: float, loss_after: float, disagreements: Sequence[str], kills: Sequence[Kill], wanted: bool
) -> tuple[str, ...]:
    """List why the exit status is 1, one sentence each. `wanted`: a kill was asked for."""
    found = []
    if disagreements:
        more = f", and {len(disagreements) - 1} more" if len(disagreements) > 1 else ""
        found.append(f"the nodes do not agree: {disagreements[0]}{more}")
    if not math.isfinite(loss_after) or loss_after >= loss_before:
        found.append(f"the held-out loss did not fall: {loss_before:.3f} before, {loss_after:.3f} after")
    if wanted and not kills:
        found.append("nobody could be killed: no node was the syncer of any fragment")
    for kill in kills:
        stuck = [str(f) for f in kill.fragments if f not in kill.resumed_s]
        if stuck:
            found.append(
                f"the swarm did not recover: no new version of fragment {', '.join(stuck)} after the kill"
            )
        if kill.back_s is None:
            found.append(f"the swarm did not recover: {kill.node} did not train again after its restart")
    return tuple(found)
