"""Chaos runs without any process: schedule of faults, facts, verdict, report, PNG.

`draw` makes the schedule of faults from a seed before anything starts. `Facts` are what the nodes of one run
logged, and what was done to them. `figures` and `compare` are arithmetic over two runs, with and without
faults. `ChaosReport` has the figures against their goals. All times are seconds of the machine's monotonic
clock, which all processes of one machine share.
"""

from __future__ import annotations

import bisect
import itertools
import random
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from msgspec import Struct
from rich.table import Table

from p2pdiloco.demo.swarm import Chronicle, Line
from p2pdiloco.demo.verdict import save_figure

# Schedule.

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


# Report, in JSON and for people.


class ChaosReport(Struct, kw_only=True, frozen=True):
    """report.json. Shares are fractions; what could not be measured is null."""

    nodes: int
    preset: str
    seed: int
    load: float
    """Share of the processors that all learners together were asked to use."""
    min_step_s: float
    """Least time of an inner step, which follows from the load; 0: as short as may be."""
    seconds: float
    faults: int
    """Carried out."""
    skipped: int
    faults_per_hour: float
    faulty: Figures
    fault_free: Figures | None
    comparison: Comparison | None
    settled_s: float | None
    digests_agree: bool
    failures: tuple[str, ...]
    """Reasons of exit status 1; empty: nobody stuck, digests equal, no unexpected exit."""
    goals: dict[str, bool]
    """Figure -> whether it reaches the goal of a long run (docs/lab/chaos.md); no part of the exit status."""


def goals(faulty: Figures, comparison: Comparison | None) -> dict[str, bool]:
    """Judge which of the goals are reached, as far as they were measured."""
    found = {}
    if faulty.participation is not None:
        found["participation >= 95 %"] = faulty.participation >= 0.95
    if faulty.t_resume.median_s is not None:
        found["T_resume < 3 s median"] = faulty.t_resume.median_s < 3
    if faulty.t_back.median_s is not None:
        found["T_back < 15 s median"] = faulty.t_back.median_s < 15
    if comparison is not None:
        found["merges per fragment >= 99 %"] = comparison.merges >= 0.99
        if comparison.inner_steps_per_cpu_s is not None:
            found["inner steps per CPU-second within 3 %"] = comparison.inner_steps_per_cpu_s >= 0.97
        if comparison.loss_ratio is not None:
            found["loss within 1 % at equal tokens"] = comparison.loss_ratio <= 1.01
    return found


def table(report: ChaosReport) -> Table:
    """Make the table for a terminal."""
    shown = Table(show_header=False, box=None)
    for name, value in _rows(report):
        shown.add_row(name, value)
    return shown


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{100 * share:.1f} %"


def _rows(report: ChaosReport) -> list[tuple[str, str]]:
    ours, than = report.faulty, report.comparison
    least = min(ours.merges.values(), default=0)
    rows = [
        ("faults", f"{report.faults} in {report.seconds:.0f} s: {report.faults_per_hour:.0f} an hour"),
        ("merges", f"{sum(ours.merges.values())}, at least {least} of every fragment"),
        ("participation of live learners", _percent(ours.participation)),
        ("  of those that syncers counted on", _percent(ours.participation_by_core)),
        ("T_resume, median / worst", _seconds(ours.t_resume.median_s, ours.t_resume.worst_s)),
        ("T_back, median / worst", _seconds(ours.t_back.median_s, ours.t_back.worst_s)),
        ("tokens merged / trained", _percent(ours.tokens_merged / max(1, ours.tokens_trained))),
    ]
    if than is not None:
        rows += [
            ("against the run without faults:", ""),
            ("  merges per fragment, at least", _percent(than.merges)),
            ("  inner steps per CPU-second", _percent(than.inner_steps_per_cpu_s)),
            ("  goodput", _percent(than.goodput)),
            ("  held-out loss at equal tokens", _losses(than)),
        ]
    settled = "never" if report.settled_s is None else f"after {report.settled_s:.1f} s"
    rows.append(("all nodes equal at the end", settled))
    rows.append(("digests agree", "yes" if report.digests_agree else "NO"))
    rows += [("goal " + ("reached" if reached else "MISSED"), name) for name, reached in report.goals.items()]
    rows += [("FAILED", words) for words in report.failures]
    return rows


