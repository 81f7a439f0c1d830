"""Every command's help has an example, and the examples are what the command takes."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from click.testing import CliRunner

from p2pdiloco.adapters import event_reader
from p2pdiloco.adapters.data_dir import EventsLog
from p2pdiloco.adapters.event_reader import EventReader
from p2pdiloco.cli import charts, from_lab
from p2pdiloco.cli import main as cli_main
from p2pdiloco.cli.charts import (
    ChartPlace,
    PlaceFile,
    Point,
    Points,
    Trackio,
    Wandb,
    carry,
    open_charts,
)
from p2pdiloco.cli.from_lab import loaded
from p2pdiloco.cli.group import cli, run
from p2pdiloco.cli.options import EXAMPLES, known_variables
from p2pdiloco.errors import UserError
from p2pdiloco.release import VERSION


def commands(group: click.Group, before: str = "") -> Iterator[tuple[str, click.Command]]:
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from commands(command, f"{before}{name} ")
        else:
            yield f"{before}{name}", loaded(command)


ALL = dict(commands(cli))


def examples(command: click.Command) -> list[list[str]]:
    """Words of the lines of its help from "Example:" on that are commands of ours, without remarks."""
    context = click.Context(command, max_content_width=200, terminal_width=200)
    _, found, text = command.get_help(context).partition("Example:")
    lines = [line.strip() for line in text.splitlines()] if found else []
    said = [re.split(r" {3,}| > ", line)[0] for line in lines if line.startswith("p2pdiloco ")]
    return [shlex.split(line)[1:] for line in said]


@pytest.mark.parametrize("path", ALL)
def test_the_help_has_an_example_that_parses(path: str) -> None:
    command, name = ALL[path], path.split()
    own = [words for words in examples(command) if words[: len(name)] == name]
    assert own, "write an example into its docstring, or p2pdiloco/cli/options.py"
    for words in own:
        command.make_context(path, words[len(name) :])


def test_no_example_is_of_another_command() -> None:
    assert EXAMPLES.keys() <= ALL.keys()


@pytest.mark.process
def test_words_are_completed() -> None:
    """As docs/topics/joining.md says, by click's own."""
    told = {"_P2PDILOCO_COMPLETE": "bash_complete", "COMP_WORDS": "p2pdiloco run l", "COMP_CWORD": "2"}
    done = subprocess.run(
        [sys.executable, "-c", "from p2pdiloco.cli.group import cli; cli(prog_name='p2pdiloco')"],
        env={**os.environ, **told},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["plain,link"], done.stderr


# `p2pdiloco log-to`: each event is drawn once, over restarts, renamed logs and torn lines.


class Drawn:
    """Charts that remember what was drawn."""

    def __init__(self, fails_at: int = 1 << 62) -> None:
        self.points: list[Point] = []
        self.names: list[str] = []
        self._fails_at = fails_at

    def open(self, _target: str, where: ChartPlace) -> Drawn:
        self.names.append(where.name)
        return self

    def write(self, points: Sequence[Point]) -> None:
        self.points += points
        if len(self.points) >= self._fails_at:
            raise ConnectionError("no network\nand more")

    def close(self) -> None:
        pass

    def steps(self) -> list[float]:
        return [point.values["node/inner_step"] for point in self.points if "node/inner_step" in point.values]


class Diary:
    """A node's event log."""

    def __init__(self, folder: Path, most_bytes: int = 1 << 20) -> None:
        self._log = EventsLog(folder / "events.jsonl", most_bytes)
        self.steps = 0

    def progress(self, number: int = 1) -> None:
        for _ in range(number):
            fields = {"inner_step": self.steps, "run_tokens": 100 * self.steps, "loss": 3.0, "cpu_s": 1.0}
            self._log.write("progress", fields=fields.items())
            self.steps += 1

    def close(self) -> None:
        self._log.close()


@pytest.fixture
def carried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    def work(drawn: Drawn, follows: bool = False, again: bool = False, **options: Any) -> list[str]:
        said: list[str] = []
        where = ChartPlace(tmp_path / "out", "p", "node")
        stop = options.get("stop") or threading.Event()
        monkeypatch.setattr(charts, "open_charts", drawn.open)
        carry(tmp_path, "tensorboard", where, follows=follows, again=again, stop=stop, say=said.append)
        return said

    return work


def test_each_event_is_drawn_once_over_restarts(tmp_path: Path, carried: Callable[..., list[str]]) -> None:
    diary, drawn = Diary(tmp_path), Drawn()
    carried(drawn)  # there may be nothing yet
    diary.progress(3)
    carried(drawn)
    carried(drawn)
    diary.progress(2)
    carried(drawn)
    assert drawn.steps() == [0, 1, 2, 3, 4] and [point.tokens for point in drawn.points][-1] == 400
    assert drawn.points[0].values == {"train/loss": 3.0, "node/inner_step": 0}
    carried(drawn, again=True)
    assert drawn.steps() == [0, 1, 2, 3, 4] * 2
    assert set(drawn.names[:-1]) == {"node"} and drawn.names[-1].startswith("node-"), "not drawn over the old"


def test_a_log_that_was_renamed_is_read_to_its_end_first(
    tmp_path: Path, carried: Callable[..., list[str]]
) -> None:
    diary, drawn = Diary(tmp_path, most_bytes=2000), Drawn()
    diary.progress(10)
    carried(drawn)
    diary.progress(7)  # over the bound: the rest of the old file, and a new one
    assert (tmp_path / "events.jsonl.1").exists()
    assert carried(drawn) == [] and drawn.steps() == list(range(17))
    diary.progress(60)  # twice over it: what was read last is gone
    said = carried(drawn)
    assert "lines between are missing" in said[0]
    assert drawn.steps() == sorted(set(drawn.steps())) and drawn.steps()[-1] == 76


def test_a_log_is_followed_over_its_renaming_until_told_to_stop(
    tmp_path: Path, carried: Callable[..., list[str]]
) -> None:
    diary, drawn, stop = Diary(tmp_path, most_bytes=2000), Drawn(), threading.Event()
    waits: list[float] = []

    def wait(period_s: float) -> bool:
        waits.append(period_s)
        diary.progress(8)
        if len(waits) == 6:
            stop.set()
        return stop.is_set()

    carried(drawn, follows=True, stop=SimpleNamespace(is_set=stop.is_set, wait=wait))
    diary.close()
    carried(drawn)
    assert drawn.steps() == list(range(48)) and len(waits) == 6


def test_what_is_written_just_before_a_renaming_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    diary, path = Diary(tmp_path), tmp_path / "events.jsonl"
    diary.progress(2)
    reader = EventReader(path)
    assert len(reader.events(2)) == 2
    real = os.fstat
    once: list[int] = []

    def between(descriptor: int) -> os.stat_result:
        if not once:  # we have read to the end, and do not know yet that it is the end
            once.append(descriptor)
            diary.progress(1)
            diary.close()
            path.replace(path.with_name("events.jsonl.1"))
            diary.progress(1)
        return real(descriptor)

    monkeypatch.setattr(event_reader, "os", SimpleNamespace(fstat=between, pread=os.pread))
    assert [event["inner_step"] for event in reader.events(9)] == [2, 3]


def test_lines_that_are_torn_or_too_long_or_nonsense_are_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_reader, "CHUNK_BYTES", 16)
    monkeypatch.setattr(event_reader, "MAX_LINE_BYTES", 64)
    path, line = tmp_path / "events.jsonl", b'{"t":1,"kind":"progress","inner_step":%d}\n'
    path.write_bytes(
        line % 0 + b'[1]\nnot json\n{"kind":7}\n' + b"x" * 500 + b"\n" + line % 1 + (line % 2)[:9]
    )
    reader = EventReader(path)
    assert [event["inner_step"] for event in reader.events(99)] == [0, 1] and reader.skipped == 4
    place = reader.place()
    assert place.offset == path.stat().st_size - 9, "a line without an end is left for later"
    path.write_bytes(path.read_bytes() + (line % 2)[9:])
    assert [event["inner_step"] for event in reader.events(99)] == [2]
    assert [event["inner_step"] for event in EventReader(path, place).events(99)] == [2]
    path.write_bytes(b"")
    assert reader.events(9) == []
    path.write_bytes(line % 3)
    assert [event["inner_step"] for event in reader.events(9)] == [3], "emptied by somebody"


