"""Chaos without processes: the schedule, the states of nodes, and the arithmetic of the verdict."""

from __future__ import annotations

from typing import Any

import pytest

from p2pdiloco.demo.swarm import Chronicle, Line
from p2pdiloco_lab.chaos import chaos_verdict
from p2pdiloco_lab.chaos.chaos_verdict import (
    LINK_WEIGHTS,
    WEIGHTS,
    Facts,
    StateChange,
    StateSpan,
    draw,
    goals,
    spans,
)


def test_the_schedule_is_the_seeds_and_reaches_the_rate() -> None:
    one, again = draw(3, 8, 4, 1800, 125, False), draw(3, 8, 4, 1800, 125, False)
    assert one == again
    assert one != draw(4, 8, 4, 1800, 125, False)
    assert len(one) == 63  # 125 an hour for half an hour, rounded up
    assert [f.at_s for f in one] == sorted(f.at_s for f in one)
    assert all(0 <= f.at_s <= 1800 - 45 and 0 <= f.target < 8 for f in one)
    assert all(f.target < 4 for f in one if f.kind == "kill-syncer")
    assert {f.kind for f in one} == set(WEIGHTS)
    assert {f.kind for f in draw(3, 8, 4, 1800, 125, True)} == set(WEIGHTS) | set(LINK_WEIGHTS)


def test_short_runs_have_different_faults_and_time_to_come_back() -> None:
    for seed in range(20):
        faults = draw(seed, 3, 4, 25, 576, False)
        assert len(faults) == 4 and len({f.kind for f in faults}) >= 3
        assert all(f.at_s <= 25 * 0.85 and f.lasts_s <= max(25 / 8, 10) for f in faults)


def acts(*found: tuple[float, str]) -> list[StateChange]:
    return [StateChange(at_s, "a", state) for at_s, state in found]  # type: ignore[arg-type]


def test_a_nodes_states() -> None:
    found = acts((0, "starting"), (2, "training"), (5, "stopped"), (6, "learner-down"), (7, "resumed"))
    found += acts((8, "training"), (10, "killed"), (10.1, "learner-down"), (12, "starting"), (15, "training"))
    assert spans(found, "a", 20) == [
        StateSpan(0, 2, "starting"),
        StateSpan(2, 5, "training"),
        StateSpan(5, 7, "stopped"),
        StateSpan(7, 8, "learner-down"),
        StateSpan(8, 10, "training"),
        StateSpan(10, 12, "killed"),
        StateSpan(12, 15, "starting"),
        StateSpan(15, 20, "training"),
    ]
    assert spans(found, "b", 20) == []


def test_who_is_killed_while_stopped_is_dead() -> None:
    found = acts((0, "starting"), (1, "training"), (2, "stopped"), (3, "killed"), (4, "resumed"))
    assert [s.state for s in spans(found, "a", 9)] == ["starting", "training", "stopped", "killed"]


def line(node: str, kind: str, mono: float, fragment: int | None = None, **fields: Any) -> Line:
    return Line(node=node, mono=mono, kind=kind, about=fragment, **fields)


def record() -> Facts:
    return Facts(Chronicle(fragments=1, names={"A": "a", "B": "b"}), began_s=0.0, ended_s=100.0)


@pytest.fixture
def facts() -> Facts:
    """Two nodes, one fragment, 100 s; node b is killed at 40 s as syncer, and started again at 45 s."""
    facts = record()
    for node in "ab":
        facts.acts.append(StateChange(-10.0, node, "starting"))
        facts.feed(line(node, "learner", -5.0, reason="running"))
    facts.acts += [StateChange(40.0, "b", "killed"), StateChange(45.0, "b", "starting")]
    facts.feed(line("b", "learner", 55.0, reason="running"))
    facts.feed(line("a", "office", 30.0, 0, syncer="B", term=1))
    facts.feed(line("a", "office", 41.5, 0, syncer="A", term=2))
    for second in range(100):
        at_s, number = second + 0.5, second + 1
        alive = 1 if 40 <= second < 55 else 2
        if 40 < at_s < 42:
            continue
        merged = 1 if second == 60 else alive
        node = "b" if 30 < at_s < 40 else "a"
        facts.feed(line(node, "merge", at_s, 0, number=number, contributors=merged, live=2, tokens=0))
        facts.feed(line(node, "publish", at_s, 0, number=number, digest="d", tokens=100 * number, term=1))
        facts.feed(line("a", "contribution", at_s, 0, reason="merged"))
        if alive == 2 and second != 55:
            facts.feed(line("b", "contribution", at_s, 0, reason="merged"))
        for node in "ab"[:alive]:
            numbers = {"inner_step": 10 * second, "tokens_total": 50 * second, "cpu_s": 0.5 * second}
            facts.feed(line(node, "progress", at_s, loss=1.0, **numbers))
        facts.feed(line("a", "evaluation", at_s, loss=4.0 - 0.01 * second, tokens=9))
    facts.sort()
    return facts


