"""Which swarms `p2pdiloco chaos` starts, without starting them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import pytest

from p2pdiloco.demo import judge
from p2pdiloco.demo.swarm import Chronicle
from p2pdiloco_lab.chaos import chaos, chaos_verdict
from p2pdiloco_lab.chaos.chaos_run import ChaosCourse, ChaosOutcome
from p2pdiloco_lab.chaos.chaos_settings import ChaosSettings
from p2pdiloco_lab.chaos.chaos_verdict import Facts


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


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    Played.runs = []
    monkeypatch.setattr(chaos, "ChaosRun", Played)
    monkeypatch.setattr(chaos_verdict, "draw_run", lambda *args: None)
    monkeypatch.setattr(judge.Judge, "step_time_s", lambda self: 0.01)
    monkeypatch.setattr(judge.os, "sched_getaffinity", lambda pid: {0, 1}, raising=False)


def test_the_run_without_faults_may_be_shorter(tmp_path: Path) -> None:
    settings = ChaosSettings(minutes=3.0, compare_minutes=0.5, out=tmp_path / "out", load=1.0)
    assert chaos.run(settings) == 0
    assert [(name, seconds) for name, seconds, _, _ in Played.runs] == [("without", 30.0), ("with", 180.0)]
    assert [faults > 0 for _, _, faults, _ in Played.runs] == [False, True]


@pytest.mark.parametrize(("load", "min_step_s"), [(1.0, 0.0), (0.2, 0.2), (0.01, 4.0 / 8)])
def test_the_load_sets_the_least_length_of_a_step(tmp_path: Path, load: float, min_step_s: float) -> None:
    """Eight learners of 10 ms a step on two cores; H = 8 steps take no longer than four seconds."""
    settings = ChaosSettings(seconds=60.0, compare=False, out=tmp_path / "out", load=load)
    assert chaos.run(settings) == 0
    [(_, _, _, told)] = Played.runs
    assert told == pytest.approx(min_step_s)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["load"], report["min_step_s"]) == (load, pytest.approx(min_step_s))
