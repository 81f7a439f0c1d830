"""The PNG of a chaos run: one row per node, coloured by state; loss and contributors beneath."""

from __future__ import annotations

from pathlib import Path

from p2pdiloco.demo.verdict import save
from p2pdiloco_lab.chaos.facts import Facts, State
from p2pdiloco_lab.chaos.verdict import alive_at, timelines, within

COLOURS: dict[State, str] = {
    "training": "#228833",
    "starting": "#ccbb44",
    "learner-down": "#66ccee",
    "stopped": "#aa3377",
    "cut": "#4477aa",
    "killed": "#cc3311",
    "left": "#bbbbbb",
}
WORDS: dict[State, str] = {
    "training": "training",
    "starting": "starting, catching up",
    "learner-down": "learner down",
    "stopped": "stopped (SIGSTOP)",
    "cut": "link cut",
    "killed": "killed",
    "left": "left",
}
BINS = 120


def draw(path: Path, facts: Facts, free: Facts | None, title: str, unit: str) -> None:
    """Write the PNG. `free`: the run without faults, whose loss is drawn beside. Facts must be sorted.
    `unit` is of losses.

    Raises:
        StorageError: it cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = timelines(facts)
    figure, (rows, loss, quorum) = pyplot.subplots(
        3, 1, figsize=(11, 4.5 + 0.3 * len(lines)), dpi=120, sharex=True, height_ratios=(len(lines), 4, 3)
    )
    seen: set[State] = set()
    for row, spans in enumerate(lines.values()):
        for span in spans:
            if span.state not in COLOURS or span.to_s <= facts.began_s:
                continue
            from_s = max(span.from_s, facts.began_s)
            label = None if span.state in seen else WORDS[span.state]
            seen.add(span.state)
            rows.barh(
                row,
                span.to_s - from_s,
                left=from_s - facts.began_s,
                height=0.8,
                color=COLOURS[span.state],
                label=label,
            )
    rows.set_yticks(range(len(lines)), list(lines))
    rows.invert_yaxis()
    rows.set_title(title, fontsize=11)
    rows.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8)
    for run, colour, words in ((free, "#bbbbbb", "without faults"), (facts, "black", "with faults")):
        if run is not None:
            points = [(at_s - run.began_s, y) for at_s, y in run.log.heldout_losses() if within(run, at_s)]
            loss.plot([x for x, _ in points], [y for _, y in points], ".", ms=4, color=colour, label=words)
    loss.set_ylabel(f"held-out loss of Θ\n{unit}")
    loss.legend(loc="upper right", fontsize=8)
    _contributors(quorum, facts)
    quorum.set_xlabel("seconds of training")
    for axes in (loss, quorum):
        axes.grid(alpha=0.25)
    save(figure, path)


def _contributors(axes, facts: Facts) -> None:  # type: ignore[no-untyped-def]
    """Mean contributors of a merge against the learners that were alive."""
    length_s = max(facts.ended_s - facts.began_s, 1e-9)
    sums = [[0.0, 0.0] for _ in range(BINS)]
    for merge in facts.log.merges:
        if within(facts, merge.mono):
            bin_ = sums[min(BINS - 1, int((merge.mono - facts.began_s) / length_s * BINS))]
            bin_[0], bin_[1] = bin_[0] + merge.contributors, bin_[1] + 1
    middles = [(i + 0.5) * length_s / BINS for i in range(BINS)]
    lines = timelines(facts)
    alive = [alive_at(lines.values(), facts.began_s + at_s) for at_s in middles]
    axes.step(middles, alive, where="mid", color="#228833", lw=1, label="learners alive")
    found = [(at_s, total / count) for at_s, (total, count) in zip(middles, sums, strict=True) if count]
    axes.plot([x for x, _ in found], [y for _, y in found], color="black", lw=1, label="contributors")
    axes.set_ylabel("of a merge")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right", fontsize=8)
