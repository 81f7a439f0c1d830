from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO, TextIOWrapper
from pathlib import Path

import pytest
from view_kit import HOSTILE, snapshot

from p2pdiloco.cli.group import run
from p2pdiloco.daemon.display.logs import Outlet, RecentLines, configure_logging, resolve_style
from p2pdiloco.daemon.display.snapshot import MAX_RECENT_LINES
from p2pdiloco.daemon.display.terminal import log_fields


@pytest.fixture(autouse=True)
def loggers_as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("p2pdiloco")
    before = (root.handlers[:], root.level, ours.level)
    yield
    root.handlers[:] = before[0]
    root.setLevel(before[1])
    ours.setLevel(before[2])


def test_json_logs_are_one_object_a_line() -> None:
    stream = StringIO()
    configure_logging("json", stream=stream)
    logger = logging.getLogger("p2pdiloco.daemon")
    logger.info(
        "hello %s", HOSTILE, extra={"fields": {"fragment": 3, "path": Path("x"), "loss": float("nan")}}
    )
    try:
        raise ValueError("two\nlines")
    except ValueError:
        logger.exception("failed")
    logger.debug("not shown")
    logging.getLogger("library").info("not shown")
    logging.getLogger("library").warning("shown")
    logger.info("%(peers)d of %(name)s", {"peers": 3, "name": "x"}, extra={"event": "peers"})
    first, second, third, fourth = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == f"hello {HOSTILE}" and first["level"] == "info"
    assert first["logger"] == "p2pdiloco.daemon" and first["time"].endswith("+00:00")
    assert first["fields"] == {"fragment": 3, "path": "x", "loss": None}
    assert second["level"] == "error" and "ValueError: two\nlines" in second["exception"]
    assert third["logger"] == "library" and third["fields"] == {} and third["event"] == ""
    assert fourth["fields"] == {"peers": 3, "name": "x"} and fourth["message"] == "3 of x"
    assert fourth["event"] == "peers"


def test_levels_keep_their_names_whatever_libraries_call_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "_levelToName", {**logging._levelToName, logging.WARNING: "WARN"})
    stream = StringIO()
    configure_logging("text", stream=stream)
    logging.getLogger("p2pdiloco").warning("odd")
    assert stream.getvalue()[8:] == " warning  odd\n"


PROGRAM = """
import sys, threading, warnings
from p2pdiloco.daemon.display.logs import configure_logging
configure_logging("json")
warnings.warn("odd")
def fail(): raise ValueError("in a thread")
thread = threading.Thread(target=fail); thread.start(); thread.join()
raise ValueError("uncaught")
"""


@pytest.mark.process
def test_nothing_but_json_is_on_the_stream_of_json_logs() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    said = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["message"].split(": ")[-1].strip() for line in said][1:] == ["in a thread", "uncaught"]
    assert "odd" in said[0]["message"] and done.returncode == 1 and not done.stdout
    assert all("ValueError" in line["exception"] for line in said[1:])


NAMED = """
from p2pdiloco.adapters import dns
from p2pdiloco.config.settings import BootstrapSettings
from p2pdiloco.daemon.program import peers_to_join
dns.txt_records = lambda *_: []
assert not peers_to_join(BootstrapSettings(log="json", join=("/dnsaddr/no.example",)), may_fail=True)
"""


@pytest.mark.process
def test_what_is_said_before_there_is_an_event_loop_is_json_too() -> None:
    done = subprocess.run([sys.executable, "-c", NAMED], capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert "no peers found behind the name no.example" in json.loads(line)["message"] and done.returncode == 0


def test_what_a_json_log_lost_is_said_in_json() -> None:
    ours, its = os.pipe()
    with os.fdopen(ours) as reader:
        configure_logging("json", stream=TextIOWrapper(Outlet(its, 512), line_buffering=True))  # type: ignore[type-var]
        logging.getLogger("p2pdiloco").info("x" * 512)
        logging.getLogger("p2pdiloco").info("next")
        lost, following = json.loads(reader.readline()), json.loads(reader.readline())
    os.close(its)
    assert (lost["event"], lost["level"], lost["fields"]) == ("lost", "warning", {"lines": 1})
    assert following["message"] == "next"


@pytest.mark.parametrize("ask", [["--log", "json"], ["--log=json"], [], ["--config", "node.toml"]])
def test_the_last_sentence_of_json_logs_is_json_too(
    ask: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("node.toml").write_text('[node]\nlog = "json"\n')
    if not ask:
        monkeypatch.setenv("P2PDILOCO_LOG", "json")
    for wrong in (["--join", "nowhere"], *([["--joint"]] if "--config" not in ask else [])):
        assert run(["node", *ask, *wrong]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        said = json.loads(line)
        assert said["event"] == "error" and wrong[0] in said["message"] and said["fields"]["hint"]
    assert run(["node", "--log", "text", "--join", "nowhere"]) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_the_progress_line_has_its_figures_in_fields_with_names_that_are_documented() -> None:
    fields = log_fields(snapshot())
    assert fields["inner_step"] == snapshot().me.inner_step and fields["peers"] == len(snapshot().peers)
    documented = (Path(__file__).parents[3] / "docs" / "reference" / "events.md").read_text()
    table = documented.partition("## The log")[2]
    assert [name for name in fields if f"`{name}`" not in table] == []


def test_text_logs_have_level_and_no_control_characters() -> None:
    stream = StringIO()
    configure_logging("text", stream=stream)
    logging.getLogger("p2pdiloco").info("fine %(peer)s", {"peer": HOSTILE})
    logging.getLogger("p2pdiloco").warning("odd")
    info, warning = stream.getvalue().splitlines()
    assert info[8:].startswith(" fine ·[2J") and "\x1b" not in info
    assert warning[8:] == " warning  odd"


def test_the_view_gets_the_newest_lines_and_the_terminal_none(capsys: pytest.CaptureFixture[str]) -> None:
    recent = RecentLines()
    configure_logging("tui", recent=recent)
    for number in range(30):
        logging.getLogger("p2pdiloco").info("line %d %s", number, "x" * 500)
    assert len(recent.lines()) == MAX_RECENT_LINES
    assert recent.lines()[-1].startswith("line 29 ") and len(recent.lines()[-1]) == 240
    assert capsys.readouterr() == ("", "")


def test_auto_is_the_view_only_on_a_terminal() -> None:
    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    assert resolve_style("auto", StringIO()) == "text"
    assert resolve_style("auto", Terminal()) == "tui"
    assert resolve_style("json", Terminal()) == "json"