def _seconds(median_s: float | None, worst_s: float | None) -> str:
    return "nothing measured" if median_s is None else f"{median_s:.2f} s / {worst_s:.2f} s"


def _losses(than: Comparison) -> str:
    if than.loss_faulty is None or than.loss_fault_free is None:
        return "unknown"
    words = f"{than.loss_faulty:.3f} against {than.loss_fault_free:.3f}"
    return f"{words} at {than.loss_at_tokens / 1e6:.2f} M tokens"


# Facts.

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


class StateChange(Struct, frozen=True):
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
        self.acts: list[StateChange] = []

    def feed(self, line: Line) -> None:
        """Take in one line of a node's event log."""
        self.log.feed(line)
        if line.kind == "learner" and line.reason == "running":
            self.acts.append(StateChange(line.mono, line.node, "training"))
        elif line.kind == "learner" and line.reason.startswith(("ended", "lost")):
            self.acts.append(StateChange(line.mono, line.node, "learner-down"))

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


def spans(acts: Sequence[StateChange], node: str, ends_s: float) -> list[StateSpan]:
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


# Verdict.

LATE_SHARE = 0.4
"""Losses are compared on the line through the points of the last part of the common tokens: single
evaluations scatter more than runs differ."""


class Spread(Struct, frozen=True):
    """Durations in seconds."""

    count: int
    median_s: float | None = None
    worst_s: float | None = None


class Figures(Struct, kw_only=True, frozen=True):
    """One run in numbers."""

    seconds: float
    merges: dict[int, int]
    """Fragment -> versions made."""
    contributors: float | None
    """Mean of a merge."""
    participation: float | None
    """Contributors of merges / learners that were really alive, by what was done to them and what they
    logged. A merge counts at most as many contributors as there were live learners."""
    participation_by_core: float | None
    """Contributors / learners that the syncers counted on."""
    inner_steps_per_cpu_s: float | None
    """Pace of learners that nothing was done to at that time."""
    tokens_trained: int
    tokens_merged: int
    """Per fragment, the mean."""
    t_resume: Spread
    """Time from the kill of a syncer's daemon to the next version of its fragment by somebody else."""
    t_back: Spread
    """Time from a relaunch to the first merge of the node's work."""
    never_resumed: int
    never_back: tuple[str, ...]
    """Relaunched and not struck again, and yet nothing of theirs was merged."""


class Comparison(Struct, kw_only=True, frozen=True):
    """Comparison of the run with faults with the one without."""

    merges: float
    """Smallest share over the fragments, per second of each run."""
    inner_steps_per_cpu_s: float | None
    goodput: float
    """Goodput (arXiv 2604.21428): tokens merged / tokens that undisturbed learners trained in as long
    a time."""
    loss_faulty: float | None
    loss_fault_free: float | None
    loss_at_tokens: int
    """The two losses are compared at so many merged tokens."""
    loss_ratio: float | None


def spread(values: Sequence[float]) -> Spread:
    """Count, median, worst."""
    if not values:
        return Spread(0)
    return Spread(len(values), round(statistics.median(values), 3), round(max(values), 3))


def timelines(facts: Facts) -> dict[str, list[StateSpan]]:
    """Every node's states, in the order in which nodes first appear."""
    nodes = dict.fromkeys(act.node for act in facts.acts)
    return {node: spans(facts.acts, node, facts.ended_s) for node in nodes}


def within(facts: Facts, at_s: float) -> bool:
    """Tell whether a moment is in the part of the run that counts."""
    return facts.began_s <= at_s <= facts.ended_s


def alive_at(lines: Iterable[Sequence[StateSpan]], at_s: float) -> int:
    """Count the nodes that were training at that time."""
    return sum(any(s.state == "training" and s.from_s <= at_s < s.to_s for s in line) for line in lines)


