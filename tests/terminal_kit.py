"""A command at a pseudo-terminal, as a person sees it."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence
from typing import Self

from deadlines import Deadline, within_s

PATIENCE_S = 60.0
AGAIN_S = 1.0
CTRL_C = b"\x03"


class Terminal:
    """A program in the foreground of a terminal of its own, until the block that it is for is left."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        self._ours, theirs = pty.openpty()
        self.shown = ""
        self._read_to = 0
        self._process = subprocess.Popen(
            [sys.executable, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "TERM": "dumb", **(environment or {})},
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(theirs)

    def expect(self, text: str) -> str:
        """Wait until this is shown, after what was waited for before. Returns all between the two."""
        until = time.monotonic() + within_s(PATIENCE_S)
        while (at := self.shown.find(text, self._read_to)) < 0:
            assert self._read(until), f"{text!r} was not shown:\n{self.shown}"
        between = self.shown[self._read_to : at]
        self._read_to = at + len(text)
        return between

    def type(self, line: str) -> None:
        os.write(self._ours, line.encode() + b"\n")

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def end(self, pressing: bytes = b"") -> int:
        """Wait for the end, and return the exit status. `pressing`: keys that are pressed
        whenever nothing happens."""
        deadline = Deadline(PATIENCE_S)
        while (status := self._process.poll()) is None:
            assert not deadline.over(), f"no end within {deadline}:\n{self.shown}"
            again = time.monotonic() + AGAIN_S
            if not self._read(again) and time.monotonic() > again:
                self.press(pressing)
        while self._read(time.monotonic()):
            pass
        os.close(self._ours)
        return status

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _read(self, until: float) -> bool:
        """False: the program has ended, or the time is over."""
        ready, _, _ = select.select([self._ours], [], [], max(0.0, until - time.monotonic()))
        if not ready:
            return False
        try:
            data = os.read(self._ours, 65536)
        except OSError:  # the other side is closed
            return False
        self.shown += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)
