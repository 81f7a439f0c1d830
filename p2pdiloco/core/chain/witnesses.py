"""Witnesses of a fragment's chain: the version below which no fork can reach.

Versions above that may still lose against a heavier chain (docs/protocol/forks.md, section 3). A peer that
reports a head of our chain has everything below it too, so no fork of its making can lack that. The report
must be some time old: a crash may take the peer back to its last checkpoint.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from p2pdiloco.core.api.types import Head
from p2pdiloco.core.chain.chain import Chain
from p2pdiloco.util import BoundedDict

NONE = -1
STRANGERS_S = 120.0
"""Time after which no fork of peers without a mark is expected any more: they need not have been anywhere."""
NOTE_EVERY_S = 15.0
"""Interval at which our own head is noted, to know later what is older than that."""
LOOK_EVERY_S = 2.0
"""Interval at which a peer's heads are looked at; heartbeats in between are skipped."""


MAX_SEEN = 8192
"""Limit of remembered reports, twice as many as a view knows peers. A peer whose report is forgotten counts
as never heard, so that more is kept."""


class _Seen:
    """Reports of one peer."""

    __slots__ = ("head", "lately", "lately_s", "look_at_s", "parted", "sure")

    def __init__(self) -> None:
        self.head: Head | None = None
        self.sure = NONE
        """Version of our chain that it reported at least `durable_s` ago."""
        self.lately = NONE
        self.lately_s = 0.0
        self.look_at_s = -1e18
        self.parted: bool | None = None
        """State of a peer that left with `head`, and will not go further; true once `head` was found to be of
        our chain; None: it has not left."""


class Witnesses:
    """Versions of our chain of one fragment that other peers are known to have."""

    def __init__(self, chain: Chain, durable_s: float) -> None:
        self._chain = chain
        self._durable_s = durable_s
        self._replaced = chain.replaced
        self._seen: BoundedDict[str, _Seen] = BoundedDict(MAX_SEEN)
        self._heads: deque[tuple[float, int]] = deque()
        """Heads of our chain in the last two minutes, and when."""

    def heard(self, peer: str, head: Head, now: float) -> None:
        """Take in the head that a peer reports."""
        seen = self._seen.get(peer)
        if seen is None:
            seen = self._seen[peer] = _Seen()
        if now < seen.look_at_s:
            return
        seen.look_at_s = now + LOOK_EVERY_S
        seen.head, seen.parted = head, None
        if self._chain.knows(head.number, head.digest):
            self._note(seen, head.number, now)

    def _note(self, seen: _Seen, number: int, now: float) -> None:
        if seen.lately == NONE:
            seen.lately, seen.lately_s = number, now
        elif now - seen.lately_s >= self._durable_s:
            seen.sure = seen.lately
            seen.lately, seen.lately_s = max(number, seen.lately), now

    def count_merged(self, max_base_age: int, now: float) -> None:
        """Count every learner merged into our chain as a witness: it held a version of it not long before.

        Of members of other groups, which do not report to us, that is all that is known.
        """
        for mark in self._chain.table():
            number = mark.number - 1 - max_base_age
            if number >= 0:
                self._note(self._seen.setdefault(mark.learner, _Seen()), number, now)

    def said_goodbye(self, peer: str, head: Head) -> None:
        """Remember the head with which a peer goes."""
        seen = self._seen.get(peer)
        if seen is not None:
            seen.head, seen.parted = head, self._chain.knows(head.number, head.digest)

    def restarted(self, peer: str) -> None:
        """Forget the reports of a peer that was restarted: it may have come back with an older state."""
        self._seen.pop(peer, None)

    def review(self, peers: Sequence[str], now: float, strangers: Sequence[str] = ()) -> int:
        """Find the newest version that all these peers certainly have; -1 if there is none. Others are
        forgotten. Strangers are asked only for versions of the last two minutes."""
        if self._replaced != self._chain.replaced:
            self._replaced = self._chain.replaced
            for seen in self._seen.values():
                seen.sure = seen.lately = NONE
                seen.parted = None if seen.parted is None else False
            self._heads.clear()
        if len(self._seen) > 2 * (len(peers) + len(strangers)) + 16:
            seen_by, self._seen = self._seen, BoundedDict(MAX_SEEN)
            for peer in (*peers, *strangers):
                if peer in seen_by:
                    self._seen[peer] = seen_by[peer]
        lowest = self._lowest(peers, now)
        old = self._head_before(now - STRANGERS_S, now)
        return min(lowest, max(old, self._lowest(strangers, now))) if lowest > old else lowest

    def _head_before(self, then_s: float, now: float) -> int:
        """Find the newest version that was in our chain at that time; and note today's."""
        if not self._heads or now - self._heads[-1][0] >= NOTE_EVERY_S:
            self._heads.append((now, self._chain.head.number))
        while len(self._heads) > 1 and self._heads[1][0] <= then_s:
            self._heads.popleft()
        since_s, number = self._heads[0]
        return number if since_s <= then_s else NONE

    def _lowest(self, peers: Sequence[str], now: float) -> int:
        lowest = self._chain.head.number
        for peer in peers:
            known = self._seen.get(peer)
            if known is None:
                return NONE
            head = known.head
            if head is not None and self._chain.knows(head.number, head.digest):
                self._note(known, head.number, now)
                known.parted = None if known.parted is None else True
            if known.parted:
                continue  # it will come back with a version of our chain, or not at all
            lowest = min(lowest, known.sure)
        return lowest
