"""Work that lasts: a bar on a terminal, a line now and then elsewhere, nothing for what is done at once."""

from __future__ import annotations

import threading
from io import StringIO
from unittest import mock

from msgspec.structs import replace
from view_kit import printed, snapshot

from p2pdiloco.daemon.bulk.states import StateCopy
from p2pdiloco.daemon.display import logs as module
from p2pdiloco.daemon.display.logs import lasting, waiting
from p2pdiloco.daemon.display.snapshot import copied_text
from p2pdiloco.daemon.display.terminal import log_fields, log_line, render


class Terminal(StringIO):
    """A terminal, as far as rich asks."""

    def isatty(self) -> bool:
        return True


def test_lines_come_now_and_then_and_none_for_what_is_done_at_once() -> None:
    now, out = 0.0, StringIO()
    with lasting("copying\x1b[2J", out, lambda: now) as tell:
        for second in range(26):
            now = float(second)
            tell(second, 50)
    assert out.getvalue().splitlines() == [f"copying·[2J: {share}%" for share in (4, 24, 44)]
    out = StringIO()
    with lasting("short", out, lambda: 1.0) as tell:
        tell(1, 2)
    assert not out.getvalue()


def test_a_terminal_has_a_bar_that_is_gone_at_the_end() -> None:
    now, out = 0.0, Terminal()
    with mock.patch.dict("os.environ", {"TERM": "xterm"}), lasting("copying", out, lambda: now) as tell:
        tell(0, 50)
        assert not out.getvalue()
        now = 3.0
        tell(20, 50)
        tell(25, 50)
    text = out.getvalue()
    assert "copying" in text and "%" in text and text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1


def test_work_that_does_not_say_how_far_it_is() -> None:
    told = threading.Event()

    class Out(StringIO):
        def write(self, text: str) -> int:
            told.set()
            return super().write(text)

    out = Out()
    soon = mock.patch.object(module, "SAY_AFTER_S", 0.0), mock.patch.object(module, "TICK_S", 0.001)
    with soon[0], soon[1], waiting("reading the data", out):
        assert told.wait(10)
    assert out.getvalue().startswith("reading the data for ")
    assert not any(thread.name == "waiting" for thread in threading.enumerate())


def test_what_is_here_of_a_state_is_counted_while_it_is_copied() -> None:
    copy = StateCopy(40 << 20, mock.Mock())
    assert copy.here_bytes == 0
    part = copy.take()
    assert part is not None and copy.here_bytes == 0
    part.came(1 << 20)
    assert copy.here_bytes == 1 << 20
    copy.done(part)
    assert copy.here_bytes == 1 << 20


def test_a_node_shows_how_much_of_the_state_is_here() -> None:
    assert copied_text(None) == "" and copied_text(0.379) == "state 37 %"
    copying = replace(snapshot(), state="catching up", copied_share=0.379)
    assert "state 37 %" in "\n".join(printed(render(copying), 80, 24))
    assert "state 37 %" in log_line(copying) and log_fields(copying)["copied_share"] == 0.379
    assert "state 37" not in log_line(snapshot())