def test_what_charts_do_not_take_is_a_sentence_and_is_not_drawn_again(
    tmp_path: Path, carried: Callable[..., list[str]]
) -> None:
    diary, drawn = Diary(tmp_path), Drawn(fails_at=2)
    diary.progress(2)
    with pytest.raises(UserError, match=r"does not take points: no network$"):
        carried(drawn)
    diary.progress(1)
    drawn = Drawn()
    carried(drawn)
    assert drawn.steps() == [2]


def test_two_at_once_would_draw_twice(tmp_path: Path, carried: Callable[..., list[str]]) -> None:
    where = ChartPlace(tmp_path / "out", "p", "node")
    first = PlaceFile(tmp_path, "tensorboard", where)
    with pytest.raises(UserError, match="another process carries"):
        carried(Drawn())
    other = PlaceFile(tmp_path, "tensorboard", ChartPlace(tmp_path / "out", "p", "another"))
    other.close()
    first.close()
    carried(Drawn())


def test_points_count_on_and_stand_where_the_run_is() -> None:
    points = Points()
    events = [
        {"kind": "election", "t": 1.0},
        {
            "kind": "progress",
            "run_tokens": 50,
            "loss": None,
            "tokens_per_s": float("inf"),
            "inner_step": True,
        },
        {"kind": "election", "t": 2.0},
        {"kind": "publish", "number": 3},
        {"kind": "apply", "number": 2},
        {"kind": "contribution", "reason": "refused: stale", "syncer": "x", "stamp": 1},
        {"kind": "contribution", "reason": "another", "stamp": 1},
        {"kind": "evaluation", "loss": 2.5, "metrics": {"accuracy": 0.5, "bad": "x"}},
        {"kind": "progress", "run_tokens": -1, "loss": 2.0},
    ]
    made = [points.of({"t": 0.0, **event}) for event in events]
    assert [point and (point.tokens, point.values) for point in made] == [
        (0, {"run/elections": 1}),
        None,
        (50, {"run/elections": 2}),
        (50, {"run/newest_version": 3}),
        None,
        (50, {"node/refused": 1}),
        None,
        (50, {"eval/accuracy": 0.5, "eval/loss": 2.5}),
        (50, {"train/loss": 2.0}),
    ]
    assert Points(points.tally).of({"kind": "election", "t": 3.0}) == Point(50, 3.0, {"run/elections": 3})


