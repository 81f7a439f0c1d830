"""Letter box of the core: made before everything that has something to tell the core."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from p2pdiloco.core.api.events import Event


class Post:
    """Events for the core, in the order in which they came. Used on the event loop only."""

    def __init__(self) -> None:
        self._waiting: deque[Event] = deque()
        self._empty: Callable[[], None] | None = None

    def put(self, event: Event) -> None:
        """Take an event in. It is handled before this returns, or right after the one that is being handled.

        An event that comes before there is anybody to handle it waits.
        """
        self._waiting.append(event)
        if self._empty is not None:
            self._empty()

    def take(self) -> Event | None:
        """Take out the event that has waited longest; None: there is none."""
        return self._waiting.popleft() if self._waiting else None

    def emptied_by(self, empty: Callable[[], None]) -> None:
        """Let `empty` handle what comes from now on."""
        self._empty = empty
