"""Places for incoming streams: of the members of our run, of all others, and of one peer among them.

Whoever is no member takes none of the members' places: strangers cost nothing, and there are as many as
somebody likes. Within a pool a peer may have most places while nobody else wants one. Where all are taken,
one that has less than its share gets a place of the peer that has most.

Listed in docs/reference/bounds.md, section 4.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum

from p2pdiloco.core.api.reasons import Unheard
from p2pdiloco.errors import RemoteError

MAX_STREAMS_IN = 64
"""Number of transfers that peers have under way here, while nobody is a member yet (and of a bootstrap)."""
OF_MEMBERS, OF_OTHERS = 48, 16
"""Number of those of a node that is a member: of its fellow members, and of all others."""
SHARES = 4
"""A peer's share of a pool is one of so many; the last one is never had by a peer that has all others."""


class StreamRefusal(Enum):
    """Reasons for which an incoming stream is not served, as they are counted."""

    MEMBERS_FULL = "streams-of-members"
    OTHERS_FULL = "streams-of-others"
    ONE_PEERS_SHARE = "streams-of-one-peer"
    GAVE_WAY = "streams-gave-way"
    """Stream that was ended so that another peer has its share."""
    TOO_SLOW = "stream-too-slow"
    LONG_HEADER = "header-of-others"
    """Header of somebody who is no member, longer than theirs may be."""


class PutOff(RemoteError):
    """Refusal for now. The peer hears `busy`; `counted` says what there was too much of."""

    def __init__(self, counted: str = Unheard.BUSY.value) -> None:
        super().__init__(Unheard.BUSY.value, "too many requests")
        self.counted = counted


class Busy(PutOff):
    """Refusal: a limit of concurrent requests is reached."""


class StreamPlace:
    """Place of one stream while a request on it is served."""

    def __init__(self, pool: _Pool, peer: str) -> None:
        self.pool, self.peer = pool, peer
        self.task = asyncio.current_task()
        self.gave_way = False


class _Pool:
    def __init__(self, full: StreamRefusal) -> None:
        self.full = full
        self.places: list[StreamPlace] = []

    def count(self, peer: str) -> int:
        return sum(place.peer == peer for place in self.places)


class Places:
    """Places of all streams that come in."""

    def __init__(self, gave_way: Callable[[], None]) -> None:
        """`gave_way`: called for a stream that was ended so that another peer has its share."""
        self._members, self._others = _Pool(StreamRefusal.MEMBERS_FULL), _Pool(StreamRefusal.OTHERS_FULL)
        self._gave_way = gave_way

    def __len__(self) -> int:
        return len(self._members.places) + len(self._others.places)

    @contextmanager
    def taken(self, peer: str, member: bool | None) -> Iterator[StreamPlace]:
        """Context in which the current task serves a request of the peer's. `member`: None where there are no
        members.

        Raises: Busy.
        """
        pool = self._members if member else self._others
        most = MAX_STREAMS_IN if member is None else OF_MEMBERS if member else OF_OTHERS
        share = most // SHARES
        mine = pool.count(peer)
        if mine >= most - share:
            raise Busy(StreamRefusal.ONE_PEERS_SHARE.value)
        if len(pool.places) >= most and not (mine < share and self._make_way(pool, share)):
            raise Busy(pool.full.value)
        place = StreamPlace(pool, peer)
        pool.places.append(place)
        try:
            yield place
        finally:
            if not place.gave_way:
                pool.places.remove(place)

    def _make_way(self, pool: _Pool, share: int) -> bool:
        """End the newest stream of the peer that has most, if that is more than its share."""
        (peer, count), *_ = Counter(place.peer for place in pool.places).most_common(1)
        if count <= share:
            return False
        place = next(place for place in reversed(pool.places) if place.peer == peer)
        pool.places.remove(place)
        place.gave_way = True
        self._gave_way()
        if place.task is not None:
            place.task.cancel()
        return True
