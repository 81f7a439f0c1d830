"""Outer updates on their way to us: others get what is here of them.

`daemon.bulk.updates.fanout` gives it out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.bulk.updates.fetching import Unfinished, known_bytes

LEAST_BYTES = 256 * 1024
"""Size below which updates are passed on as a whole."""
PIECES = 8
"""Number of pieces of one update, about: what is still arriving goes on when at least this part of it, and
`LEAST_BYTES`, are new."""
PIECE_S = 0.1
"""Time whose bytes make a piece at least. A piece is a stream of its own, which costs more than it saves
where the rest is here at once."""
WAIT_S = 4.0
"""Time for which a peer waits for the next piece before it hears "later"."""


class Arriving:
    """Update that is being fetched, or was: others get what is here of it."""

    def __init__(self, number: int, now: Callable[[], float]) -> None:
        self.number = number
        self._now = now
        self._began_s = 0.0
        self._began_bytes = 0
        self.version: SignedVersion | None = None
        self.unfinished: Unfinished | None = None
        self.ended = False
        """True: it failed, and nothing more comes."""
        self._changed = asyncio.Event()

    def begun(self, version: SignedVersion, unfinished: Unfinished) -> None:
        """Note the version of which it is, and where its bytes are: it begins to come."""
        self.version, self.unfinished = version, unfinished
        self._began_s, self._began_bytes = self._now(), unfinished.have_bytes
        self._changed.set()

    def grew(self) -> None:
        """Note that more of it is here."""
        self._changed.set()

    def fail(self) -> None:
        """Note that nothing more comes."""
        self.ended = True
        self._changed.set()

    async def started(self, until_s: float) -> None:
        """Wait until it is known of which version it is, until then at most."""
        await self._wait(lambda: self.ended or self.version is not None, until_s)

    async def piece(
        self, pull: wire.PullUpdate, until_s: float
    ) -> tuple[SignedVersion, memoryview, int] | None:
        """Wait for a piece that is worth a stream: (version, all that is here, size of the whole). None:
        not now."""
        await self._wait(lambda: self._enough(pull), until_s)
        version, unfinished = self.version, self.unfinished
        if self.ended or version is None or unfinished is None:
            return None
        size = len(unfinished.payload)
        if unfinished.have_bytes <= known_bytes(pull, version.header.update_digest, size):
            return None
        return version, memoryview(unfinished.payload)[: unfinished.have_bytes], size

    async def _wait(self, enough: Callable[[], bool], until_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout_at(until_s):
                while not enough():
                    self._changed.clear()
                    await self._changed.wait()

    def _enough(self, pull: wire.PullUpdate) -> bool:
        version, unfinished = self.version, self.unfinished
        if self.ended:
            return True
        if version is None or unfinished is None:
            return False
        size, here = len(unfinished.payload), unfinished.have_bytes
        news = here - known_bytes(pull, version.header.update_digest, size)
        came, took_s = here - self._began_bytes, max(self._now() - self._began_s, 1e-6)
        return here == size or news >= max(LEAST_BYTES, size // PIECES, came / took_s * PIECE_S)
