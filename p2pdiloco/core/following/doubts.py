"""Doubts about holders that did not deliver: left alone for a while, longer every time.

Else one member that boasts of a heavy head, and cannot or will not give it, would keep all others from the
heads that they could have had.

Rules: docs/protocol/following.md, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pdiloco.core.timing import backoff_s
from p2pdiloco.util import BoundedDict

DISTRUST_S = 30.0
"""First pause after something false (a wrong digest, a wrong signature, garbage); at most 16 times this."""
BUSY_S = 32.0
"""Longest pause after what an honest holder may answer, too: busy, a cut stream, nothing at all. It doubles
up to this with every failure in a row: who boasts of a head and is always busy is asked ever more rarely."""
WASTED_TIMES = 4
WASTED_S = 120.0
"""Least pause is so many times as long as a holder let us wait for nothing, from its second failure in a row
on, and at most this."""
LONELY_S = 3.0
"""First pause of a holder that alone has its version: a payload may be damaged once."""
LONELY_TIMES = 3
MAX_DOUBTED = 512
NOW_S = -1e18


class Doubts:
    """Doubts about the holders of one fragment. Bounded; the longest known doubt is forgotten first."""

    def __init__(self) -> None:
        self._until: BoundedDict[str, tuple[int, float, float]] = BoundedDict(MAX_DOUBTED)
        """Holders that failed last time: (failures in a row, left alone until, left alone until if nobody
        else has it)."""
        self._in_a_row = 0
        self.again_s = NOW_S
        """Time before which nobody is asked who failed last time, whoever that is."""

    def add(self, peer: str, fault: bool, retry_s: float, now: float, waited_s: float = 0.0) -> None:
        """Count a failure of the holder, by its own fault or not. `waited_s`: how long we waited for it."""
        count = self._until[peer][0] + 1 if peer in self._until else 1
        self._in_a_row += 1
        self.again_s = now + backoff_s(retry_s, self._in_a_row)
        pause_s = backoff_s(DISTRUST_S, count) if fault else min(BUSY_S, retry_s * 2.0 ** min(count - 1, 16))
        if count > 1:
            pause_s = max(pause_s, min(WASTED_TIMES * waited_s, WASTED_S))
        lonely_s = backoff_s(LONELY_S, count) if count <= LONELY_TIMES else pause_s
        self._until[peer] = (count, now + pause_s, now + min(pause_s, lonely_s))

    def __contains__(self, peer: str) -> bool:
        """Tell whether the holder failed last time."""
        return peer in self._until

    def drop(self, peer: str) -> None:
        """Forget the doubt: the holder delivered."""
        self._until.pop(peer, None)
        self._in_a_row, self.again_s = 0, NOW_S

    def open(self, peers: Iterable[str], now: float) -> set[str]:
        """Choose whom of these to ask now: those that did not fail last time, or else those that were left
        alone for long enough, or for so long as is enough if nobody else has it. So nobody's boast comes
        before what others do have."""
        peers = list(peers)
        clean = {peer for peer in peers if peer not in self._until}
        if clean or now < self.again_s:
            return clean
        found = {peer: self._until[peer] for peer in peers}
        trusted = {peer for peer, (_, until_s, _) in found.items() if until_s <= now}
        return trusted or {peer for peer, (_, _, lonely_s) in found.items() if lonely_s <= now}

    def first_s(self, peers: Iterable[str]) -> float | None:
        """Find when the first of these may be asked if nobody else can be; None: there are none."""
        return min(
            (max(self._until[peer][2], self.again_s) if peer in self._until else NOW_S for peer in peers),
            default=None,
        )
