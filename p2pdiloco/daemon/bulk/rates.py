"""Rates at which peers took or gave what was long enough to tell: whom to choose next time."""

from __future__ import annotations

from collections.abc import Callable

from p2pdiloco.util import BoundedDict

MAX_PEERS = 256
FORGET_S = 600.0
"""Time after its last transfer until a peer is unknown again: whoever was slow is tried anew."""


class Rates:
    """Moving averages of the last 256 peers in bytes per second; the newest transfer counts half."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._known: BoundedDict[str, tuple[float, float]] = BoundedDict(MAX_PEERS)
        """Rate of each peer, and when it was last measured; the oldest first."""

    def measured(self, peer: str, nbytes: int, seconds: float) -> float:
        """Take a transfer's bytes and time in; return its own rate."""
        rate = nbytes / max(seconds, 1e-6)
        self._known[peer] = (self.of(peer, rate) + rate) / 2, self._now()
        return rate

    def of(self, peer: str, unknown: float) -> float:
        """Return a peer's rate in bytes per second, or `unknown`."""
        rate, at_s = self._known.get(peer, (unknown, self._now()))
        return rate if self._now() - at_s <= FORGET_S else unknown

    def __contains__(self, peer: str) -> bool:
        return self.of(peer, -1.0) >= 0
