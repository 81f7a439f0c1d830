"""Outlets: a reader that stops, comes back, or is gone; the disk that is full."""

from __future__ import annotations

import contextlib
import errno
import os
import pty
import termios
from collections.abc import Iterator

import pytest

from p2pdiloco.daemon.display import logs as outlet_module
from p2pdiloco.daemon.display.logs import Outlet, words_of_loss

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