def participation(merges: Sequence[Line], lines: dict[str, list[StateSpan]]) -> float | None:
    """Compute `Figures.participation`. `merges` in the order of time."""
    edges = sorted({edge for line in lines.values() for span in line for edge in (span.from_s, span.to_s)})
    counts = [alive_at(lines.values(), edge) for edge in edges]
    took_part = alive = 0
    for merge in merges:
        place = bisect.bisect_right(edges, merge.mono) - 1
        live = counts[place] if place >= 0 else 0
        took_part += min(merge.contributors, live)
        alive += live
    return took_part / alive if alive else None


def versions_made(facts: Facts) -> dict[int, int]:
    """Fragment -> how far its chain grew between begin and end."""
    made = {}
    for fragment in range(facts.log.fragments):
        numbers = [(v.mono, v.number) for v in facts.log.published if v.fragment == fragment]
        before = max((n for at_s, n in numbers if at_s < facts.began_s), default=0)
        after = max((n for at_s, n in numbers if at_s <= facts.ended_s), default=0)
        made[fragment] = after - before
    return made


def steps_per_cpu_s(facts: Facts, lines: dict[str, list[StateSpan]]) -> float | None:
    """Inner steps per CPU second of warm learners, between progress lines within one undisturbed span."""
    steps, cpu_s = 0, 0.0
    for node, trace in facts.log.nodes.items():
        calm = [s for s in lines.get(node, []) if s.state == "training"]
        for old, new in itertools.pairwise(trace.progress):
            made, spent_s = new.inner_step - old.inner_step, new.cpu_s - old.cpu_s
            undisturbed = any(s.from_s + WARM_UP_S <= old.mono and new.mono < s.to_s for s in calm)
            if undisturbed and made > 0 and spent_s > 0 and within(facts, old.mono):
                steps, cpu_s = steps + made, cpu_s + spent_s
    return steps / cpu_s if cpu_s else None


def tokens_trained(facts: Facts) -> int:
    """Tokens that all learners trained between begin and end; work that a crash lost counts too, it
    was done."""
    total = 0
    for trace in facts.log.nodes.values():
        for old, new in itertools.pairwise(trace.progress):
            if within(facts, old.mono) and within(facts, new.mono):
                total += max(0, new.tokens_total - old.tokens_total)
    return total


def merged_at(facts: Facts) -> tuple[list[float], list[float]]:
    """Times, and the tokens merged by then: the mean over the fragments. Never falls."""
    newest = dict.fromkeys(range(facts.log.fragments), 0)
    times, tokens = [], []
    for version in facts.log.published:
        newest[version.fragment] = max(newest[version.fragment], version.tokens)
        times.append(version.mono)
        tokens.append(sum(newest.values()) / facts.log.fragments)
    return times, tokens


def tokens_merged(facts: Facts) -> int:
    """Between begin and end."""
    times, tokens = merged_at(facts)

    def at(when_s: float) -> float:
        place = bisect.bisect_right(times, when_s) - 1
        return tokens[place] if place >= 0 else 0.0

    return int(at(facts.ended_s) - at(facts.began_s))


def resumptions(facts: Facts) -> tuple[list[float], int]:
    """(T_resume of every fragment whose syncer was killed, how many never went on)."""
    found, never = [], 0
    for act in facts.acts:
        if act.state not in ("killed", "gone") or not within(facts, act.at_s):
            continue
        for fragment in range(facts.log.fragments):
            if facts.log.syncer(fragment, act.at_s) != act.node:
                continue
            after = (
                v.mono
                for v in facts.log.published
                if v.fragment == fragment and v.mono > act.at_s and v.node != act.node
            )
            first = min(after, default=None)
            never += first is None
            if first is not None:
                found.append(first - act.at_s)
    return found, never


