"""Byte streams in memory whose bytes arrive when the links say so."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, Protocol

from p2pdiloco.adapters.flow import CHUNK_BYTES

PIPE_BYTES = 2 * CHUNK_BYTES


class Delays(Protocol):
    """Delays between peers."""

    def arrival_s(self, sender: str, receiver: str, nbytes: int, sent_s: float) -> float:
        """Time (of the event loop) when bytes that are sent at a time arrive, behind those sent before;
        infinite: never."""


class AtOnce:
    """Delays on which nothing takes time."""

    def arrival_s(self, sender: str, receiver: str, nbytes: int, sent_s: float) -> float:
        """See `Delays`."""
        return sent_s


class Pipe:
    """Direction of a stream: a bounded queue of bytes, each with the time when it arrives."""

    def __init__(self, links: Delays, sender: str = "", receiver: str = "") -> None:
        self._links, self._sender, self._receiver = links, sender, receiver
        self._pieces: deque[tuple[float, memoryview]] = deque()
        """An empty one is the end of the stream."""
        self._queued_bytes = 0
        self._closed = self._broken = False
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def put(self, data: Any) -> None:
        """Send bytes; those after the end are lost."""
        piece = memoryview(bytes(data))
        if piece and not self._closed:
            self._send(piece)

    def _send(self, piece: memoryview) -> None:
        now = self._loop.time()
        arrives_s = self._links.arrival_s(self._sender, self._receiver, piece.nbytes, now)
        self._pieces.append((arrives_s, piece))
        self._queued_bytes += piece.nbytes
        self._changed.set()

    def end(self) -> None:
        """Send the end of the stream."""
        if not self._closed:
            self._closed = True
            self._send(memoryview(b""))

    def break_off(self) -> None:
        """Lose what is on its way, and let nothing arrive any more."""
        self._pieces.clear()
        self._queued_bytes = 0
        self._closed = self._broken = True
        self._changed.set()

    @property
    def idle(self) -> bool:
        """Tell whether the direction is whole and empty, as `DirectStream.idle`."""
        return not self._broken and (not self._pieces or self._pieces[0][0] > self._loop.time())

    async def read(self, n: int) -> bytes:
        """Return between 1 and n bytes; none at the end of the stream."""
        while not self._broken:
            now = self._loop.time()
            if self._pieces and self._pieces[0][0] <= now:
                return self._take(n)
            await self._wait(self._pieces[0][0] if self._pieces else None)
        return b""

    def _take(self, n: int) -> bytes:
        arrived_s, piece = self._pieces[0]
        if not piece:
            return b""  # and stays: whoever reads again meets the end again
        if len(piece) > n:
            self._pieces[0] = arrived_s, piece[n:]
            piece = piece[:n]
        else:
            self._pieces.popleft()
        self._queued_bytes -= len(piece)
        self._changed.set()
        return bytes(piece)

    async def drained(self) -> None:
        """Wait until the queue is short. Raises: ConnectionResetError (the stream is over)."""
        while self._queued_bytes > PIPE_BYTES and not self._closed:
            await self._wait(None)
        if self._closed:
            raise ConnectionResetError("stream cut")

    async def _wait(self, until_s: float | None) -> None:
        self._changed.clear()
        if until_s is None or until_s == float("inf"):
            await self._changed.wait()
            return
        timer = self._loop.call_at(until_s, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            timer.cancel()


class PipeWriter:
    """Writing half of a stream; closing it ends both directions, as closing a libp2p stream here does."""

    def __init__(self, out: Pipe, back: Pipe) -> None:
        self._out, self._back = out, back
        self.transport = self  # what `end_stream` aborts

    def write(self, data: Any) -> None:
        """Queue bytes."""
        self._out.put(data)

    async def drain(self) -> None:
        """Wait until the queue is short again."""
        await asyncio.sleep(0)
        await self._out.drained()

    def close(self) -> None:
        """Flush and end both directions."""
        self._out.end()
        self._back.break_off()

    def abort(self) -> None:
        """End both directions at once; what is queued is lost."""
        self._out.break_off()
        self._back.break_off()
