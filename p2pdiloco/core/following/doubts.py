"""Doubts about holders that did not deliver: left alone for a while, longer every time.

Else one member that boasts of a heavy head, and cannot or will not give it, would keep all others from the
heads that they could have had.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pdiloco.bounded import BoundedDict
from p2pdiloco.core.timing import backoff_s

DISTRUST_S = 30.0
"""First pause after something false (a wrong digest, a wrong signature, garbage); at most 16 times this."""
LONELY_S = 3.0
"""First pause of a holder that alone has its version: a payload may be damaged once."""
LONELY_TIMES = 3
MAX_DOUBTED = 512
TRUSTED = (0, -1e18, -1e18)
"""Entry of a holder without doubt: (failures, left alone until, left alone until if nobody else has it)."""


class Doubts:
    """Doubts about the holders of one fragment. Bounded; the longest known doubt is forgotten first."""

    def __init__(self) -> None:
        self._until: BoundedDict[str, tuple[int, float, float]] = BoundedDict(MAX_DOUBTED)

    def add(self, peer: str, fault: bool, retry_s: float, now: float) -> None:
        """Count a failure of the holder, by its own fault or not."""
        count = self._until.get(peer, TRUSTED)[0] + 1
        pause_s = backoff_s(DISTRUST_S if fault else retry_s, count)
        lonely_s = backoff_s(LONELY_S, count) if count <= LONELY_TIMES else pause_s
        self._until[peer] = (count, now + pause_s, now + min(pause_s, lonely_s))

    def drop(self, peer: str) -> None:
        """Forget the doubt: the holder delivered."""
        self._until.pop(peer, None)

    def open(self, peers: Iterable[str], now: float) -> set[str]:
        """Choose whom of these to ask now: those that are not in doubt, or else those that may be tried
        again."""
        found = {peer: self._until.get(peer, TRUSTED) for peer in peers}
        trusted = {peer for peer, (_, until_s, _) in found.items() if until_s <= now}
        return trusted or {peer for peer, (_, _, lonely_s) in found.items() if lonely_s <= now}

    def first_s(self, peers: Iterable[str]) -> float | None:
        """Find when the first of these may be asked if nobody else can be; None: there are none."""
        return min((self._until.get(peer, TRUSTED)[2] for peer in peers), default=None)
