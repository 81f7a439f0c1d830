"""Verdict on a chaos run, from its facts: pure arithmetic over two runs, with and without faults."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections.abc import Iterable, Sequence

from msgspec import Struct

from p2pdiloco.demo.swarm import Line
from p2pdiloco_lab.chaos.facts import DEAD, HELD, WARM_UP_S, Facts, StateSpan, spans

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
    """See `Figures.participation`. `merges` in the order of time."""
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
