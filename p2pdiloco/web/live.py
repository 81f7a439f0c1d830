"""Live views: server-sent events, made once for all who watch, and not at all while nobody does.

Whoever reads too slowly misses some of them: there is room for the newest one only, and it is whole.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from functools import partial

from msgspec.structs import replace

from p2pdiloco.web.sources import Views
from p2pdiloco.web.view import RunView

PERIOD_S = 2.0
QUIET_S = 5.0
"""Longest time without a word, by which a page knows that the server lives."""
MAX_WATCHERS = 160
FIRST = b"retry: 2000\n\n"
STILL_HERE = b"event: beat\ndata: still here\n\n"
"""An event, as a comment is not seen by scripts."""


class Full(Exception):
    """Error: so many watch already that there is no room for another one."""


class ViewChannel:
    """ViewChannel of one run's views, of the whole view or of its public part."""

    def __init__(self, look: Callable[[], RunView | None], encode: Callable[[RunView], bytes]) -> None:
        """`look`: makes the view; None: there is none (any more)."""
        self._look, self._encode = look, encode
        self._watchers: set[_Watcher] = set()
        self._task: asyncio.Task[None] | None = None
        self._shown: RunView | None = None
        self._event = b""

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
            watcher.put(self._event)
            yield FIRST
            while (event := await watcher.next()) is not None:
                yield event
        finally:
            self._watchers.discard(watcher)
            if not self._watchers and self._task is not None:
                self._task.cancel()
                self._task = self._shown = None  # the next one is told of now

    def close(self) -> None:
        """Let everybody go."""
        for watcher in self._watchers:
            watcher.put(None)

    async def _run(self) -> None:
        try:
            while True:
                await asyncio.sleep(PERIOD_S)
                if self._renew():
                    for watcher in self._watchers:
                        watcher.put(self._event)
        finally:  # if the view cannot be made, nobody may take the last one for live
            if self._task is asyncio.current_task():
                self._task = None
                self.close()

    def _renew(self) -> bool:
        """Look again; return whether there is something new."""
        view = self._look()
        if view is None or _same(view, self._shown):
            return False
        self._shown = view
        self._event = b"data: " + self._encode(view).replace(b"\n", b" ") + b"\n\n"
        return True


class _Watcher:
    """Place of one who watches: the newest event that was not read yet."""

    def __init__(self) -> None:
        self._event: bytes | None = b""
        self._new = asyncio.Event()

    def put(self, event: bytes | None) -> None:
        self._event = event
        self._new.set()

    async def next(self) -> bytes | None:
        """Wait for the next event, or say that we are still here; None: the channel is closed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(QUIET_S):
                await self._new.wait()
        if not self._new.is_set():
            return STILL_HERE
        self._new.clear()
        return self._event


def _same(view: RunView, shown: RunView | None) -> bool:
    """Tell whether nothing but the time is different."""
    if shown is None or view.public is None or shown.public is None:
        return view == shown
    at_s = shown.public.made_at_s
    return replace(view, public=replace(view.public, made_at_s=at_s)) == shown


class Live:
    """Channels by run and by who may see what."""

    def __init__(self, views: Views, encode: Callable[[RunView], bytes]) -> None:
        self._views, self._encode = views, encode
        self._channels: dict[tuple[str, bool], ViewChannel] = {}

    def channel(self, run: str, is_owner: bool) -> ViewChannel:
        """Find the channel of a run that is served here. Raises: Full."""
        if sum(channel.watchers for channel in self._channels.values()) >= MAX_WATCHERS:
            raise Full
        # None is taken away: who has asked for one may not watch it yet. There are as many as known runs.
        look = partial(self._views.view, run, is_owner)
        return self._channels.setdefault((run, is_owner), ViewChannel(look, self._encode))

    def close(self) -> None:
        """Let everybody go."""
        for channel in self._channels.values():
            channel.close()
