"""`p2pdiloco simulate`: exit status, replay command, JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from p2pdiloco.core.api.events import Effect, Persist
from p2pdiloco.core.base import Outbox
from p2pdiloco.errors import UserError
from p2pdiloco_lab.lab_commands import simulate
from p2pdiloco_lab.simulation.scale import ScaleReport
from p2pdiloco_lab.simulation.seed_report import SeedsSummary, Violation


def test_json_has_the_promised_keys() -> None:
    result = CliRunner().invoke(simulate, ["--seeds", "2", "--nodes", "2", "--mix", "calm", "--json"])
    report = json.loads(result.output)
    assert report["seeds"] == 2 and report["violations"] == 0 and report["stuck"] == 0
    assert report["seeds_per_minute"] > 0
    assert report["mixes"]["calm"]["seeds"] == 2 and report["mixes"]["calm"]["seeds_per_minute"] > 0


def _histories(first: int, count: int) -> str:
    """The digest over all histories of small calm worlds."""
    report = json.loads(CliRunner().invoke(simulate, [*_worlds(first, count), "--json"]).output)
    return str(report["histories"])


def _worlds(first: int, count: int) -> list[str]:
    return ["--seed", str(first), "--seeds", str(count), "--nodes", "2", "--mix", "calm"]


def test_one_digest_says_whether_all_histories_are_equal() -> None:
    two = _histories(0, 2)
    assert f"histories {two[:16]}\n" in CliRunner().invoke(simulate, _worlds(0, 2)).output, "played again"
    assert len(two) == 64 and _histories(1, 2) != two


def test_one_changed_or_moved_seed_changes_the_digest_of_all() -> None:
    found = set()
    for digests in (["a", "b", "c"], ["a", "b", "d"], ["b", "a", "c"], ["a", "bc"]):
        found.add(SeedsSummary(digests=digests).histories)
    assert len(found) == 4


@pytest.mark.process
def test_two_processes_give_the_same_summary_as_one() -> None:
    reports = []
    for jobs in ("1", "2"):
        words = f"--seed 3 --seeds 4 --nodes 2 --mix storm --jobs {jobs} --json"
        report = json.loads(CliRunner().invoke(simulate, words.split()).output)
        for part in (report, *report["mixes"].values()):
            del part["seeds_per_minute"]
        reports.append(report)
    assert reports[0] == reports[1] and reports[0]["versions"] > 0


def test_a_broken_rule_is_exit_status_1_and_names_the_command_that_replays_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ask = Outbox.ask

    def hurry(self: Outbox, effect: Effect, *more: Any) -> None:
        if isinstance(effect, Persist):
            for following in effect.then:
                self.put(following)
            effect = replace(effect, then=())
        ask(self, effect, *more)

    monkeypatch.setattr(Outbox, "ask", hurry)
    arguments = ["--seed", "5", "--nodes", "3", "--mix", "calm"]
    result = CliRunner().invoke(simulate, arguments, standalone_mode=False)
    assert result.return_value == 1
    assert "durable-first" in result.output
    assert "while handling" in result.output, "the last decisions, and what was being handled"
    assert "p2pdiloco simulate --seed 5 --nodes 3 --mix calm --trace" in result.output


def test_a_large_world_has_the_same_keys_and_a_broken_rule_is_exit_status_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_: object, **__: object) -> ScaleReport:
        raise Violation("nothing-twice", "steps 1..9 of n3")

    monkeypatch.setattr("p2pdiloco_lab.simulation.scale.run_scale", broken)
    result = CliRunner().invoke(simulate, ["--nodes", "100", "--json"], standalone_mode=False)
    report = json.loads(result.output)
    assert (report["seeds"], report["violations"], report["stuck"]) == (1, 1, 0)
    assert "nothing-twice" in report["detail"] and result.return_value == 1


@pytest.mark.parametrize("more", [["--mix", "storm"], ["--seeds", "2"], ["--trace"]])
def test_what_a_large_world_cannot_do_is_said(more: list[str]) -> None:
    result = CliRunner().invoke(simulate, ["--nodes", "100", *more], standalone_mode=False)
    assert isinstance(result.exception, UserError)


@pytest.mark.parametrize("kind", [[], ["--bulk"]])
def test_one_seed_is_one_seed(kind: list[str]) -> None:
    result = CliRunner().invoke(simulate, [*kind, "--seed", "1"])
    assert "\n1 seed, 0 violations, 0 stuck; " in result.output
