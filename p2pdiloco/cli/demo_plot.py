"""The PNG that the demo leaves: loss curves of all nodes and of Theta, with the kill marked."""

from __future__ import annotations

from pathlib import Path

from p2pdiloco.cli.demo_chronicle import Chronicle
from p2pdiloco.cli.demo_verdict import Kill
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
) -> None:
    """Write the PNG. Times on the x axis are seconds since `began_s` (monotonic clock).

    Raises:
        StorageError: it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5), dpi=120)
    for number, trace in enumerate(chronicle.nodes.values()):
        points = [(line.at_s - began_s, line.loss) for line in trace.progress if line.loss is not None]
        times, losses = _with_gaps(points)
        axes.plot(times, losses, color=COLOURS[number % len(COLOURS)], lw=1.1, alpha=0.85, label=trace.name)
    heldout = sorted(point for trace in chronicle.nodes.values() for point in trace.evaluations)
    axes.plot(
        [at_s - began_s for at_s, _ in heldout],
        [loss for _, loss in heldout],
        "o",
        color="black",
        ms=4,
        label="global parameters Θ, held-out text",
    )
    for kill in kills:
        at_s = kill.at_s - began_s
        axes.axvline(at_s, color="#cc0000", ls="--", lw=1.4)
        words = f" kill -9 {kill.node},\n syncer of {len(kill.fragments)} fragments"
        axes.text(at_s, 0.97, words, color="#cc0000", va="top", transform=axes.get_xaxis_transform())
    for at_s in restarts_s:
        axes.axvline(at_s - began_s, color="#228833", ls=":", lw=1.4)
        axes.text(
            at_s - began_s,
            0.86,
            " restarted",
            color="#228833",
            va="top",
            transform=axes.get_xaxis_transform(),
        )
    before, after = before_after
    axes.set_title(f"{title}\nheld-out loss {before:.2f} → {after:.2f} nats per byte", fontsize=11)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("loss, nats per byte")
    axes.grid(alpha=0.25)
    axes.legend(loc="upper right")
    figure.tight_layout()
    try:
        figure.savefig(path, format="png")
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error
    finally:
        pyplot.close(figure)


def _with_gaps(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Curves that break off where a node did not train for 4 s."""
    times: list[float] = []
    losses: list[float] = []
    for at_s, loss in points:
        if times and at_s - times[-1] > 4.0:
            times.append(at_s)
            losses.append(float("nan"))
        times.append(at_s)
        losses.append(loss)
    return times, losses
