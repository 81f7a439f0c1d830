"""The PNG that the demo leaves: loss curves of all nodes and of Theta, with the kill marked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from p2pdiloco.demo.chronicle import Chronicle, NodeTrace
from p2pdiloco.demo.verdict import Kill
from p2pdiloco.errors import StorageError

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377")


def draw(
    path: Path,
    chronicle: Chronicle,
    began_s: float,
    kills: list[Kill],
    restarts_s: list[float],
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
    for kill in kills:
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
    for at_s in restarts_s:
        axes.axvline(at_s - began_s, color="#228833", ls=":", lw=1.4, label="started again")
    before, after = before_after
    axes.set_title(f"{title}\nheld-out loss {before:.2f} → {after:.2f} {unit}", fontsize=11)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel(f"loss, {unit}")
    axes.grid(alpha=0.25)
    axes.legend(loc="upper right")
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    """Write a figure as PNG, and let go of it.

    Raises:
        StorageError: it cannot be written.
    """
    from matplotlib import pyplot

    figure.tight_layout()
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        pyplot.close(figure)


def _curve(trace: NodeTrace, began_s: float) -> tuple[list[float], list[float]]:
    """Training loss over time; the curve breaks off where the node was started again."""
    times: list[float] = []
    losses: list[float] = []
    for life in filter(None, trace.lives):
        if times:
            times.append(life[0].mono - began_s)
            losses.append(float("nan"))
        times += [line.mono - began_s for line in life if line.loss is not None]
        losses += [line.loss for line in life if line.loss is not None]
    return times, losses
