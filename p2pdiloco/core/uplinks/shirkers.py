"""Who would carry offices far better than others, by its own word, and leaves them to those: it is not waited
for any more, so that what one such peer says costs the others a few waits and not one for every version."""

from __future__ import annotations

LIMIT = 6
"""Not counted from here on: three offices that were open long enough for it,"""
LEVEL = 2
BEHIND = 1
"""or six, where its head is older than what whoever is elected has to hold: it may be on its way."""
FORGET_S = 600.0
"""So long after the last of them it counts again. A peer that takes an office counts at once."""
MAX_PEERS = 32
"""Remembered; the oldest is forgotten."""


class Shirkers:
    """As this member saw it, in all of its groups."""

    def __init__(self) -> None:
        self._known: dict[str, tuple[int, float]] = {}
        """Peer -> marks, when it got the last."""

    def passed(self, peer: str, level: bool, now: float) -> None:
        """Another, far worse placed, took an office that was open for that peer. `level`: its head was new
        enough to be elected."""
        marks = self._marks(peer, now) + (LEVEL if level else BEHIND)
        self._known.pop(peer, None)
        self._known[peer] = min(marks, LIMIT), now
        while len(self._known) > MAX_PEERS:
            del self._known[next(iter(self._known))]

    def took(self, peer: str) -> None:
        """It is in office."""
        self._known.pop(peer, None)

    def counts(self, peer: str, now: float) -> bool:
        """Whether others leave offices to that peer."""
        return self._marks(peer, now) < LIMIT

    def _marks(self, peer: str, now: float) -> int:
        marks, at_s = self._known.get(peer, (0, now))
        return marks if now - at_s < FORGET_S else 0
