"""Idle syncers: elected, waited for as long as anybody is, and no version came. They are the last in turn.

Else one fast member that makes nothing would be elected again and again, each time for a patience of all.

Rules: docs/protocol/election.md, section 8.
"""

from __future__ import annotations

from p2pdiloco.util import BoundedDict

FIRST_S = 60.0
"""Time for which others come first; twice as long after every further time, up to `LONGEST_S`."""
LONGEST_S = 3600.0
MOST = 256


class Idle:
    """Syncers that made nothing of one group's office, as this member saw, until they make a version."""

    def __init__(self) -> None:
        self._known: BoundedDict[str, tuple[int, int, float]] = BoundedDict(MOST)
        """The newest such term, how many there were in a row, and until when others come first."""

    def was(self, syncer: str, term: int, now: float) -> None:
        """Note that this syncer let us wait for nothing in this term."""
        before, times, _ = self._known.get(syncer, (0, 0, 0.0))
        if term > before:
            self._known[syncer] = term, times + 1, now + min(FIRST_S * 2.0 ** min(times, 16), LONGEST_S)

    def made(self, syncer: str, term: int) -> None:
        """Note that this syncer made a version in this term."""
        if syncer in self._known and self._known[syncer][0] <= term:
            del self._known[syncer]

    def now(self, now: float) -> frozenset[str]:
        """List those after whom nobody comes for a while."""
        return frozenset(peer for peer, (_, _, until_s) in self._known.items() if now < until_s)
