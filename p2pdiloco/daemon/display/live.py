"""Live terminal view: draws the newest snapshot a few times a second, from a thread of its own.

A terminal can stop for as long as a person likes (Ctrl-S, a paused pager). Nothing is drawn meanwhile, as it
would come all at once later.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live

from p2pdiloco.daemon.display.keys import Keys
from p2pdiloco.daemon.display.outlet import before_end, drain, not_before_end, outlet_of
from p2pdiloco.daemon.display.terminal import render

PERIOD_S = 0.25
STOP_TIMEOUT_S = 1.0


class LiveView:
    """Thread that draws snapshots between `start` and `stop`; afterwards the terminal is as it was, whatever
    happened.

    If drawing fails, the thread gives the terminal back and ends with a traceback through
    `threading.excepthook`. `drawing` is False then, `update` does nothing, and the node goes on.
    """

    def __init__(
        self,
        console: Console | None = None,
        period_s: float = PERIOD_S,
        draw: Callable[[Any, bool], RenderableType] = render,
    ) -> None:
        """`draw`: makes the picture of a snapshot, or what its words mean."""
        self._console = console or Console(stderr=True)
        self._period_s = period_s
        self._render = draw
        self._snapshot: Any = None
        self._changed = threading.Event()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._explains = False

    @property
    def drawing(self) -> bool:
        """True: the view is on the terminal."""
        return self._thread is not None and self._thread.is_alive()

    def start(self) -> None:
        """Begin to draw; without effect while drawing."""
        if self.drawing:
            return
        self._stop.clear()
        self._thread = threading.Thread(target=self._draw, name="live-view", daemon=True)
        self._thread.start()
        before_end(self.stop)

    def update(self, snapshot: Any) -> None:
        """Show this snapshot next. Never blocks."""
        self._snapshot = snapshot
        self._changed.set()

    def explain(self) -> None:
        """Show what the words of the view mean, or the view again."""
        self._explains = not self._explains
        self._changed.set()

    def stop(self) -> None:
        """Draw the newest snapshot a last time and leave it on the terminal. Idempotent.

        Waits at most `STOP_TIMEOUT_S`: a terminal must not keep the node from ending.
        """
        not_before_end(self.stop)
        self._stop.set()
        self._changed.set()
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            thread.join(STOP_TIMEOUT_S)

    def _draw(self) -> None:
        # Logging writes to the recent lines meanwhile (daemon.logs), not through this console.
        with Live(console=self._console, auto_refresh=False, redirect_stdout=False) as live:
            while not self._stop.is_set():
                self._changed.wait()
                self._changed.clear()
                if self._snapshot is not None and not self._is_behind():
                    live.update(self._render(self._snapshot, self._explains), refresh=True)
                self._stop.wait(self._period_s)
            if self._snapshot is not None:
                live.update(self._render(self._snapshot, False), refresh=True)

    def _is_behind(self) -> bool:
        """Tell whether the terminal has not taken the last picture yet."""
        outlet = outlet_of(self._console.file)
        return outlet is not None and outlet.is_behind


def suspend(view: LiveView | Live, keys: Keys) -> None:
    """Stop this process, as Ctrl-Z asks for: the shell has its terminal meanwhile, with its cursor."""
    keys.stop()
    view.stop()
    drain()
    os.kill(os.getpid(), signal.SIGSTOP)  # returns at SIGCONT
    view.start()
    keys.start()
