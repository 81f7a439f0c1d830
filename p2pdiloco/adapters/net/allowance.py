"""Allowance of requests of those who are no members: so many at once, then so many a second.

Whoever asks for more is answered late: its request waits for its turn unread, so a peer that asks one thing
after the other is slowed down, and costs next to nothing. Where too many of its requests wait already it is
refused, late as well, and who goes on nevertheless is disconnected. Peer ids cost nothing, so all strangers
have one more allowance together.

Listed in docs/reference/bounds.md, section 7.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from enum import Enum

from p2pdiloco.adapters.net.places import Busy
from p2pdiloco.util import BoundedDict

PEER_AT_ONCE, PEER_PER_S = 64, 4.0
"""Requests of one peer. A newcomer had some 40 in its first five seconds, and then its heartbeats, two a
second, and the versions that it pulls."""
OTHERS_AT_ONCE, OTHERS_PER_S = 256, 64.0
"""Requests of all strangers together."""
MOST_WAIT_S = 2.0
"""Longest time for which a request waits for its turn. It bounds their number: 8 of a peer, 128 of all."""
LATE_S, MOST_LATE = 4.0, 64
"""Time after which a peer hears that it is refused, and most requests that are held back for that; if there
are more, they are refused at once."""
MOST_REFUSED = 64
"""Requests of one peer that are refused in a row before it is disconnected. To be dialled again costs as much
as some of them."""
MAX_PEERS = 4096


class Excess(Enum):
    """Kinds of what a peer asked too much, as refusals are counted."""

    HELD_BACK = "requests-held-back"
    """Request that was answered late."""
    OF_ONE_PEER = "requests-of-one-peer"
    OF_OTHERS = "requests-of-others"
    DISCONNECTED = "peer-disconnected"
    """Connection that was ended, of a peer that went on."""


class _Bucket:
    """Bucket that fills again with time."""

    def __init__(self, at_once: int, per_s: float) -> None:
        self._at_once_s, self._each_s = at_once / per_s, 1.0 / per_s
        self._full_s = 0.0
        """Time at which it is full again."""
        self.refused = 0
        """Requests that were refused since the last one that had not to wait."""

    def wait_s(self, now: float) -> float:
        """Time until one more request may be answered."""
        return max(0.0, max(self._full_s, now) + self._each_s - self._at_once_s - now)

    def take(self, now: float) -> None:
        """Take one."""
        self._full_s = max(self._full_s, now) + self._each_s

    def give_back(self) -> None:
        """Give one back."""
        self._full_s -= self._each_s


class RequestAllowance:
    """Allowance of each peer, and of all strangers together."""

    def __init__(self, count: Callable[[Excess], None], disconnect: Callable[[str], None]) -> None:
        """`count` is told of what was held back, `disconnect` who goes on although it is refused."""
        self._count = count
        self._disconnect = disconnect
        self._peers: BoundedDict[str, _Bucket] = BoundedDict(MAX_PEERS)
        self._others = _Bucket(OTHERS_AT_ONCE, OTHERS_PER_S)
        self._late = 0
        """Requests whose refusal is held back."""

    async def turn(self, peer: str, stranger: bool) -> None:
        """Wait until a request of a peer's may be looked at. `stranger`: it has a part of what all strangers
        have together.

        Raises: Busy (too many wait already).
        """
        loop = asyncio.get_running_loop()
        now, bucket = loop.time(), self._bucket(peer)
        wait_s = bucket.wait_s(now)
        if wait_s > MOST_WAIT_S:
            if not self._goes_on(peer, bucket):
                await self._hold_back()
            raise Busy(Excess.OF_ONE_PEER.value)
        if wait_s == 0.0:
            bucket.refused = 0
        if stranger:
            wait_s = max(wait_s, self._others.wait_s(now))
            if wait_s > MOST_WAIT_S:
                await self._hold_back()
                raise Busy(Excess.OF_OTHERS.value)
            self._others.take(now)
        bucket.take(now)
        if wait_s > 0.0:
            self._count(Excess.HELD_BACK)
            await asyncio.sleep(wait_s)

    def give_back(self, peer: str) -> None:
        """Count a request no more, of which something else was the measure."""
        self._bucket(peer).give_back()

    def _bucket(self, peer: str) -> _Bucket:
        bucket = self._peers.get(peer) or _Bucket(PEER_AT_ONCE, PEER_PER_S)
        self._peers[peer] = bucket
        return bucket

    def _goes_on(self, peer: str, bucket: _Bucket) -> bool:
        """Count a refusal; tell whether the peer was disconnected for it."""
        bucket.refused += 1
        if bucket.refused < MOST_REFUSED:
            return False
        bucket.refused = 0
        self._disconnect(peer)
        return True

    async def _hold_back(self) -> None:
        if self._late < MOST_LATE:
            self._late += 1
            try:
                await asyncio.sleep(LATE_S)
            finally:
                self._late -= 1
