"""Holders that did not deliver what they said they had: left alone for a while, longer every time.

Without it one member that boasts of a heavy head, and cannot or will not give it, keeps all others from
the heads that they could have had.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pdiloco.core.timing import backoff_s

DISTRUST_S = 30.0
"""First pause after something false (a wrong digest, a wrong signature, garbage); at most 16 times this."""
MAX_DOUBTED = 512
INNOCENT = frozenset({"unreachable", "not-ready", "gone", "cut", "behind", "busy"})
"""Why an honest holder may fail to deliver: the network's reasons, and what time brings."""


class Doubts:
    """Of one fragment's holders. Bounded; the longest known doubt is forgotten first."""

    def __init__(self) -> None:
        self._until: dict[str, tuple[int, float]] = {}

    def add(self, peer: str, reason: str, retry_s: float, now: float) -> bool:
        """It failed, for this reason. Whether that is its fault."""
        fault = reason not in INNOCENT
        count, _ = self._until.pop(peer, (0, 0.0))
        pause_s = backoff_s(DISTRUST_S if fault else retry_s, count + 1)
        self._until[peer] = (count + 1, now + pause_s)
        while len(self._until) > MAX_DOUBTED:
            del self._until[next(iter(self._until))]
        return fault

    def drop(self, peer: str) -> None:
        """It delivered."""
        self._until.pop(peer, None)

    def until_s(self, peer: str) -> float:
        """When it may be asked again; long ago for whom nobody doubts."""
        return self._until.get(peer, (0, -1e18))[1]

    def first_s(self, peers: Iterable[str]) -> float | None:
        """When the first of these may be asked; None: there are none."""
        return min((self.until_s(peer) for peer in peers), default=None)
