"""Work that lasts: a bar on a terminal, elsewhere a line now and then, nothing for what is done at once."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from p2pdiloco.errors import clean

SAY_AFTER_S = 2.0
"""Time after which work is worth a word."""
LINE_EVERY_S, TICK_S = 10.0, 0.25
Tell = Callable[[float, float], None]
"""Function that is told how much is done, and of how much; of 0: nobody knows."""


@contextlib.contextmanager
def lasting(
    what: str, stream: TextIO | None = None, now: Callable[[], float] = time.monotonic
) -> Iterator[Tell]:
    """Show on stderr how far some work is, while the block runs. `what`: its words, as "copying a state"."""
    shown = Lasting(clean(what), stream or sys.stderr, now)
    try:
        yield shown.tell
    finally:
        shown.end()


@contextlib.contextmanager
def waiting(what: str, stream: TextIO | None = None) -> Iterator[None]:
    """Show that some work goes on which does not say how far it is, while the block runs."""
    stop = threading.Event()
    with lasting(what, stream) as tell:

        def tick() -> None:
            while not stop.wait(TICK_S):
                tell(0, 0)

        thread = threading.Thread(target=tick, name="waiting", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()


class Lasting:
    """Display of one piece of work."""

    def __init__(self, what: str, stream: TextIO, now: Callable[[], float]) -> None:
        self._what, self._stream, self._now = what, stream, now
        self._began_s = self._told_s = now()
        self._console = Console(file=stream)
        self._progress: Progress | None = None

    def tell(self, done: float, total: float) -> None:
        """Show how much is done, of how much (0: nobody knows)."""
        if self._now() - self._began_s < SAY_AFTER_S:
            return
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._draw(done, total)
        elif self._progress is None and self._is_due():
            share = (
                f": {min(1.0, done / total):.0%}"
                if total > 0
                else f" for {self._now() - self._began_s:.0f} s"
            )
            self._stream.write(f"{self._what}{share}\n")
            self._stream.flush()

    def end(self) -> None:
        """Leave the terminal as it was; the bar is gone."""
        if self._progress is not None:
            self._progress.stop()

    def _is_due(self) -> bool:
        """Tell whether it is time for a line: at first at once, then now and then."""
        now, first = self._now(), self._told_s == self._began_s
        if not first and now - self._told_s < LINE_EVERY_S:
            return False
        self._told_s = now
        return True

    def _draw(self, done: float, total: float) -> None:
        if self._progress is None:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(),
            )
            self._progress = Progress(*columns, console=self._console, transient=True, redirect_stdout=False)
            self._progress.add_task(self._what, total=total or None)
            self._progress.start()
        self._progress.update(self._progress.task_ids[0], completed=done, total=total or None)
