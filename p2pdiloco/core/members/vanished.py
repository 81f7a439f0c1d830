"""Vanished peers: they took part, or were listed, and may come back with another chain.

Rules: docs/protocol/forks.md, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from p2pdiloco.core.api.grouping import Roster


class Vanished:
    """Peers that are not heard, and since when; the first `most` of them.

    In a large run these are thousands, of which nearly all are listed in other groups. Every node asks every
    two seconds which of them count, and they rarely change: so the answer is kept while its sources last.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._since_s: dict[str, float] = {}
        self._oldest_s = math.inf
        """Lower bound of the times since when they are silent."""
        self._asked: tuple[Roster, set[str]] | None = None
        """Question to which `_counting` is the answer; None after a change."""
        self._counting: list[str] = []

    def __len__(self) -> int:
        return len(self._since_s)

    def __iter__(self) -> Iterator[str]:
        return iter(self._since_s)

    @property
    def full(self) -> bool:
        """True: no more of them are remembered."""
        return len(self._since_s) >= self._most

    def add(self, peer: str, since_s: float) -> None:
        """Add a peer that is not heard. One that is here already stays as it was."""
        if peer not in self._since_s:
            self.put(peer, since_s)

    def put(self, peer: str, since_s: float) -> None:
        """Add a peer that was heard until then, or move the time of one that is here."""
        self._since_s[peer] = since_s
        self._oldest_s = min(self._oldest_s, since_s)
        self._asked = None

    def heard(self, peer: str) -> None:
        """Remove a peer that is heard again."""
        if self._since_s.pop(peer, None) is not None:
            self._asked = None

    def expire(self, horizon_s: float) -> None:
        """Forget the peers that are silent since before then."""
        if self._oldest_s >= horizon_s:
            return
        self._since_s = {peer: since_s for peer, since_s in self._since_s.items() if since_s >= horizon_s}
        self._oldest_s = min(self._since_s.values(), default=math.inf)
        self._asked = None

    def shrink(self) -> None:
        """Forget the first of them, down to the bound."""
        while len(self._since_s) > self._most:
            del self._since_s[next(iter(self._since_s))]
            self._asked = None

    def counting(self, roster: Roster, neighbours: set[str]) -> list[str]:
        """List those of them that are among these neighbours, or that nobody lists."""
        if self._asked is None or self._asked[0] is not roster or self._asked[1] != neighbours:
            self._asked = roster, neighbours
            self._counting = [
                peer for peer in self._since_s if peer in neighbours or roster.incarnation(peer) is None
            ]
        return self._counting