def test_participation_counts_who_was_really_alive(facts: Facts) -> None:
    """At 60.5 s one of two took part; while b was down, one of one. The dead do not count, nor the late."""
    figures = chaos_verdict.figures(facts)
    merges = 98
    alone = 13  # from 40 s to 55 s, two merges missing
    assert figures.participation == pytest.approx(1 - 1 / (2 * (merges - alone) + alone))
    assert figures.participation_by_core == pytest.approx((2 * (merges - alone) + alone - 1) / (2 * merges))


def test_resuming_and_returning_are_timed(facts: Facts) -> None:
    figures = chaos_verdict.figures(facts)
    assert (figures.t_resume.count, figures.t_resume.worst_s) == (1, 2.5)
    assert (figures.t_back.count, figures.t_back.median_s) == (1, 11.5)
    assert figures.never_resumed == 0 and figures.never_back == ()
    facts.acts.append(StateChange(99.9, "b", "killed"))
    facts.acts.append(StateChange(99.95, "b", "starting"))
    again = chaos_verdict.figures(facts)
    assert again.never_back == ("b",)
    # Struck again before anything of it was merged: neither back nor lost.
    facts.acts.insert(0, StateChange(50.0, "b", "killed"))
    facts.sort()
    assert chaos_verdict.figures(facts).t_back.count == 0


def test_an_office_laid_down_is_nobodys() -> None:
    facts = record()
    facts.feed(line("a", "office", 1.0, 0, syncer="A", term=3))
    facts.feed(line("a", "office", 2.0, 0, reason="laid down: term over", term=3))
    assert [facts.log.syncer(0, at_s) for at_s in (0.5, 1.5, 2.5)] == ["", "a", ""]
    assert facts.log.syncer(0) == ""


def test_pace_counts_only_calm_and_warm_learners(facts: Facts) -> None:
    figures = chaos_verdict.figures(facts)
    assert figures.inner_steps_per_cpu_s == pytest.approx(20.0)
    slow = record()
    slow.acts, slow.log.nodes = facts.acts, {"a": facts.log.nodes["a"]}
    assert chaos_verdict.steps_per_cpu_s(slow, chaos_verdict.timelines(slow)) == pytest.approx(20.0)


def test_two_runs_are_compared(facts: Facts) -> None:
    same = chaos_verdict.compare(facts, facts)
    assert same.merges == 1.0 and same.inner_steps_per_cpu_s == 1.0
    assert same.loss_ratio == pytest.approx(1.0)
    assert same.loss_faulty == pytest.approx(3.01, abs=0.02)
    # Per fragment 100 tokens a second merged; trained were 50 a second by a, and by b while it was up.
    assert same.goodput == pytest.approx(
        chaos_verdict.tokens_merged(facts) / chaos_verdict.tokens_trained(facts)
    )
    reached = goals(chaos_verdict.figures(facts), same)
    assert reached["participation >= 95 %"] and reached["merges per fragment >= 99 %"]
    worse = record()
    worse.acts, worse.log.merges, worse.log.published = facts.acts, facts.log.merges, facts.log.published[:50]
    assert chaos_verdict.compare(worse, facts).merges == pytest.approx(0.5, abs=0.03)
    assert not goals(chaos_verdict.figures(worse), chaos_verdict.compare(worse, facts))[
        "merges per fragment >= 99 %"
    ]
