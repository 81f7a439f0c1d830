"""Courtesy of states for newcomers: they stand back for contributions and updates, which rounds wait for.

Control messages never wait (`adapters.net.flow`). While anything urgent goes out, a state's stream gets a
chunk now and then, so that nobody takes it for dead or gives it up for its slowness. It stands back no
further where the uplink is known and all that goes out takes less than a share of it: then the urgent is slow
on its receiver's account. At other times all states together get that share of what the uplink carries. While
nothing is known of it, only the windows of `adapters.net.flow` hold them back, which give way to whatever
else uses the link.

Rules: docs/protocol/following.md, section 6.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Protocol

from p2pdiloco.adapters.framing import MIN_BYTES_PER_S

SHARE = 0.5
"""Share of the uplink, as far as it is known, for all states together."""
TRICKLE_S = 5.0
"""Longest wait of a stream for each chunk, while something urgent goes out."""
TRICKLE_BYTES_PER_S = 1.5 * MIN_BYTES_PER_S
"""Rate below which no stream is held back: what is slower on the whole than `MIN_BYTES_PER_S` is given up."""
URGENT_S = 60.0
"""Time after which what is urgent counts no more: it is not slow on our account."""
LOOK_S = 1.0
"""Time over which what goes out is measured."""
MOST_S = 6.0
"""Longest wait for the share: a link is never as slow as that would be."""


class KnownUplink(Protocol):
    """Knowledge of our uplink (`daemon.links.meters`)."""

    @property
    def uplink_bytes_per_s(self) -> float:
        """Rate that a person permits, or that was measured; infinite while unknown."""

    @property
    def sent_bytes(self) -> int:
        """Bytes that have gone out, of everything."""


class Courtesy:
    """Order on our uplink: who goes first."""

    def __init__(self, uplink: KnownUplink, now: Callable[[], float]) -> None:
        self._uplink = uplink
        self._now = now
        self._looked_s, self._looked_bytes = now(), 0
        self._rate = math.inf
        """Rate of everything that goes out, while something urgent does."""
        self._urgent: dict[int, float] = {}
        self._next = 0
        self._none_urgent = asyncio.Event()
        self._none_urgent.set()
        self._paid_until_s = 0.0

    def begin(self) -> int:
        """Note that something urgent goes out; return the token for `end`."""
        self._next += 1
        if not self._urgent:
            self._looked_s, self._looked_bytes, self._rate = self._now(), self._uplink.sent_bytes, math.inf
        self._urgent[self._next] = self._now()
        self._none_urgent.clear()
        return self._next

    def end(self, token: int) -> None:
        """Note that it is over."""
        self._urgent.pop(token, None)
        if not self._urgent:
            self._none_urgent.set()

    @contextmanager
    def urgent(self) -> Iterator[None]:
        """Context in which something urgent goes out."""
        token = self.begin()
        try:
            yield
        finally:
            self.end(token)

    def _roomy(self) -> bool:
        """Tell whether the uplink has room beside what is urgent."""
        now, sent = self._now(), self._uplink.sent_bytes
        if now - self._looked_s >= LOOK_S:
            self._rate = (sent - self._looked_bytes) / (now - self._looked_s)
            self._looked_s, self._looked_bytes = now, sent
        uplink = self._uplink.uplink_bytes_per_s
        return uplink < math.inf and self._rate < SHARE * uplink

    async def pace(self, size: int) -> None:
        """Wait until so many bytes of a state may go out (`ports.PullSource.pace`)."""
        late = self._now() - URGENT_S
        for token in [token for token, since_s in self._urgent.items() if since_s < late]:
            self.end(token)
        trickle_s = self._now() + min(TRICKLE_S, size / TRICKLE_BYTES_PER_S)
        while self._urgent and not self._roomy() and (left_s := trickle_s - self._now()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(min(LOOK_S, left_s)):
                    await self._none_urgent.wait()
        rate = SHARE * self._uplink.uplink_bytes_per_s
        if rate < math.inf:
            now = self._now()
            start = max(self._paid_until_s, now)
            self._paid_until_s = min(start + size / max(rate, 1.0), now + MOST_S)
            await asyncio.sleep(start - now)
