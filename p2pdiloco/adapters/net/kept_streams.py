"""Streams of bulk that are kept: one carries a transfer, and the next one to the same peer.

Opening a stream costs more than a small transfer on it. So the client keeps a stream on which all went well,
for a while, and the server waits there for what comes next. Neither end's idle streams count as transfers;
both are bounded, and whoever has too many ends the one that was idle for longest. A stream on which anything
went wrong is never kept.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict

from p2pdiloco.adapters.net.framing import ByteReader, ByteWriter

KEEP_S = 15.0
"""Seconds after which a client ends an idle stream. Fragments are due seconds apart."""
SERVER_KEEPS_S = 30.0
"""Seconds after which a server ends an idle stream: longer, so that it hardly ever ends one on which
something is coming."""
MOST, MOST_PER_PEER = 24, 4
"""Most idle streams of ours; more than that many at a time to one peer are rare."""
MOST_IN, MOST_IN_PER_PEER = 64, 6
"""Most idle streams of others; of one peer some more than it keeps, since both ends choose by themselves."""
Stream = tuple[ByteReader, ByteWriter]


class KeptStreams:
    """Idle streams of a client, by peer."""

    def __init__(self) -> None:
        self._idle: OrderedDict[int, tuple[str, Stream, float]] = OrderedDict()
        """Idle streams, the longest idle first: number -> (peer, stream, idle since)."""
        self._next = 0
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._idle)

    def take(self, peer: str) -> Stream | None:
        """Take an idle stream to the peer, the one used last; None: there is none that is known to be
        whole."""
        for number in [n for n, (whose, _, _) in reversed(self._idle.items()) if whose == peer]:
            _, stream, _ = self._idle.pop(number)
            if whole(stream[0]):
                return stream
            end_stream(stream[1], False)
        return None

    def put(self, peer: str, stream: Stream) -> None:
        """Keep a stream on which all went well."""
        loop = asyncio.get_running_loop()
        mine = [number for number, (whose, _, _) in self._idle.items() if whose == peer]
        if len(mine) >= MOST_PER_PEER:
            self._end(mine[0])
        elif len(self._idle) >= MOST:
            self._end(next(iter(self._idle)))
        self._next += 1
        self._idle[self._next] = (peer, stream, loop.time())
        if self._timer is None:
            self._timer = loop.call_later(KEEP_S, self._end_old)

    def clear(self) -> None:
        """End all of them."""
        for number in list(self._idle):
            self._end(number)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end(self, number: int) -> None:
        _, (_, writer), _ = self._idle.pop(number)
        end_stream(writer, True)

    def _end_old(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = None
        for number, (_, (reader, _), since_s) in list(self._idle.items()):
            if loop.time() >= since_s + KEEP_S or not whole(reader):  # as the timer reckons, or it would spin
                self._end(number)
        if self._idle:
            oldest_s = next(iter(self._idle.values()))[2]
            self._timer = loop.call_at(oldest_s + KEEP_S, self._end_old)


class KeptIncoming:
    """Idle streams of a server: each is a task that waits for the next request on it."""

    def __init__(self) -> None:
        self._idle: OrderedDict[asyncio.Task[None], tuple[str, ByteWriter]] = OrderedDict()
        """Idle streams, the longest idle first."""

    def __len__(self) -> int:
        return len(self._idle)

    def put(self, task: asyncio.Task[None], peer: str, writer: ByteWriter) -> None:
        """Let a stream's task wait from now on. Where there are too many, one ends: of the same peer's, or of
        the peer that has most."""
        counts = Counter(whose for whose, _ in self._idle.values())
        if counts[peer] >= MOST_IN_PER_PEER:
            self._end_oldest(peer)
        elif len(self._idle) >= MOST_IN:
            self._end_oldest(counts.most_common(1)[0][0])
        self._idle[task] = (peer, writer)

    def take(self, task: asyncio.Task[None]) -> bool:
        """Take a stream on which something came, or which ended. False: it was ended here, so what came is
        asked for elsewhere."""
        return self._idle.pop(task, None) is not None

    def _end_oldest(self, peer: str) -> None:
        task = next(task for task, (whose, _) in self._idle.items() if whose == peer)
        _, writer = self._idle.pop(task)
        end_stream(writer, True)


def whole(reader: ByteReader) -> bool:
    """Tell whether nothing is known against an idle stream: its end, or bytes that nobody asked for."""
    return bool(getattr(reader, "idle", True))


def end_stream(writer: ByteWriter, complete: bool) -> None:
    """Close after a complete exchange; otherwise drop what is queued, which may point into lent buffers."""
    transport = getattr(writer, "transport", None)
    if complete or transport is None:
        writer.close()
    else:
        transport.abort()
