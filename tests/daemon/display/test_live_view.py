from __future__ import annotations

import contextlib
import errno
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from io import StringIO, TextIOWrapper
from pathlib import Path
from unittest import mock

import pytest
from msgspec.structs import replace
from rich.console import Console
from view_kit import printed, snapshot

from p2pdiloco.daemon.bulk.states import StateCopy
from p2pdiloco.daemon.display import logs as module
from p2pdiloco.daemon.display import logs as outlet_module
from p2pdiloco.daemon.display import terminal as live_module
from p2pdiloco.daemon.display.logs import Outlet, lasting, waiting, words_of_loss
from p2pdiloco.daemon.display.snapshot import NodeSnapshot, copied_text
from p2pdiloco.daemon.display.terminal import Keys, LiveView, log_fields, log_line, render
from p2pdiloco.daemon.program import HURRIED

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


# Keys of a terminal, read in a process whose terminal it is.


PROGRAM = """
import select, sys, termios
from p2pdiloco.daemon.display.terminal import Keys
before = termios.tcgetattr(0)
keys = Keys()
keys.start()
print("ready", flush=True)
found = ""
while "q" not in found:
    select.select([0], [], [], 0.05)
    found += keys.pressed()
    if "x" in found and "shell" not in found:  # Ctrl-Z and fg: the shell has put its own modes back
        found += " shell "
        termios.tcsetattr(0, termios.TCSANOW, before)
        print("shell", flush=True)
keys.stop()
keys.stop()
assert keys.pressed() == ""
print("found", found, termios.tcgetattr(0) == before, flush=True)
"""

LEAVING = """
import asyncio, fcntl, signal, sys, termios
from types import SimpleNamespace
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.daemon import start as node
from p2pdiloco.daemon.display.logs import RecentLines
from p2pdiloco.daemon.program import run_program
sys.path.insert(0, sys.argv[1])
from view_kit import snapshot

async def body(stop):
    signal.alarm(60)  # it outlives no test that was killed
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    member = SimpleNamespace(report=SimpleNamespace(snapshot=lambda now: snapshot()))
    showing = asyncio.create_task(node._show(member, NodeSettings(log="tui"), RecentLines()))
    await stop.wait()
    print("leaving", flush=True)
    await showing

sys.exit(run_program(body, "text"))
"""


def said_until(read: Callable[[], bytes], word: bytes) -> bytes:
    said = b""
    while word not in said:
        said += read()
    return said


@pytest.mark.process
def test_keys_come_at_once_without_an_echo_and_the_terminal_is_given_back() -> None:
    child, terminal = pty.fork()
    if child == 0:  # the terminal is its own
        os.execv(sys.executable, [sys.executable, "-c", PROGRAM])
    try:
        said_until(lambda: os.read(terminal, 1024), b"ready")
        os.write(terminal, b"x?")
        said = said_until(lambda: os.read(terminal, 1024), b"shell")
        assert b"x?" not in said, "no echo"
        os.write(terminal, b"q")
        said = said_until(lambda: os.read(terminal, 1024), b"True")
        assert b"found x? shell q True" in said
    finally:
        os.close(terminal)
        os.waitpid(child, 0)


@pytest.mark.process
def test_q_leaves_and_once_more_at_once_and_the_terminal_is_given_back() -> None:
    ours, its = os.openpty()
    before = termios.tcgetattr(ours)
    command = [sys.executable, "-c", LEAVING, str(Path(__file__).parent)]
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, start_new_session=True)
    os.close(its)
    try:
        said_until(lambda: os.read(ours, 1024), b"tokens/s")
        os.write(ours, b"?")
        said_until(lambda: os.read(ours, 1024), b"leave in good order")
        os.write(ours, b"q")
        said_until(lambda: os.read(ours, 1024), b"leaving")
        os.write(ours, b"q")
        assert HIDE_CURSOR.encode() not in said_until(lambda: os.read(ours, 1024), SHOW_CURSOR.encode())
        assert process.wait(60) == HURRIED
        assert termios.tcgetattr(ours) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_there_are_no_keys_where_there_is_no_terminal_of_ours() -> None:
    reading, writing = os.pipe()
    other, terminal = pty.openpty()  # somebody else's
    try:
        os.write(writing, b"q")
        os.write(other, b"q\n")
        for descriptor in (reading, terminal, -1):
            keys = Keys(descriptor)
            keys.start()
            assert keys.pressed() == ""
            keys.stop()
    finally:
        for descriptor in (reading, writing, other, terminal):
            os.close(descriptor)


