"""Which swarms `p2pdiloco chaos` starts, without starting them, and what is concluded from the logs of a
survivor, of a split that healed, and of faults."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest

from p2pdiloco.cli.main import run
from p2pdiloco.demo import judge
from p2pdiloco.demo.swarm import Chronicle, Line
from p2pdiloco_lab.chaos import chaos, chaos_verdict, scenarios
from p2pdiloco_lab.chaos.chaos_run import ChaosCourse, ChaosOutcome
from p2pdiloco_lab.chaos.chaos_settings import ChaosSettings
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
from p2pdiloco_lab.chaos.scenarios import equal_at, healed, split_of, survived
from p2pdiloco_lab.namespaces import Links, LinksRefused


class Played:
    """Stands for ChaosRun: notes what it was told, and nothing happens."""

    runs: ClassVar[list[tuple[str, float, int, float]]] = []

    def __init__(self, course: ChaosCourse, folder: Path, *_: Any) -> None:
        self._seconds, self._fragments = course.seconds, course.manifest.sync.fragments
        Played.runs.append((folder.name, course.seconds, len(course.faults), course.min_step_s))

    def play(self) -> ChaosOutcome:
        facts = Facts(Chronicle(self._fragments), began_s=100.0, ended_s=100.0 + self._seconds)
        return ChaosOutcome(
            facts=facts, struck=0, skipped=0, unexpected=[], disagreements=[], stuck=[], settled_s=1.0
        )


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    Played.runs = []
    monkeypatch.setattr(chaos, "ChaosRun", Played)
    monkeypatch.setattr(chaos_verdict, "draw_run", lambda *args: None)
    monkeypatch.setattr(judge.Judge, "step_time_s", lambda self: 0.01)
    monkeypatch.setattr(judge.os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)


def test_the_run_without_faults_may_be_shorter(nothing_runs: None, tmp_path: Path) -> None:
    settings = ChaosSettings(minutes=3.0, compare_minutes=0.5, out=tmp_path / "out", load=1.0)
    assert chaos.run(settings) == 0
    assert [(name, seconds) for name, seconds, _, _ in Played.runs] == [("without", 30.0), ("with", 180.0)]
    assert [faults > 0 for _, _, faults, _ in Played.runs] == [False, True]


@pytest.mark.parametrize(("load", "min_step_s"), [(1.0, 0.0), (0.2, 0.2), (0.01, 4.0 / 8)])
def test_the_load_sets_the_least_length_of_a_step(
    nothing_runs: None, tmp_path: Path, load: float, min_step_s: float
) -> None:
    """Eight learners of 10 ms a step on two cores; H = 8 steps take no longer than four seconds."""
    settings = ChaosSettings(seconds=60.0, compare=False, out=tmp_path / "out", load=load)
    assert chaos.run(settings) == 0
    [(_, _, _, told)] = Played.runs
    assert told == pytest.approx(min_step_s)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["load"], report["min_step_s"]) == (load, pytest.approx(min_step_s))


# What is concluded.


SIDES = (("a", "b"), ("c",))
SPLIT_S, HEALED_S = 20.5, 80.5


class Logs:
    """Feeds lines to the facts, as a supervisor does."""

    def __init__(self) -> None:
        names = {node.upper(): node for node in "abc"}
        self.facts = Facts(Chronicle(fragments=1, names=names), began_s=0.0, ended_s=100.0)

    def line(self, node: str, kind: str, mono: float, reason: str = "", **fields: Any) -> None:
        self.facts.feed(Line(node=node, mono=mono, kind=kind, about=0, reason=reason, **fields))

    def version(
        self, at_s: float, number: int, tokens: int, maker: str, others: str, branch: str = ""
    ) -> None:
        """`maker` closes a round 0.2 s before it publishes; `others` have it 0.1 s later."""
        held = {"number": number, "digest": f"{branch}{number}", "tokens": tokens, "term": 1}
        self.line(maker, "merge", at_s - 0.2, number=number, contributors=1, live=1, tokens=0)
        self.line(maker, "publish", at_s, **held)
        for other in others:
            self.line(other, "apply", at_s + 0.1, **held)

    def progress(self, node: str, until_s: int) -> None:
        for second in range(until_s + 1):
            pace = {"inner_step": second, "tokens_total": 10 * second, "cpu_s": 0.0, "loss": 1.0}
            self.line(node, "progress", float(second), **pace)


@pytest.fixture
def split() -> Logs:
    """30 tokens a second are trained; c makes lighter versions of its own from 20 s to 80 s."""
    logs = Logs()
    for node in "abc":
        logs.progress(node, 99)
    for second in range(1, 100):
        if second <= SPLIT_S or second > 85:
            logs.version(second, second, 30 * second, "a", "bc")
        else:
            logs.version(second, second, 600 + 20 * (second - 20), "a", "b")
        if SPLIT_S < second <= HEALED_S:
            logs.version(second + 0.5, second, 600 + 10 * (second - 20), "c", "", "lost-")
            logs.line("c", "contribution", second + 0.5, "merged", stamp=second, tokens=10)
    again = {"stamp": 80, "contributions": 60, "tokens": 600}
    logs.line("c", "fork", 83.0, "our chain lost: 60 contributions are sent again", **again)
    return logs


def merge_again(logs: Logs) -> None:
    logs.line("c", "contribution", 84.5, "merged", stamp=80, tokens=600)


def test_a_split_that_healed(split: Logs) -> None:
    merge_again(split)
    found = healed(split.facts, SIDES, SPLIT_S, HEALED_S, [], True)
    assert found.failures == ()
    larger, smaller = found.sides
    assert larger.versions == {0: 60} and smaller.versions == {0: 60}
    assert (larger.tokens_trained, smaller.tokens_trained) == (1200, 600)
    assert (larger.tokens_merged, smaller.tokens_merged) == (1200, 600)
    assert (larger.first_version_s, smaller.first_version_s) == (0.5, 1.0)
    assert found.equal_s == pytest.approx(5.6)
    assert (found.sent_again, found.tokens_sent_again, found.merged_again_s) == (60, 600, 4.0)
    assert (found.tokens_trained, found.tokens_merged) == (2970, 2970)
    assert ("equal heads after healing", "after 5.6 s") in scenarios.report_rows(found)


def test_work_that_is_not_merged_again_fails(split: Logs) -> None:
    found = healed(split.facts, SIDES, SPLIT_S, HEALED_S, [], True)
    assert found.not_merged_again == ("c, fragment 0",) and found.merged_again_s is None
    assert found.failures == ("c, fragment 0: what the fork cost was not merged again",)


def test_work_that_is_given_up_fails(split: Logs) -> None:
    merge_again(split)
    split.line("c", "fork", 84.0, "given up: the disk is full", stamp=9, tokens=10)
    split.line("c", "contribution", 84.0, "given up: not a number", tokens=10, lost=False)  # its work goes on
    found = healed(split.facts, SIDES, SPLIT_S, HEALED_S, [], True)
    assert found.failures == ("given up: c, fragment 0: given up: the disk is full, 10 tokens",)


def test_a_branch_that_is_merely_forgotten_fails(split: Logs) -> None:
    """All records may be in order, and yet the tokens of one side are in no chain."""
    merge_again(split)
    log = split.facts.log
    log.held = [
        msgspec.structs.replace(line, tokens=line.tokens - 600) if line.mono > 85 else line
        for line in log.held
    ]
    found = healed(split.facts, SIDES, SPLIT_S, HEALED_S, [], True)
    assert found.failures == ("2970 tokens were trained, only 2370 are merged",)


def test_a_side_that_stood_still_fails(split: Logs) -> None:
    merge_again(split)
    log = split.facts.log
    log.published = [line for line in log.published if line.node != "c"]
    found = healed(split.facts, SIDES, SPLIT_S, HEALED_S, ["b ended by itself"], True)
    assert found.failures == ("b ended by itself", "c did not make a version of every fragment alone")


def test_equal_means_one_version_made_since(split: Logs) -> None:
    log = split.facts.log
    assert equal_at(log, "abc", HEALED_S) == pytest.approx(86.1)
    assert equal_at(log, "ab", HEALED_S) == pytest.approx(81.1)
    assert equal_at(log, "abc", 99.0) is None
    # Taken over after the healing, but made before it: says nothing about what is made together.
    old = Chronicle(fragments=1)
    old.held = [
        msgspec.structs.replace(line, mono=90.0, kind="catchup") for line in log.held if line.mono < 30
    ]
    assert equal_at(old, "abc", HEALED_S) is None
    log.fragments = 2
    assert equal_at(log, "abc", HEALED_S) is None, "there is nothing of the second fragment"


def test_a_survivor() -> None:
    logs = Logs()
    for second in range(1, 21):
        logs.version(second - 0.2, second, 30 * second, "b", "ac")
    logs.version(20.1, 21, 630, "a", "")  # closed before the kill at 20.05 s, with work of the dead
    for second in range(32, 51):
        logs.version(second, second - 10, 630 + 10 * (second - 31), "a", "")
    for node, at_s in (("b", 58.0), ("c", 61.5)):
        logs.facts.acts.append(StateChange(50.0, node, "starting"))
        logs.line(node, "contribution", 10.0, "merged", stamp=1, tokens=1)
        logs.line(node, "contribution", at_s, "merged", stamp=1, tokens=1)
    logs.version(62.0, 41, 900, "c", "ab")
    found = survived(logs.facts, "a", 20.05, 50.0, "bc", [], True)
    assert found.failures == ()
    assert (found.next_version_s, found.all_fragments_s) == (11.95, 11.95)
    assert (found.versions_alone, found.tokens_alone) == (20, 220)
    assert found.back_s == {"b": 8.0, "c": 11.5} and found.last_back_s == 11.5
    assert found.equal_s == pytest.approx(12.1)
    stuck = survived(logs.facts, "a", 50.0, 60.0, "bc", [], True)
    assert stuck.failures == (
        "a did not go on with every fragment while it was alone",
        "b: nothing of it was merged after it returned",
    )


def test_who_is_on_which_side() -> None:
    names = [f"n{i}" for i in range(8)]
    larger, smaller = split_of(names, 0)
    assert (larger, smaller) == (tuple(names[:5]), tuple(names[5:]))
    assert split_of(names, 6)[0] == ("n6", "n7", "n0", "n1", "n2")
    assert [len(side) for side in split_of(names[:3], 1)] == [2, 1]


def test_a_split_without_permission_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Any
) -> None:
    def refuse(_self: Links) -> None:
        raise LinksRefused("ip link add: Operation not permitted")

    monkeypatch.setattr(Links, "__init__", refuse)
    command = ["chaos", "--scenario", "split", "--out", os.fspath(tmp_path / "out")]
    assert run(command) == 2
    said = capsys.readouterr().err
    assert "needs network namespaces" in said and "Operation not permitted" in said and "hint:" in said
    assert run([*command, "--nodes", "2"]) == 2
    assert "at least 3 nodes" in capsys.readouterr().err


# Chaos without processes: the schedule, the states of nodes, and the arithmetic of the verdict.


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
