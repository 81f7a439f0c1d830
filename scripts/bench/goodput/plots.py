"""PNG files of `bench_goodput.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib

from goodput.homes import length

matplotlib.use("Agg")
from matplotlib import pyplot as plt

COLOURS = {1: "#444444", 2: "#c44e52", 4: "#dd8452", 8: "#55a868", 16: "#4c72b0"}


def draw(figures: dict[str, Any], folder: Path) -> Iterator[Path]:
    """Whatever was measured, one file each; the folder is made."""
    folder.mkdir(parents=True, exist_ok=True)
    if "paper" in figures:
        yield _save(folder / "goodput-chips.png", _chips(figures["paper"], figures.get("p2pdiloco", [])))
    if "homes" in figures:
        yield _save(folder / "goodput-homes.png", _homes(figures["homes"]))


def _save(path: Path, figure: Any) -> Path:
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def _chips(cells: list[dict[str, Any]], own: list[dict[str, Any]]) -> Any:
    figure, axes = plt.subplots(figsize=(8, 5))
    for learners, colour in COLOURS.items():
        row = [c for c in cells if c["learners"] == learners]
        name = "data parallel" if learners == 1 else f"M = {learners}"
        chips = [c["chips"] for c in row]
        axes.plot(chips, [c["process"]["mean"] for c in row], color=colour, label=name)
        axes.plot(chips, [c["paper"] for c in row], "o", color=colour, mfc="none")
        mine = [c for c in own if c["learners"] == learners]
        if mine:
            axes.plot([c["chips"] for c in mine], [c["restarts"]["mean"] for c in mine], ":", color=colour)
    axes.plot([], [], "o", color="grey", mfc="none", label="paper")
    axes.plot([], [], ":", color="grey", label="p2pdiloco, learner restarts")
    axes.set(
        xscale="log", xlabel="chips (one interruption per chip and year)", ylabel="goodput, %", ylim=(0, 101)
    )
    axes.set_xticks(sorted({c["chips"] for c in cells}), ["150k", "300k", "600k", "1.2M", "2.4M"])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(ncol=2)
    return figure


def _homes(cells: list[dict[str, Any]]) -> Any:
    sizes = sorted({c["nodes"] for c in cells})
    figure, panels = plt.subplots(1, len(sizes), figsize=(3.4 * len(sizes), 4), sharey=True, squeeze=False)
    for axes, nodes in zip(panels[0], sizes, strict=True):
        row = [c for c in cells if c["nodes"] == nodes]
        places = range(len(row))
        base = [0.0] * len(row)
        for key, colour, name in (
            ("goodput", "#55a868", "in the merged state"),
            ("not_made", "#cccccc", "not made: catching up"),
            ("pending", "#8172b3", "not merged yet"),
            ("lost", "#c44e52", "lost"),
        ):
            values = [100 * c[key] for c in row]
            axes.bar(places, values, bottom=base, color=colour, label=name, width=0.6)
            base = [a + b for a, b in zip(base, values, strict=True)]
        axes.plot(places, [100 * c["participation"] for c in row], "kD", label="participation")
        axes.set_xticks(places, [length(c["mean_session_s"]) for c in row])
        axes.set(title=f"{nodes} nodes", xlabel="mean session", ylim=(0, 105))
    panels[0][0].set_ylabel("% of what undisturbed learners make")
    panels[0][0].legend(loc="lower right", fontsize=8)
    return figure
