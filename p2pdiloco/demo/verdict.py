"""Verdict on the demo: pure arithmetic, no processes, no torch; and its PNG.

The PNG has the loss curves of all nodes and of Theta, with the kill marked.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct

from p2pdiloco.adapters.data_dir import storage_errors
from p2pdiloco.demo.swarm import WARM_UP_LINES, Chronicle, NodeTrace
from p2pdiloco.util import Frozen


class Kill(Struct):
    """The `kill -9`, and what followed."""

    node: str
    at_s: float
    fragments: tuple[int, ...]
    """Fragments whose syncer it was."""
    resumed_s: dict[int, float] = {}
    """Fragment -> seconds from the kill to the next published version of it."""
    back_s: float | None = None
    """Seconds from the restart of the process to its first inner step; None: it did not come back."""
    restarted_s: float | None = None
    """Time of the restart; None: it is still to come."""

    @property
    def is_over(self) -> bool:
        """True: the swarm has recovered."""
        return self.back_s is not None and len(self.resumed_s) == len(self.fragments)


class Pauses(Frozen):
    """Pauses of learners, and their median inner step, in seconds; None: no learner said anything."""

    longest_pause_s: float | None = None
    """Longest time from the end of one inner step to the end of the next, over all survivors, without
    evaluations and checkpoints."""
    longest_aside_s: float | None = None
    """Longest evaluation or checkpoint of a survivor, in which it made no inner step."""
    median_inner_step_s: float | None = None


class DemoSummary(Pauses, frozen=True, kw_only=True):
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


def pauses(traces: Iterable[NodeTrace], began_s: float, ended_s: float) -> Pauses:
    """Pauses between two moments, start-up of learners left out."""
    lives = itertools.chain.from_iterable(trace.lives for trace in traces)
    warm = itertools.chain.from_iterable(life[WARM_UP_LINES:] for life in lives)
    lines = [line for line in warm if began_s <= line.mono <= ended_s]
    if not lines:
        return Pauses()
    return Pauses(
        max(line.longest_gap_s for line in lines),
        max(line.longest_aside_s for line in lines),
        statistics.median(line.step_time_s for line in lines),
    )


def failures(
    loss_before: float, loss_after: float, disagreements: Sequence[str], kill: Kill | None, wanted: bool
) -> tuple[str, ...]:
    """List why the exit status is 1, one sentence each. `wanted`: a kill was asked for."""
    found = []
    if disagreements:
        more = f", and {len(disagreements) - 1} more" if len(disagreements) > 1 else ""
        found.append(f"the nodes do not agree: {disagreements[0]}{more}")
    if not math.isfinite(loss_after) or loss_after >= loss_before:
        found.append(f"the held-out loss did not fall: {loss_before:.3f} before, {loss_after:.3f} after")
    if kill is None:
        nobody = "nobody could be killed: no node was the syncer of any fragment"
        return (*found, nobody) if wanted else tuple(found)
    if stuck := [str(f) for f in kill.fragments if f not in kill.resumed_s]:
        found.append(
            f"the swarm did not recover: no new version of fragment {', '.join(stuck)} after the kill"
        )
    if kill.back_s is None:
        found.append(f"the swarm did not recover: {kill.node} did not train again after its restart")
    return tuple(found)


# The PNG.

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")


def draw(
    path: Path,
    chronicle: Chronicle,
    began_s: float,
    kill: Kill | None,
    before_after: tuple[float, float],
    title: str,
    unit: str,
) -> None:
    """Write the PNG. Times on the x axis are seconds since `began_s` (monotonic clock); `unit` is of losses.

    Raises:
        StorageError: it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), dpi=120)
    for number, trace in enumerate(chronicle.nodes.values()):
        times, losses = _curve(trace, began_s)
        axes.plot(times, losses, color=COLOURS[number % len(COLOURS)], lw=1.1, alpha=0.85, label=trace.name)
    heldout = chronicle.heldout_losses()
    axes.plot(
        [at_s - began_s for at_s, _ in heldout],
        [loss for _, loss in heldout],
        "o",
        color="black",
        ms=4,
        label="global parameters Θ, held out",
    )
    if kill is not None:
        axes.axvline(kill.at_s - began_s, color="#cc0000", ls="--", lw=1.4)
        axes.text(
            kill.at_s - began_s,
            0.97,
            f"kill -9 {kill.node}, \nsyncer of {len(kill.fragments)} fragments ",
            color="#cc0000",
            va="top",
            ha="right",
            transform=axes.get_xaxis_transform(),
        )
    if kill is not None and kill.restarted_s is not None:
        axes.axvline(kill.restarted_s - began_s, color="#228833", ls=":", lw=1.4, label="started again")
    before, after = before_after
    axes.set_title(f"{title}\nheld-out loss {before:.2f} → {after:.2f} {unit}", fontsize=11)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel(f"loss, {unit}")
    axes.grid(alpha=0.25)
    axes.legend(loc="upper right")
    save_figure(figure, path)


def save_figure(figure: Any, path: Path) -> None:
    """Write a figure as PNG, and let go of it.

    Raises:
        StorageError: it cannot be written.
    """
    from matplotlib import pyplot

    figure.tight_layout()
    try:
        with storage_errors("write", path):
            figure.savefig(path, format="png")
    finally:
        pyplot.close(figure)


def _curve(trace: NodeTrace, began_s: float) -> tuple[list[float], list[float]]:
    """Training loss over time; the curve breaks off where the node was started again."""
    times: list[float] = []
    losses = []
    for life in filter(None, trace.lives):
        if times:
            times.append(life[0].mono - began_s)
            losses.append(float("nan"))
        times += [line.mono - began_s for line in life if line.loss is not None]
        losses += [line.loss for line in life if line.loss is not None]
    return times, losses
