"""Who measures the global parameters: one member at a time, and all hear of the result.

For so many versions as a term has, rendezvous hashing over the live learners names an order, without a word
exchanged. The first measures when the newest result that it knows of is older than the interval; each later
one is half an interval more patient, so somebody does when the first is gone or cannot. Results travel in
presence records. A member knows the learners of its own neighbourhood: a run of more than
`group.size` members has one measurement per interval and neighbourhood, not one in all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from p2pdiloco.core.election.rendezvous import ranking
from p2pdiloco.daemon import wire

PATIENCE = 0.5
"""Of an interval, for each rank."""
OFFICE = "evaluation"


class Turns:
    """What one member knows of results, and whether it is its turn."""

    def __init__(self, run: str, me: str, interval_s: float, first_s: float, term_versions: int) -> None:
        """`first_s`: so early the first result may be, in seconds after our start."""
        self._run, self._me = run, me
        self._interval_s, self._term_versions = interval_s, term_versions
        self._known_s = -math.inf
        self._first_s = min(first_s, interval_s)
        self._began_s: float | None = None
        self.newest: wire.Result | None = None
        self.by = ""
        """Who measured it."""
        self.own: wire.Result | None = None

    def mine(self, now: float, number: int, learners: Sequence[str]) -> bool:
        """Whether to measure now. `number`: of the first fragment's version; `learners`: live ones."""
        if self._began_s is None:
            self._began_s = now
            self._known_s = max(self._known_s, now - self._interval_s + self._first_s)
        if now - self._known_s < self._interval_s:
            return False  # not even for the first
        order = ranking(self._run, OFFICE, 0, number // self._term_versions, {*learners, self._me})
        patience_s = self._interval_s * (1 + PATIENCE * order.index(self._me))
        return now - self._known_s >= patience_s

    def asked(self, now: float) -> None:
        """We measure: not again before the next interval, whatever comes of it."""
        self._known_s = now

    def measured(self, result: wire.Result, now: float) -> None:
        """We have a result."""
        self.own = result
        self._take(self._me, result, now)

    def heard(self, peer: str, result: wire.Result, now: float) -> None:
        """A peer's record has one; a newer state of the run counts more."""
        if self.newest is None or result.merges > self.newest.merges:
            self._take(peer, result, now)

    def _take(self, peer: str, result: wire.Result, now: float) -> None:
        self.newest, self.by, self._known_s = result, peer, now
