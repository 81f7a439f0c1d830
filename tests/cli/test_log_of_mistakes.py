"""Mistakes in flags, where the log is for machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p2pdiloco.cli import commands, group
from p2pdiloco.cli import main as cli_main
from p2pdiloco.errors import UserError


def test_mistakes_in_flags_are_lines_of_the_log_that_a_settings_file_asks_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "node.toml"
    config.write_text('[node]\nlog = "json"\n')
    for arguments in (["--config", str(config), "--nonsense"], [f"--config={config}", "--threads", "x"]):
        assert cli_main.run(["node", *arguments]) == 2
        line = json.loads(capsys.readouterr().err)
        assert line["event"] == "error" and line["level"] == "error"
    assert cli_main.run(["bootstrap", "--config", str(config), "--nonsense"]) == 2
    assert capsys.readouterr().err.startswith("error: "), "that table says nothing of it"
    assert cli_main.run(["node", "--config", str(config), "--log", "text", "--nonsense"]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    monkeypatch.setenv("P2PDILOCO_CONFIG", str(config))
    assert cli_main.run(["node", "--nonsense"]) == 2
    assert json.loads(capsys.readouterr().err)["event"] == "error"
    config.write_text("[node\n")
    assert cli_main.run(["node", "--nonsense"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.parametrize("where", ["a command", "what comes before it"])
def test_details_of_an_error_are_in_its_line_too(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: object) -> None:
        raise UserError("nobody gives it", "ask again", ["anna: refused", "ben: silent"])

    place = (commands, "check_node") if where == "a command" else (group, "check_environment")
    monkeypatch.setattr(*place, wrong)
    assert cli_main.run(["node", "--log", "json", "--data-dir", str(tmp_path / "node")]) == 2
    line = json.loads(capsys.readouterr().err)
    assert line["fields"] == {"hint": "ask again", "details": ["anna: refused", "ben: silent"]}
