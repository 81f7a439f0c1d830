"""`p2pdiloco simulate` and `chaos` are the lab's: found by entry point, and missed in one sentence."""

from __future__ import annotations

import importlib.metadata
from importlib.metadata import EntryPoint
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from p2pdiloco.cli import from_lab
from p2pdiloco.cli.group import cli, run
from p2pdiloco.cli.options import known_variables
from p2pdiloco.release import VERSION

NAMES = ("chaos", "simulate")


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[EntryPoint]:
    """What stands in for the entry points of all that is installed: nothing, to begin with."""
    entries: list[EntryPoint] = []

    def look_up(group: str, name: str) -> list[EntryPoint]:
        return [entry for entry in entries if (entry.group, entry.name) == (group, name)]

    monkeypatch.setattr(importlib.metadata, "entry_points", look_up)
    return entries


def _of(version: str) -> Any:
    return SimpleNamespace(version=version)


@click.command("chaos")
@click.option("--often", envvar="P2PDILOCO_OFTEN", is_flag=True)
def played(often: bool) -> int:
    """Play."""
    return 7 + often


ENTRY = EntryPoint("chaos", f"{__name__}:played", from_lab.GROUP)


@pytest.mark.parametrize("words", [["simulate"], ["chaos", "--help"], ["simulate", "--seeds", "3"]])
def test_without_the_lab_one_sentence_says_where_it_is(
    installed: list[EntryPoint], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(words) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: `p2pdiloco {words[0]}` is in the lab, which is not installed here\n")
    assert said.endswith("pip install -c constraints.txt ./lab\n") and said.count("\n") == 2


def test_help_names_the_labs_commands_without_looking_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(importlib.metadata, "entry_points")
    said = CliRunner().invoke(cli, ["--help"]).output
    assert all(f"\n  {name} " in said for name in NAMES)


def test_an_installed_command_is_called_and_its_status_is_that_of_the_command(
    installed: list[EntryPoint],
) -> None:
    installed.append(ENTRY)
    assert run(["chaos"]) == 7 and run(["chaos", "--often"]) == 8


def test_a_lab_of_another_release_is_refused(
    installed: list[EntryPoint], capsys: pytest.CaptureFixture[str]
) -> None:
    other = SimpleNamespace(dist=_of("0.1"), group=from_lab.GROUP, name="chaos", load=lambda: played)
    installed.append(other)  # type: ignore[arg-type]
    assert run(["chaos"]) == 2
    assert f"the lab is that of version 0.1, and this is {VERSION}" in capsys.readouterr().err
    other.dist = _of(VERSION)
    assert run(["chaos"]) == 7


def test_variables_of_the_lab_are_known_where_it_is_installed(
    installed: list[EntryPoint], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("P2PDILOCO_OFTEN", "1")
    assert "P2PDILOCO_OFTEN" not in known_variables(cli)
    assert run(["run", "check", "nowhere.toml"]) == 2
    assert "P2PDILOCO_OFTEN is not known" in capsys.readouterr().err
    installed.append(ENTRY)
    assert run(["chaos"]) == 8


def test_options_are_not_completed_without_the_lab(installed: list[EntryPoint]) -> None:
    context = from_lab.CHAOS.make_context("chaos", [], resilient_parsing=True)
    assert context.command is from_lab.CHAOS
