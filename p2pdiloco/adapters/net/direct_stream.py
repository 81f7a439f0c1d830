"""A byte stream whose bytes land where they are wanted, without a buffer in between.

asyncio's StreamReader copies everything three times, and wakes its reader for every piece that arrives. Here
the kernel writes into the space that a waiting `fill` was given, and the task wakes when all of it is there.
What arrives while nobody waits goes to a small buffer; when that is full the other side has to wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from p2pdiloco.errors import TransportError, invariant

FIRST_BYTES, SPARE_BYTES = 4 * 1024, 128 * 1024
"""Bytes of the buffer for what nobody waits for: at first, for most streams carry little of it, and when more
came."""
WRITE_BYTES = 512 * 1024
"""Queued bytes above which `drain` waits: one chunk goes out while the next is prepared."""


class DirectStream(asyncio.BufferedProtocol):
    """Connection in both directions: reader and writer in one. One task reads, one writes."""

    def __init__(self, connected: Callable[[DirectStream], None] | None = None) -> None:
        """Make a stream without a connection; `connected` is called when the connection is there."""
        self._connected = connected
        self.transport: Any = None
        self._spare = memoryview(bytearray(FIRST_BYTES))
        self._start = self._end = 0
        """Begin and end of what lies in the spare buffer."""
        self._unfilled: memoryview | None = None
        """Memory that a waiting `fill` still needs to be filled."""
        self._arrived_bytes = 0
        self._ended: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._held_up: asyncio.Future[None] | None = None
        self._paused = False

    # --- asyncio.BufferedProtocol --------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        """See asyncio."""
        self.transport = transport
        transport.set_write_buffer_limits(high=WRITE_BYTES)
        if self._connected is not None:
            self._connected(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        """See asyncio. Never empty: reading pauses before."""
        return self._spare[self._end :] if self._unfilled is None else self._unfilled

    def buffer_updated(self, nbytes: int) -> None:
        """See asyncio."""
        self._arrived_bytes += nbytes
        if self._unfilled is None:
            self._end += nbytes
            if self._end == FIRST_BYTES == len(self._spare):
                self._spare = memoryview(bytearray(self._spare) + bytes(SPARE_BYTES - FIRST_BYTES))
            elif self._end == len(self._spare):
                self._paused = True
                self.transport.pause_reading()
            self._wake()
        else:
            self._unfilled = self._unfilled[nbytes:]
            if not self._unfilled:
                self._unfilled = None
                self._wake()

    def eof_received(self) -> bool:
        """See asyncio: the writing half stays open."""
        self._end_with(TransportError("stream cut"))
        return True

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio."""
        self._end_with(TransportError("stream cut" if exc is None else f"stream cut: {exc}"))
        self.resume_writing()

    def pause_writing(self) -> None:
        """See asyncio."""
        self._held_up = asyncio.get_running_loop().create_future()

    def resume_writing(self) -> None:
        """See asyncio."""
        held_up, self._held_up = self._held_up, None
        if held_up is not None and not held_up.done():
            held_up.set_result(None)

    def _end_with(self, error: Exception) -> None:
        self._ended = self._ended or error
        self._wake()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    @property
    def idle(self) -> bool:
        """Tell whether the stream is whole as far as we know, and nothing lies here unread."""
        return self._ended is None and self._start == self._end and not self.transport.is_closing()

    # --- reading -------------------------------------------------------------------------------------

    def _taken(self, space: memoryview) -> int:
        """Move what lies in the spare buffer."""
        size = min(len(space), self._end - self._start)
        space[:size] = self._spare[self._start : self._start + size]
        self._passed(size)
        return size

    def _passed(self, size: int) -> None:
        self._start += size
        if self._start == self._end:
            self._start = self._end = 0
            if self._paused:
                self._paused = False
                self.transport.resume_reading()

    async def _wait(self) -> None:
        invariant(self._waiter is None, "two tasks read one stream")
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def here(self, n: int) -> bytes:
        """Take at most n bytes of what has arrived already."""
        end = min(self._start + n, self._end)
        out = bytes(self._spare[self._start : end])
        self._passed(end - self._start)
        return out

    async def read(self, n: int) -> bytes:
        """Read between 1 and n bytes; empty at the end of the stream. At most `SPARE_BYTES` at a time."""
        while self._start == self._end and self._ended is None:
            await self._wait()
        return self.here(n)

    async def readexactly(self, n: int) -> bytes:
        """Read exactly n bytes. Raises: asyncio.IncompleteReadError."""
        parts = b""
        while len(parts) < n:
            part = await self.read(n - len(parts))
            if not part:
                raise asyncio.IncompleteReadError(parts, n)
            parts += part
        return parts

    async def fill(self, space: memoryview, idle_s: float, deadline_s: float) -> bool:
        """Read exactly as many bytes as there is space for. False: not in time; the stream is then of no use.

        `idle_s`: longest pause; `deadline_s`: when all must be here, by the loop's clock.

        Raises: TransportError (cut).
        """
        rest = space[self._taken(space) :]
        if not rest:
            return True
        if self._ended is not None:
            raise self._ended
        self._unfilled = rest
        loop = asyncio.get_running_loop()
        before = self._arrived_bytes
        in_time = True
        watch: asyncio.TimerHandle

        def look() -> None:
            nonlocal before, in_time, watch
            if self._arrived_bytes == before or loop.time() >= deadline_s:
                in_time = False
                self._wake()
            else:
                before = self._arrived_bytes
                watch = loop.call_at(min(loop.time() + idle_s, deadline_s), look)

        watch = loop.call_at(min(loop.time() + idle_s, deadline_s), look)
        try:
            await self._wait()
        finally:
            watch.cancel()
            missing, self._unfilled = self._unfilled, None
        if missing is not None and in_time and self._ended is not None:
            raise self._ended
        return missing is None

    # --- writing -------------------------------------------------------------------------------------

    def write(self, data: Any) -> None:
        """Queue bytes; they must not change until they are sent."""
        self.transport.write(data)

    @property
    def drained(self) -> bool:
        """Tell whether the queue is short, so that there is nothing to wait for."""
        return self._held_up is None and not self.transport.is_closing()

    async def drain(self) -> None:
        """Wait until the queue is short again. Raises: ConnectionResetError."""
        if self._held_up is not None:
            await asyncio.shield(self._held_up)
        if self.transport.is_closing():
            raise ConnectionResetError("stream cut")

    def close(self) -> None:
        """Flush and end both directions."""
        self.transport.close()
