"""`p2pdiloco simulate`: exit status, replay command, JSON."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

from p2pdiloco.cli.simulate import simulate
from p2pdiloco.core.outbox import Outbox


def test_json_has_the_promised_keys() -> None:
    result = CliRunner().invoke(simulate, ["--seeds", "2", "--nodes", "2", "--mix", "calm", "--json"])
    report = json.loads(result.output)
    assert report["seeds"] == 2 and report["violations"] == 0 and report["stuck"] == 0
    assert report["seeds_per_minute"] > 0


def test_a_broken_rule_is_exit_status_1_and_names_the_command_that_replays_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def forget(self: Outbox, record: object, then: tuple[object, ...]) -> int:
        for effect in then:
            self.put(effect)  # type: ignore[arg-type]
        return 0

    monkeypatch.setattr(Outbox, "persist", forget)
    arguments = ["--seed", "5", "--nodes", "3", "--mix", "calm"]
    result = CliRunner().invoke(simulate, arguments, standalone_mode=False)
    assert result.return_value == 1
    assert "durable-first" in result.output
    assert "p2pdiloco simulate --seed 5 --nodes 3 --mix calm --trace" in result.output
