"""Outlets: what a daemon says goes through a bounded queue to a thread that may be left behind.

Whoever reads a terminal, pipe or log collector may stop for as long as it likes (Ctrl-S, a paused pager, a
full disk), and the daemon must not wait for it. What does not fit is dropped, counted, and the number is said
as soon as somebody reads again.
"""

from __future__ import annotations

import atexit
import io
import os
import select
import sys
import threading
from collections import deque
from collections.abc import Callable
from typing import IO, Any, TextIO

from msgspec import Struct

MAX_WAITING_BYTES = 1 << 20
IDLE_S, AT_MOST_S = 1.0, 5.0
"""Seconds that an end waits for a reader that takes nothing, and for one that goes on reading."""


class _Piece(Struct, frozen=True):
    """Content written at once, and how many lines would be lost with it."""

    content: bytes
    lines: int


def words_of_loss(lines: int) -> str:
    """Word how much was dropped, for a stream that is no log."""
    return f"{lines} lines were dropped here: nobody read them"


class Outlet(io.RawIOBase):
    """Outlet to one descriptor. Writing to it never waits and never fails; it takes all or nothing."""

    def __init__(self, descriptor: int, most_bytes: int = MAX_WAITING_BYTES) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._most_bytes = most_bytes
        self._words: Callable[[int], str] = words_of_loss
        self._changed = threading.Condition()
        self._waiting: deque[_Piece] = deque()
        self._waiting_bytes = 0
        self._taken_bytes = 0
        self._lost_lines = 0
        self._is_full = False
        self._thread: threading.Thread | None = None

    @property
    def is_behind(self) -> bool:
        """True: something that was written has not been taken yet."""
        return bool(self._waiting)

    def word_losses(self, words: Callable[[int], str]) -> None:
        """Say with these words, which make one line, how many lines were dropped."""
        self._words = words

    def write(self, data: Any, /) -> int:
        content = bytes(data)
        with self._changed:
            if self._is_full and self._waiting_bytes > self._most_bytes // 2:
                self._lost_lines += _lines(content)
                return len(content)
            self._say_losses()
            if self._waiting_bytes + len(content) > self._most_bytes:
                self._is_full = True
                self._lost_lines += _lines(content)
            else:
                self._put(_Piece(content, _lines(content)))
        return len(content)

    def drain(self, idle_s: float = IDLE_S, at_most_s: float = AT_MOST_S) -> bool:
        """Wait until all is written, or the reader has taken nothing for `idle_s`. False: some is left."""
        with self._changed:
            for _ in range(max(1, round(at_most_s / idle_s))):
                before = self._taken_bytes
                if self._changed.wait_for(lambda: not self._waiting and not self._is_full, idle_s):
                    return True
                if self._taken_bytes == before:
                    break
        return False

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def _put(self, piece: _Piece) -> None:
        self._waiting.append(piece)
        self._waiting_bytes += len(piece.content)
        self._changed.notify_all()
        if self._thread is None:
            self._thread = threading.Thread(target=self._carry, name="outlet", daemon=True)
            self._thread.start()

    def _say_losses(self) -> None:
        """Say how much is missing at just this place, if anything is."""
        lost, self._lost_lines, self._is_full = self._lost_lines, 0, False
        if lost:
            self._put(_Piece(f"{self._words(lost)}\n".encode(errors="backslashreplace"), lost))

    def _carry(self) -> None:
        while True:
            with self._changed:
                if self._is_full and not self._waiting:  # the reader is back, and we have nothing more to say
                    self._say_losses()
                self._changed.wait_for(lambda: self._waiting)
                piece = self._waiting[0]
            is_written = self._written(piece.content)
            with self._changed:
                self._waiting.popleft()
                self._waiting_bytes -= len(piece.content)
                self._lost_lines += 0 if is_written else piece.lines
                self._changed.notify_all()

    def _written(self, content: bytes) -> bool:
        """Write, and wait for the reader as long as it takes. False: it cannot be written (a closed pipe or
        terminal, a full disk), which is said before the next that can."""
        rest = memoryview(content)
        while rest:
            try:
                taken = os.write(self._descriptor, rest)
            except BlockingIOError:  # somebody else made the terminal so
                ready = select.poll()
                ready.register(self._descriptor, select.POLLOUT)
                ready.poll()
                continue
            except OSError:
                return False
            self._taken_bytes += taken
            rest = rest[taken:]
        return True


def _lines(content: bytes) -> int:
    return max(1, content.count(b"\n"))


_outlets: list[Outlet] = []
"""Outlets of this process's standard streams."""
_before_end: list[Callable[[], None]] = []
"""Calls that are made before this process ends."""


def install() -> None:
    """Let all that this process writes to stdout and stderr go through outlets from now on, to its end."""
    sys.stdout, sys.stderr = _through_outlet(sys.stdout), _through_outlet(sys.stderr)


def drain() -> None:
    """Wait for what was said to be written, with bounds. For an end, orderly or not."""
    for outlet in _outlets:
        outlet.drain()


def before_end(work: Callable[[], None]) -> None:
    """Remember what is done before this process ends, in order or at once: the newest first."""
    atexit.register(work)
    _before_end.append(work)


def not_before_end(work: Callable[[], None]) -> None:
    """Take back `before_end`. Idempotent."""
    atexit.unregister(work)
    _before_end[:] = [other for other in _before_end if other != work]


def end_at_once(status: int) -> None:
    """End this process without looking back, but for what it said, and the terminal that it changed."""
    for work in reversed(_before_end.copy()):
        work()
    os._exit(status)


def outlet_of(stream: IO[str]) -> Outlet | None:
    """Find the outlet behind a stream."""
    raw = getattr(stream, "buffer", None)
    return raw if isinstance(raw, Outlet) else None


def _through_outlet(stream: TextIO) -> TextIO:
    if not isinstance(stream, io.TextIOWrapper) or outlet_of(stream) is not None:
        return stream
    stream.flush()
    outlet = Outlet(stream.fileno())
    if not _outlets:
        before_end(drain)
    _outlets.append(outlet)
    return io.TextIOWrapper(
        outlet,  # type: ignore[type-var]  # it takes all that it is given, as a buffer does
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=True,
    )