def returns(facts: Facts) -> tuple[list[float], list[str]]:
    """(T_back of every relaunch, who never came back). Struck again before its first merge: not counted."""
    found, never = [], []
    for act in facts.acts:
        if act.state != "starting" or not within(facts, act.at_s):
            continue
        struck = (*DEAD, *HELD)
        again_s = min(
            (a.at_s for a in facts.acts if a.node == act.node and a.at_s > act.at_s and a.state in struck),
            default=float("inf"),
        )
        merged = (line.mono for line in facts.log.nodes[act.node].merged)
        first_s = min((at_s for at_s in merged if at_s > act.at_s), default=float("inf"))
        if first_s < again_s:
            found.append(first_s - act.at_s)
        elif again_s == float("inf"):
            never.append(act.node)
    return found, never


def figures(facts: Facts) -> Figures:
    """Everything about one run. The facts must be sorted."""
    lines = timelines(facts)
    merges = [merge for merge in facts.log.merges if within(facts, merge.mono)]
    merged = sum(merge.contributors for merge in merges)
    counted_on = sum(merge.live for merge in merges)
    resumed, never_resumed = resumptions(facts)
    back, never_back = returns(facts)
    return Figures(
        seconds=round(facts.ended_s - facts.began_s, 3),
        merges=versions_made(facts),
        contributors=merged / len(merges) if merges else None,
        participation=participation(merges, lines),
        participation_by_core=merged / counted_on if counted_on else None,
        inner_steps_per_cpu_s=steps_per_cpu_s(facts, lines),
        tokens_trained=tokens_trained(facts),
        tokens_merged=tokens_merged(facts),
        t_resume=spread(resumed),
        t_back=spread(back),
        never_resumed=never_resumed,
        never_back=tuple(never_back),
    )


def loss_curve(facts: Facts) -> list[tuple[float, float]]:
    """(tokens merged, held-out loss of Theta), in the order of tokens."""
    times, tokens = merged_at(facts)
    points = []
    for at_s, loss in facts.log.heldout_losses():
        place = bisect.bisect_right(times, at_s) - 1
        if place >= 0:
            points.append((tokens[place], loss))
    return sorted(points)


def loss_at(curve: Sequence[tuple[float, float]], tokens: float) -> float | None:
    """The loss there by the least-squares line through the points of the last part before it."""
    near = [(x, y) for x, y in curve if (1 - LATE_SHARE) * tokens <= x <= tokens]
    if len(near) < 3:
        return None
    xs, ys = [x for x, _ in near], [y for _, y in near]
    if max(xs) == min(xs):
        return statistics.fmean(ys)
    slope, intercept = statistics.linear_regression(xs, ys)
    return intercept + slope * tokens


def compare(faulty: Facts, free: Facts) -> Comparison:
    """The run with faults against the same swarm without. Both must be sorted."""
    ours, theirs = figures(faulty), figures(free)
    seconds = ours.seconds / theirs.seconds if theirs.seconds else 1.0
    shares = [
        made / (theirs.merges[fragment] * seconds)
        for fragment, made in ours.merges.items()
        if theirs.merges.get(fragment)
    ]
    pace = None
    if ours.inner_steps_per_cpu_s and theirs.inner_steps_per_cpu_s:
        pace = ours.inner_steps_per_cpu_s / theirs.inner_steps_per_cpu_s
    curves = loss_curve(faulty), loss_curve(free)
    tokens = min((curve[-1][0] for curve in curves if curve), default=0.0)
    losses = [loss_at(curve, tokens) for curve in curves]
    ratio = losses[0] / losses[1] if losses[0] and losses[1] else None
    return Comparison(
        merges=min(shares, default=0.0),
        inner_steps_per_cpu_s=pace,
        goodput=ours.tokens_merged / max(1.0, theirs.tokens_trained * seconds),
        loss_faulty=losses[0],
        loss_fault_free=losses[1],
        loss_at_tokens=int(tokens),
        loss_ratio=ratio,
    )


# PNG: one row per node, coloured by state; loss and contributors beneath.

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


def draw_run(path: Path, facts: Facts, free: Facts | None, title: str, unit: str) -> None:
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
    save_figure(figure, path)


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
