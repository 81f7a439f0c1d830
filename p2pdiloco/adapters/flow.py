"""Flow of bulk: enough to fill a link, never so much that control messages wait behind it.

A `Flow` is the window of one peer, kept by the delay of acknowledgements like LEDBAT (RFC 6817): while chunks
wait less than `TARGET_S` longer than the fastest one lately, it grows; beyond that it shrinks. So bulk gives
way to our own control messages, which share the connection, and to whatever else uses the link.

An `Allowance` is what a person permits per second, in one direction, for all peers together.

Rules: docs/protocol/links.md, section 5.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from p2pdiloco.util import Now

CHUNK_BYTES = 256 * 1024
"""Bytes of the longest chunk."""
LEAST_CHUNK_BYTES = 4 * 1024
ASKS = 4
"""Parts in which a window is acknowledged, at least."""
LEAST_WINDOW_BYTES = 8 * 1024
"""Least bytes of a window. Several peers share a link of ours without a word: five such windows are a third
of a second of 1 Mbit/s."""
EASY_WINDOW_BYTES = 32 * 1024
"""Least bytes of a window on a fast link, whose best rate lately brings so many within `TARGET_S`. What waits
there may wait for a busy machine, and so little is no burden."""
START_WINDOW_BYTES = 16 * 1024
RATE_S = 0.5
"""Seconds over which arriving bytes are counted to a rate."""
FADING = 0.98
"""Factor by which the best rate fades in `RATE_S`: half of it is left in a quarter of a minute."""
MOST_WINDOW_BYTES = 16 * 1024 * 1024
"""Most bytes of a window: 1 Gbit/s across an ocean."""
TARGET_S = 0.1
"""Seconds that bulk may make itself wait, and thereby others."""
MEMORY_S = 30.0
"""Seconds, once or twice of which the fastest chunk is remembered: routes change."""
BURST_S = 0.1
"""Seconds for which an allowance that was not used is kept."""
OVERHEAD = 1.04
"""Bytes on the link for each byte of ours: encryption, multiplexing, TCP and IP headers."""
MESSAGE_BYTES = 200
"""Bytes that carry a control message, about."""
DEBT_S = 1.0
"""Seconds of bulk that control messages may take at one time: they are never held up, and bulk pays for
them."""


class Flow:
    """Window of one peer. Several streams to it share it."""

    def __init__(self, now: Now) -> None:
        self._now = now
        self.window_bytes = START_WINDOW_BYTES
        self.in_flight_bytes = 0
        self._growing_fast = True
        self._enough_bytes = MOST_WINDOW_BYTES
        """Bytes up to which the window grows fast, if at all."""
        self._limited = False
        """True: the window held the sender up. Only then does it say anything that all went well."""
        self._fastest_s = self._fastest_before_s = float("inf")
        self._since_s = now()
        self._shrunk_s = -1e18
        self._least_bytes = START_WINDOW_BYTES
        self._best_bytes_per_s = 0.0
        self._counted_bytes = 0
        self._counting_s = now()
        self._turn = asyncio.Lock()
        self._room = asyncio.Event()

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk: several to a window."""
        return max(LEAST_CHUNK_BYTES, min(self.window_bytes // 4, CHUNK_BYTES))

    def claim_now(self, size: int) -> bool:
        """Count `size` more bytes as on their way, if they may go at once."""
        if self._turn.locked() or (self.in_flight_bytes and self.in_flight_bytes + size > self.window_bytes):
            self._limited = True
            return False
        self._sent(size)
        return True

    async def claim(self, size: int) -> None:
        """Count `size` more bytes as on their way, waiting until they may go; first come, first served."""
        async with self._turn:
            while self.in_flight_bytes and self.in_flight_bytes + size > self.window_bytes:
                self._limited = True
                self._room.clear()
                await self._room.wait()
            self._sent(size)

    def _sent(self, size: int) -> None:
        if not self.in_flight_bytes:
            self._counted_bytes, self._counting_s = 0, self._now()
        self.in_flight_bytes += size

    def _count(self, size: int, now: float) -> None:
        """Count arriving bytes, and set the least window by the best rate lately. The present rate would let
        a window that shrank for a busy machine shrink for ever."""
        self._counted_bytes += size
        took_s = now - self._counting_s
        if took_s >= RATE_S:
            self._best_bytes_per_s = max(self._counted_bytes / took_s, FADING * self._best_bytes_per_s)
            self._least_bytes = max(
                LEAST_WINDOW_BYTES, min(int(TARGET_S * self._best_bytes_per_s), EASY_WINDOW_BYTES)
            )
            self._counted_bytes, self._counting_s = 0, now

    def arrived(self, size: int, after_s: float) -> None:
        """Take in that the peer took `size` bytes, so long after they were handed over."""
        self.in_flight_bytes -= size
        now = self._now()
        if now - self._since_s > MEMORY_S:
            self._look_again(now)
        self._count(size, now)
        self._fastest_s = min(self._fastest_s, after_s)
        waited_s = after_s - min(self._fastest_s, self._fastest_before_s)
        if waited_s > TARGET_S / 2 or self.window_bytes >= self._enough_bytes:
            self._growing_fast = False
        if waited_s > 4 * TARGET_S and now - self._shrunk_s > after_s:
            self.window_bytes, self._shrunk_s = self.window_bytes // 2, now
        elif waited_s > TARGET_S:
            self.window_bytes -= int(size * min(1.0, waited_s / TARGET_S - 1.0) / 2)
        elif self._limited and self._growing_fast:
            self.window_bytes += size
        elif self._limited:
            self.window_bytes += int(
                size * (1.0 - waited_s / TARGET_S) * self.chunk_bytes / self.window_bytes
            )
        self.window_bytes = max(self._least_bytes, min(self.window_bytes, MOST_WINDOW_BYTES))
        self._limited = self._turn.locked()
        self._room.set()

    def _look_again(self, now: float) -> None:
        """Let what we queued drain once, or our own queue would come to count as the link's length, and the
        next one be built on top of it. Then quickly back to half of what it was."""
        self._fastest_before_s, self._fastest_s, self._since_s = self._fastest_s, float("inf"), now
        self._enough_bytes = self.window_bytes // 2
        self.window_bytes = self._least_bytes
        self._growing_fast = True

    def lost(self, size: int) -> None:
        """Take in that a stream ended with so many bytes on the way."""
        self.in_flight_bytes -= size
        self._room.set()


@dataclass
class Allowance:
    """A token bucket: at most so many bytes a second, of all streams together; those that wait take turns."""

    bytes_per_s: float
    """Rate on the link, what encryption and headers add included."""
    _now: Now

    def __post_init__(self) -> None:
        self._paid_until_s = self._now()
        self._streams = 0
        """Number of streams that share it."""

    def change(self, bytes_per_s: float) -> None:
        """Allow so much from now on."""
        self.bytes_per_s = bytes_per_s

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk: a tenth of a second's."""
        return max(LEAST_CHUNK_BYTES // 2, min(int(self.bytes_per_s / 10), CHUNK_BYTES))

    @contextmanager
    def shared(self) -> Iterator[int]:
        """Context of one stream more: gives how many bytes it may have on its way at once."""
        self._streams += 1
        try:
            yield max(LEAST_CHUNK_BYTES, 2 * self.chunk_bytes // self._streams)
        finally:
            self._streams -= 1

    async def take(self, size: int) -> None:
        """Wait until `size` bytes are allowed."""
        wait_s = self._charge(size, float("inf"))
        if wait_s > 0:
            await asyncio.sleep(wait_s)

    def give_back(self, size: int) -> None:
        """Give bytes back that were taken and are not used."""
        self._paid_until_s -= size * OVERHEAD / self.bytes_per_s

    def used(self, size: int) -> None:
        """Charge bytes that somebody used who does not wait."""
        self._charge(size, DEBT_S)

    def _charge(self, size: int, most_s: float) -> float:
        """Returns the seconds that the bytes would have to wait."""
        now = self._now()
        start = max(self._paid_until_s, now - BURST_S)
        self._paid_until_s = max(start, min(start + size * OVERHEAD / self.bytes_per_s, now + most_s))
        return start - now


LIFTED = 1e15
"""Bytes a second of an allowance that was lifted while streams had it."""


class Limits:
    """Limits that a person sets this node (None is all that the links carry), and what went by."""

    def __init__(self, upload: Allowance | None = None, download: Allowance | None = None) -> None:
        self.upload = upload
        self.download = download
        self.sent_bytes = self.received_bytes = 0
        """Bytes of payloads, both ways: acknowledged by peers, and received here."""
        self.carried_out_bytes = self.carried_in_bytes = 0
        """Bytes on the link, about: payloads, also those that were cut, and control messages, with what
        carries them."""

    @classmethod
    def of(cls, upload_bits_per_s: float, download_bits_per_s: float, now: Now) -> Limits:
        """Make limits from settings; 0 is no limit."""
        limits = cls()
        limits.allow(upload_bits_per_s, download_bits_per_s, now)
        return limits

    def allow(self, upload_bits_per_s: float, download_bits_per_s: float, now: Now) -> None:
        """Change the limits, for streams that are under way too; 0 is no limit."""
        self.upload = _changed(self.upload, upload_bits_per_s / 8, now)
        self.download = _changed(self.download, download_bits_per_s / 8, now)

    def sent(self, size: int) -> None:
        """Count bytes of a payload that a peer acknowledged."""
        self.sent_bytes += size

    def handed_over(self, size: int) -> None:
        """Count bytes of a payload that were handed to the link, whatever becomes of them."""
        self.carried_out_bytes += round(size * OVERHEAD)

    def received(self, size: int) -> None:
        """Count bytes of a payload that came."""
        self.received_bytes += size
        self.carried_in_bytes += round(size * OVERHEAD)

    def control(self, sent: int, received: int) -> None:
        """Count control messages that went by."""
        self.carried_out_bytes += sent + MESSAGE_BYTES
        self.carried_in_bytes += received + MESSAGE_BYTES
        if self.upload is not None:
            self.upload.used(sent + MESSAGE_BYTES)
        if self.download is not None:
            self.download.used(received + MESSAGE_BYTES)


def _changed(allowance: Allowance | None, bytes_per_s: float, now: Now) -> Allowance | None:
    if allowance is not None:
        allowance.change(bytes_per_s or LIFTED)
    if not bytes_per_s:
        return None
    return allowance or Allowance(bytes_per_s, now)


@dataclass
class Sending:
    """Payload on its way to a peer: the chunks that are not acknowledged yet."""

    _flow: Flow
    _most: int
    """Bytes that the receiver wants to have on the way at most."""
    _now: Now
    deadline_s: float
    """Time at which all must be acknowledged."""

    def __post_init__(self) -> None:
        self._unasked_bytes = 0
        self._chunks: deque[tuple[int, float]] = deque()
        self.unacknowledged_bytes = 0
        """Bytes on the way."""
        self._room = asyncio.Event()

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk."""
        return min(self._flow.chunk_bytes, max(LEAST_CHUNK_BYTES // 2, self._most // 2))

    def _full(self, size: int) -> bool:
        return self.unacknowledged_bytes > 0 and self.unacknowledged_bytes + size > self._most

    def claim_now(self, size: int) -> bool:
        """Count a chunk as on its way, if it may go at once."""
        if self._full(size) or not self._flow.claim_now(size):
            return False
        self._sent(size)
        return True

    async def claim(self, size: int) -> None:
        """Count a chunk as on its way, waiting until it may go."""
        while self._full(size):
            self._room.clear()
            await self._room.wait()
        await self._flow.claim(size)
        self._sent(size)

    def _sent(self, size: int) -> None:
        self._chunks.append((size, self._now()))
        self.unacknowledged_bytes += size
        self._unasked_bytes += size

    def wants_answer(self, now: bool = False) -> bool:
        """Decide whether to ask for an acknowledgement of what was sent: several times in a window.

        `now`: if there is anything to ask for. Who waits for room must have asked, or it would wait for ever.
        """
        least = 1 if now else min(self._flow.window_bytes // ASKS, self._most // 2)
        if self._unasked_bytes < max(1, least):
            return False
        self._unasked_bytes = 0
        return True

    def arrived(self, size: int) -> bool:
        """Take in that the receiver acknowledges that many bytes; False: none, or more than are on the
        way."""
        if not 0 < size <= self.unacknowledged_bytes:
            return False
        self.unacknowledged_bytes -= size
        self._room.set()
        left, sent_s = size, 0.0
        while left > 0:
            chunk, sent_s = self._chunks.popleft()
            if chunk > left:
                self._chunks.appendleft((chunk - left, sent_s))
            left -= chunk
        # The acknowledgement was asked for with the last of these chunks; the others waited for that.
        self._flow.arrived(size, self._now() - sent_s)
        return True

    def close(self) -> None:
        """End the sending: the stream is over."""
        self._flow.lost(self.unacknowledged_bytes)
        self.unacknowledged_bytes = 0
        self._chunks.clear()
        self._room.set()
