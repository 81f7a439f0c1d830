"""Live views: server-sent events, made once for all who watch, and not at all while nobody does.

An event has the parts of the page that changed since the last one that its reader took, so whoever reads too
slowly gets fewer of them, and misses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from collections.abc import AsyncIterator, Callable
from functools import partial

from msgspec.structs import replace

from p2pdiloco.web.page import Page, Parts
from p2pdiloco.web.sources import Views
from p2pdiloco.web.view import RunView

PERIOD_S = 2.0
QUIET_S = 5.0
"""Longest time without a word, by which a page knows that the server lives."""
MAX_WATCHERS = 160
"""Number of those who watch as the owner, and of all others."""
FIRST = b"retry: 2000\n\n"
STILL_HERE = b"event: beat\ndata: still here\n\n"
"""An event, as a comment is not seen by scripts."""


class TooManyWatchers(Exception):
    """Error: so many watch already that there is no room for another one."""


class ViewChannel:
    """Channel of one run's views, of the whole view or of its public part."""

    def __init__(self, look: Callable[[], RunView | None], page: Page) -> None:
        """`look`: makes the view; None: there is none (any more)."""
        self._look, self._page = look, page
        self._watchers: set[_Watcher] = set()
        self._task: asyncio.Task[None] | None = None
        self._shown: RunView | None = None
        self._parts = Parts()
        self._number = 0
        """Number of the newest event."""
        self._changed: dict[str, int] = {}
        """Number of the event with which each part changed last."""
        self._events: dict[int, bytes] = {}
        """The newest event, for those that took the one of that number last."""

    @property
    def watchers(self) -> int:
        """Number of those who watch."""
        return len(self._watchers)

    async def watch(self) -> AsyncIterator[bytes]:
        """Yield events, the first at once; ends with the channel."""
        watcher = _Watcher()
        self._watchers.add(watcher)
        try:
            if self._task is None:
                self._renew()
                self._task = asyncio.create_task(self._run())
            watcher.wake()
            yield FIRST
            while (word := await watcher.next()) is not _Signal.CLOSED:
                yield STILL_HERE if word is _Signal.NOTHING else self._event_since(watcher.take(self._number))
        finally:
            self._watchers.discard(watcher)
            if not self._watchers and self._task is not None:
                self._task.cancel()
                self._task = self._shown = None  # the next one is told of now

    def close(self) -> None:
        """Let everybody go."""
        for watcher in self._watchers:
            watcher.close()

    async def _run(self) -> None:
        try:
            while True:
                await asyncio.sleep(PERIOD_S)
                if self._renew():
                    for watcher in self._watchers:
                        watcher.wake()
        finally:  # if the view cannot be made, nobody may take the last one for live
            if self._task is asyncio.current_task():
                self._task = None
                self.close()

    def _renew(self) -> bool:
        """Look again; return whether there is something new."""
        view = self._look()
        if view is None or _same(view, self._shown):
            return False
        self._shown, self._number = view, self._number + 1
        parts = self._page.parts(view)
        self._changed |= dict.fromkeys(parts.since(self._parts), self._number)
        self._parts = parts
        self._events.clear()
        return True

    def _event_since(self, number: int) -> bytes:
        """Make the newest event, for those that took that one last; once for all of them."""
        if self._shown is None:
            return STILL_HERE  # there is no view yet
        if number not in self._events:
            parts = {name: text for name, text in self._parts.html.items() if self._changed[name] > number}
            line = self._page.update(self._shown, parts).replace(b"\n", b" ")
            self._events[number] = b"data: " + line + b"\n\n"
        return self._events[number]


class _Signal(enum.Enum):
    """Words to one who watches."""

    NEW = enum.auto()
    NOTHING = enum.auto()
    CLOSED = enum.auto()


class _Watcher:
    """Place of one who watches: which event it took last, and whether there is a newer one."""

    def __init__(self) -> None:
        self._taken = 0
        self._new = asyncio.Event()
        self._is_closed = False

    def wake(self) -> None:
        """Say that there is a newer event."""
        self._new.set()

    def close(self) -> None:
        """Let it go."""
        self._is_closed = True
        self._new.set()

    def take(self, number: int) -> int:
        """Take the event of that number; return that of the one before."""
        before, self._taken = self._taken, number
        return before

    async def next(self) -> _Signal:
        """Wait for a newer event, as long as may pass without a word."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(QUIET_S):
                await self._new.wait()
        if self._is_closed:
            return _Signal.CLOSED
        word = _Signal.NEW if self._new.is_set() else _Signal.NOTHING
        self._new.clear()
        return word


def _same(view: RunView, shown: RunView | None) -> bool:
    """Tell whether nothing but the time is different."""
    if shown is None or view.public is None or shown.public is None:
        return view == shown
    at_s = shown.public.made_at_s
    return replace(view, public=replace(view.public, made_at_s=at_s)) == shown


class Live:
    """Channels by run and by who may see what."""

    def __init__(self, views: Views, page: Page) -> None:
        self._views, self._page = views, page
        self._channels: dict[tuple[str, bool], ViewChannel] = {}

    def channel(self, run: str, is_owner: bool) -> ViewChannel:
        """Find the channel of a run that is served here. Raises: TooManyWatchers."""
        watching = sum(made.watchers for (_, owners), made in self._channels.items() if owners == is_owner)
        if watching >= MAX_WATCHERS:
            raise TooManyWatchers
        # None is taken away: who has asked for one may not watch it yet. There are as many as known runs.
        look = partial(self._views.view, run, is_owner)
        return self._channels.setdefault((run, is_owner), ViewChannel(look, self._page))

    def close(self) -> None:
        """Let everybody go."""
        for channel in self._channels.values():
            channel.close()