# Work that lasts: a bar on a terminal, a line now and then elsewhere, nothing for what is done at once.


class LastingTerminal(StringIO):
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
    now, out = 0.0, LastingTerminal()
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


# Outlets: a reader that stops, comes back, or is gone; the disk that is full.

LINE = b"x" * 63 + b"\n"
IDLE_S = 0.05


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ours, its = os.pipe()
    yield ours, its
    os.close(ours)
    os.close(its)


def fill(descriptor: int) -> int:
    """Write as much as the pipe holds."""
    written = 0
    os.set_blocking(descriptor, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            written += os.write(descriptor, b"f")
    os.set_blocking(descriptor, True)
    return written


def read(descriptor: int, end: bytes) -> bytes:
    """Read up to this end."""
    said = b""
    while not said.endswith(end):
        said += os.read(descriptor, 1 << 16)
    return said


def test_what_does_not_fit_is_counted_and_said_where_it_is_missing(pipe: tuple[int, int]) -> None:
    ours, its = pipe
    full = fill(its)
    outlet = Outlet(its, most_bytes=4096)
    for _ in range(5000):
        outlet.write(LINE)
    assert outlet.is_behind and not outlet.drain(IDLE_S, at_most_s=1e6)
    said = read(ours, b"nobody read them\n")
    assert outlet.drain() and not outlet.is_behind
    came = 4096 // len(LINE)
    assert said == b"f" * full + LINE * came + f"{words_of_loss(5000 - came)}\n".encode()
    outlet.write(b"and on\n")
    assert read(ours, b"on\n") == b"and on\n"


def test_a_loss_is_said_before_what_is_written_next(pipe: tuple[int, int]) -> None:
    ours, its = pipe
    outlet = Outlet(its, most_bytes=2 * len(LINE))
    outlet.word_losses(lambda lines: f"<{lines}>")
    too_long = b"a\nb\nc" * len(LINE) + b"\n"
    outlet.write(too_long)
    outlet.write(b"next\n")
    assert read(ours, b"next\n") == f"<{too_long.count(10)}>\nnext\n".encode()


def test_a_terminal_that_is_stopped_holds_nobody() -> None:
    ours, its = pty.openpty()
    try:
        termios.tcflow(its, termios.TCOOFF)  # as Ctrl-S does
        outlet = Outlet(its)
        outlet.write(b"shown later\n")
        assert outlet.isatty() and not outlet.drain(IDLE_S)
        termios.tcflow(its, termios.TCOON)
        assert outlet.drain(10) and read(ours, b"\r\n") == b"shown later\r\n"
    finally:
        os.close(ours)
        os.close(its)


def test_a_descriptor_that_somebody_made_non_blocking_is_waited_for(pipe: tuple[int, int]) -> None:
    ours, its = pipe
    os.set_blocking(its, False)
    outlet = Outlet(its)
    outlet.write(LINE * 4096)
    outlet.write(b"end\n")
    assert len(read(ours, b"end\n")) == 4096 * len(LINE) + 4


def test_what_cannot_be_written_is_counted_too(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, its = pipe
    outlet, write, full = Outlet(its), os.write, [True]

    def on_full_disk(descriptor: int, content: memoryview) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, "full")
        return write(descriptor, content)

    monkeypatch.setattr(outlet_module.os, "write", on_full_disk)
    outlet.write(b"lost\n")
    outlet.write(b"lost, too\n")
    assert outlet.drain()
    full[0] = False
    outlet.write(b"kept\n")
    assert read(ours, b"kept\n") == f"{words_of_loss(2)}\nkept\n".encode()