def test_what_wandb_and_trackio_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[Any, ...]] = []

    def run(name: str) -> SimpleNamespace:
        return SimpleNamespace(
            log=lambda values, **more: calls.append((name, values, more)),
            finish=lambda: calls.append((name, "finish")),
            define_metric=lambda metric, **more: calls.append((name, metric, more)),
        )

    def init(name: str) -> Callable[..., SimpleNamespace]:
        return lambda **more: (calls.append((name, "init", more)), run(name))[1]

    settings = SimpleNamespace
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init("wandb"), Settings=settings))
    monkeypatch.setitem(sys.modules, "trackio", SimpleNamespace(init=init("trackio")))
    where = ChartPlace(tmp_path / "out", "p", "node", "ab12")
    for kind in (Wandb, Trackio):
        opened = kind(where)
        opened.write([Point(7, 1.5, {"train/loss": 2.0})])
        opened.close()
    told = {name: [call[1:] for call in calls if call[0] == name] for name in ("wandb", "trackio")}
    begun = told["wandb"][0][1]
    assert (begun["id"], begun["resume"], begun["project"], begun["name"]) == ("ab12", "allow", "p", "node")
    assert told["wandb"][1:] == [
        ("tokens", {"hidden": True}),
        ("*", {"step_metric": "tokens"}),
        ({"train/loss": 2.0, "tokens": 7, "_timestamp": 1.5}, {}),
        ("finish",),
    ]
    begun = told["trackio"][0][1]
    assert (begun["project"], begun["name"], begun["resume"]) == ("p", "node", "allow")
    assert told["trackio"][1:] == [({"train/loss": 2.0}, {"step": 7}), ("finish",)]


def test_what_is_missing_or_does_not_open_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = ChartPlace(tmp_path / "out", "p", "node")
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(UserError, match=f"{name} is not installed here") as told:
            open_charts(name, where)  # type: ignore[arg-type]
        assert f".[{name}]" in told.value.hint

    def locked_out(_where: ChartPlace) -> Any:
        raise RuntimeError("api_key not configured")

    monkeypatch.setitem(charts.KINDS, "wandb", locked_out)
    with pytest.raises(UserError, match="does not open a run: api_key") as told:
        open_charts("wandb", where)
    assert "offline" in told.value.hint
    assert cli_main.run(["log-to", "wandb", "--data-dir", str(tmp_path / "none")]) == 2


def test_tensorboard_reads_what_was_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    diary = Diary(tmp_path)
    for number in (3, 2):
        diary.progress(number)
        assert cli_main.run(["log-to", "tensorboard", "--data-dir", str(tmp_path), "--name", "one"]) == 0
        assert f"{number} points of {number} events" in capsys.readouterr().err
    found = [
        (event.step, value.tag, round(value.tensor.float_val[0] if value.tensor.float_val else 0.0, 3))
        for file in sorted((tmp_path / "tensorboard" / "one").iterdir())
        for event in EventFileLoader(str(file)).Load()
        for value in event.summary.value
    ]
    assert [step for step, tag, _ in found if tag == "train/loss"] == [0, 100, 200, 300, 400]
    assert {value for _, tag, value in found if tag == "train/loss"} == {3.0}


# `p2pdiloco simulate` and `chaos` are the lab's: found by entry point, and missed in one sentence.

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
