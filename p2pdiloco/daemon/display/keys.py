"""Keys that a person presses while a view is drawn, read without waiting and without an echo."""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import termios
import tty
from enum import Enum
from typing import Any

from p2pdiloco.daemon.display.outlet import before_end, not_before_end

MOST_BYTES = 64
HELP = "q leaves, ? explains"


class Move(Enum):
    """Keys that move in a list, by what terminals send for them (xterm(1), and vi's letters)."""

    UP = ("\x1b[A", "\x1bOA", "k")
    DOWN = ("\x1b[B", "\x1bOB", "j")
    PAGE_UP = ("\x1b[5~", "\x02")
    PAGE_DOWN = ("\x1b[6~", " ", "\x06")
    HOME = ("\x1b[H", "\x1bOH", "\x1b[1~", "g")
    END = ("\x1b[F", "\x1bOF", "\x1b[4~", "G")

    def moved(self, first: int, page: int, total: int) -> int:
        """Compute the first row that is shown after this key, of so many, a page of which fits."""
        last = max(0, total - page)
        steps = {Move.UP: -1, Move.DOWN: 1, Move.PAGE_UP: -page, Move.PAGE_DOWN: page}
        if self in steps:
            return max(0, min(last, first + steps[self]))
        return last if self is Move.END else 0


_SENT = {sent: move for move in Move for sent in move.value}


def told_apart(pressed: str) -> list[Move | str]:
    """Tell keys apart, of which some send several characters; unknown ones of those are left out."""
    found: list[Move | str] = []
    for sent in re.findall(r"\x1b(?:\[[0-9;]*[ -/]*[@-~]|O.)|[^\x1b]", pressed, re.DOTALL):
        if sent in _SENT:
            found.append(_SENT[sent])
        elif len(sent) == 1:
            found.append(sent)
    return found


class Keys:
    """Keys of the terminal between `start` and `stop`. There are none unless we are in its foreground."""

    def __init__(self, descriptor: int | None = None) -> None:
        """`descriptor`: of the terminal; None: that of stdin."""
        self._descriptor = descriptor
        self._before: list[Any] | None = None

    def start(self) -> None:
        """Have keys at once, not only whole lines; Ctrl-C and Ctrl-Z stay what they are."""
        if self._descriptor is None:
            with contextlib.suppress(OSError, ValueError, AttributeError):  # stdin may be closed
                self._descriptor = sys.stdin.fileno()
        if not self._is_ours():
            return
        with contextlib.suppress(termios.error):
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd)
            before_end(self.stop)

    def pressed(self) -> str:
        """List the keys that were pressed since the last call."""
        if self._before is None or not self._is_ours():
            return ""
        with contextlib.suppress(OSError, termios.error):
            if termios.tcgetattr(self._fd)[3] & termios.ICANON:  # stopped by Ctrl-Z, and back
                tty.setcbreak(self._fd, termios.TCSANOW)
            if select.select([self._fd], [], [], 0)[0]:
                return os.read(self._fd, MOST_BYTES).decode("ascii", "ignore")
        return ""

    def stop(self) -> None:
        """Give the terminal back as it was. Idempotent."""
        not_before_end(self.stop)
        before, self._before = self._before, None
        if before is not None and self._is_ours():
            with contextlib.suppress(termios.error):
                termios.tcsetattr(self._fd, termios.TCSADRAIN, before)

    @property
    def _fd(self) -> int:
        return -1 if self._descriptor is None else self._descriptor

    def _is_ours(self) -> bool:
        """Tell whether reading it, and changing it, does not stop us, as it does in the background."""
        try:
            return os.isatty(self._fd) and os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:
            return False
