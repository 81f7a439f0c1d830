from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

import pytest
from view_kit import HOSTILE

from p2pdiloco.daemon.display.logs import RecentLines, configure_logging, resolve_style
from p2pdiloco.daemon.display.snapshot import MAX_RECENT_LINES


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
    first, second, third = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == f"hello {HOSTILE}" and first["level"] == "info"
    assert first["logger"] == "p2pdiloco.daemon" and first["time"].endswith("+00:00")
    assert first["fields"] == {"fragment": 3, "path": "x", "loss": None}
    assert second["level"] == "error" and "ValueError: two\nlines" in second["exception"]
    assert third["logger"] == "library"


def test_levels_keep_their_names_whatever_libraries_call_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging, "_levelToName", {**logging._levelToName, logging.WARNING: "WARN"})
    stream = StringIO()
    configure_logging("text", stream=stream)
    logging.getLogger("p2pdiloco").warning("odd")
    assert stream.getvalue()[8:] == " warning  odd\n"


def test_text_logs_have_level_fields_and_no_control_characters() -> None:
    stream = StringIO()
    configure_logging("text", stream=stream)
    logging.getLogger("p2pdiloco").info("fine", extra={"fields": {"peer": HOSTILE}})
    logging.getLogger("p2pdiloco").warning("odd")
    info, warning = stream.getvalue().splitlines()
    assert info[8:].startswith(" fine  peer=·[2J") and "\x1b" not in info
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
