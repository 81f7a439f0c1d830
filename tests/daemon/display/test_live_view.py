from __future__ import annotations

import signal
import threading
from io import StringIO, TextIOWrapper
from unittest import mock

import pytest
from rich.console import Console
from view_kit import snapshot

from p2pdiloco.daemon.display import terminal as live_module
from p2pdiloco.daemon.display.logs import Outlet
from p2pdiloco.daemon.display.snapshot import NodeSnapshot
from p2pdiloco.daemon.display.terminal import LiveView

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


class Terminal(StringIO):
    """Tells when a text has been written."""

    def __init__(self) -> None:
        super().__init__()
        self.painted = threading.Event()

    def write(self, text: str) -> int:
        written = super().write(text)
        if "tokens/s" in text:
            self.painted.set()
        return written


def console(terminal: Terminal) -> Console:
    return Console(file=terminal, force_terminal=True, width=80, height=24)


def test_live_view_draws_and_gives_the_terminal_back() -> None:
    terminal = Terminal()
    view = LiveView(console(terminal), period_s=0.001)
    view.start()
    try:
        assert view.drawing
        view.update(snapshot(recent=1))
        assert terminal.painted.wait(10)
    finally:
        view.stop()
    assert not view.drawing
    text = terminal.getvalue()
    assert text.count(HIDE_CURSOR) == text.count(SHOW_CURSOR) == 1
    assert "step 1240" in text and text.index(HIDE_CURSOR) < text.rindex("step 1240") < text.index(
        SHOW_CURSOR
    )
    view.stop()


def test_live_view_shows_the_last_snapshot_even_if_stopped_at_once() -> None:
    terminal = Terminal()
    view = LiveView(console(terminal), period_s=60)
    view.start()
    view.update(snapshot())
    view.stop()
    assert "step 1240" in terminal.getvalue()


def test_a_view_that_fails_gives_the_terminal_back_and_the_node_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(_: NodeSnapshot, explained: bool) -> str:
        raise ZeroDivisionError("broken view")

    ended = threading.Event()
    seen: list[BaseException | None] = []

    def hook(arguments: threading.ExceptHookArgs) -> None:
        seen.append(arguments.exc_value)
        ended.set()

    monkeypatch.setattr(threading, "excepthook", hook)
    terminal = Terminal()
    view = LiveView(console(terminal), draw=broken)
    view.start()
    try:
        view.update(snapshot())
        assert ended.wait(10)
        view.update(snapshot())
    finally:
        view.stop()
    assert isinstance(seen[0], ZeroDivisionError)
    assert terminal.getvalue().count(HIDE_CURSOR) == terminal.getvalue().count(SHOW_CURSOR) == 1


def test_a_terminal_that_is_stopped_gets_no_pictures_but_the_last() -> None:
    asked = threading.Event()

    class Stopped(Outlet):
        @property
        def is_behind(self) -> bool:
            asked.set()
            return True

        def write(self, data: bytes, /) -> int:
            written.append(bytes(data))
            return len(data)

    written: list[bytes] = []
    stream = TextIOWrapper(Stopped(2))  # type: ignore[type-var]
    view = LiveView(Console(file=stream, force_terminal=True, width=80, height=24), period_s=60)
    view.start()
    view.update(snapshot())
    assert asked.wait(10)
    view.stop()
    stream.flush()
    assert b"".join(written).count(b"tokens/s") == 2, "ours, and once more by rich when it ends"


def test_a_shell_has_its_terminal_and_cursor_while_the_node_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal, keys, found = Terminal(), mock.Mock(), list[object]()
    view = LiveView(console(terminal), period_s=0.001)
    view.start()
    view.update(snapshot())
    assert terminal.painted.wait(10)
    monkeypatch.setattr(live_module, "drain", lambda: found.append("drained"))

    def kill(_pid: int, number: int) -> None:
        found.extend([number, terminal.getvalue().count(SHOW_CURSOR), *keys.mock_calls])

    monkeypatch.setattr(live_module.os, "kill", kill)
    live_module.suspend(view, keys)
    assert found == ["drained", signal.SIGSTOP, 1, mock.call.stop()]
    assert view.drawing and keys.mock_calls == [mock.call.stop(), mock.call.start()]
    view.stop()
    assert terminal.getvalue().count(HIDE_CURSOR) == terminal.getvalue().count(SHOW_CURSOR) == 2
