"""Attendance of a round: which children are missing, and whether a round may begin.

Rules: docs/protocol/rounds.md, section 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.election.electorate import Electorate
from p2pdiloco.core.rounds.inbox import Inbox
from p2pdiloco.core.timing import RHYTHM_SHARE
from p2pdiloco.util import BoundedDict

IN_VAIN = 3
"""Rounds that wait for a child in vain, before others wait for it no more."""
MAX_IN_VAIN = 512


class Attendance:
    """Children of one group, as its syncer counts them."""

    def __init__(self, context: FragmentContext, level: int, electorate: Electorate, inbox: Inbox) -> None:
        self._context = context
        self._shared = context.shared
        self._level = level
        self._electorate = electorate
        self._inbox = inbox
        self._passed: set[str] = set()
        """Children that have nothing to send this time."""
        self._in_vain: BoundedDict[str, int] = BoundedDict(MAX_IN_VAIN)
        """Children that were waited for in vain, and how often in a row."""

    def begin(self) -> None:
        """Count anew, for another round."""
        self._passed.clear()

    def passes(self, child: str) -> None:
        """Note that a child has nothing to send this time. A newcomer's words do not say that it will."""
        self._passed.add(child)
        if not self._electorate.newcomer(child):
            self._in_vain.pop(child, None)

    def came(self, child: str) -> None:
        """Note that a child has sent something after all."""
        self._passed.discard(child)
        self._in_vain.pop(child, None)

    def closed_without(self, missing: Iterable[str]) -> None:
        """Note for whom a round waited in vain. For who is silent time and again, and may be no learner at
        all, others will not wait; what it sends is merged all the same."""
        for child in missing:
            if self._may_be_ghost(child):
                self._in_vain[child] = self._in_vain.get(child, 0) + 1

    def quorum(self, now: float) -> int:
        """Offers with which a round may begin."""
        return max(1, min(self._shared.config.quorum, self._electorate.reachable(now)))

    def patience_s(self, now: float) -> float:
        """Seconds for which a first offer waits for company: an interval of learners."""
        step_s = self._shared.median_step_s(now)
        return max(self._shared.timing.hold_floor_s, self._shared.config.inner_steps * step_s)

    def missing(self, now: float) -> list[str]:
        """Children that are expected, are not in and have not passed."""
        have = {held.child for held in self._inbox.ready()} | self._passed
        coming = [
            held.child for held in self._inbox.starting()
        ]  # also whose heartbeats its upload keeps back
        expected = self._electorate.expected(now)
        if self._in_vain:
            expected = [child for child in expected if not self._ghost(child)]
        return [child for child in dict.fromkeys([*expected, *coming]) if child not in have]

    def _ghost(self, child: str) -> bool:
        return self._in_vain.get(child, 0) >= IN_VAIN and self._may_be_ghost(child)

    def _may_be_ghost(self, child: str) -> bool:
        return not self._level or self._electorate.newcomer(child)

    def not_before_s(self, now: float) -> float:
        """Compute the time before which no round begins that a child is missing in.

        A learner whose work came too late for a version is due again as soon as it is told. A round of its
        own then, in which the others have a step or two, would move all by a whole outer step for the sake of
        one: it waits until there is more to merge. Only a syncer that leaves cannot wait.
        """
        if self._level or self._shared.leaving:
            return -math.inf
        interval_s = self._shared.config.inner_steps * self._shared.fastest_step_s(now)
        return self._context.moved_s + RHYTHM_SHARE * interval_s

    def too_soon(self, now: float) -> bool:
        """Tell whether a round has to wait for company, or for that time."""
        return now < self.not_before_s(now) and bool(self.missing(now))
