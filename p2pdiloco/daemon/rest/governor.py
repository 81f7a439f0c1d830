"""Governor of rests: puts what the sources find together, steadily, so that the learner does not flap."""

from __future__ import annotations

from collections.abc import Sequence

from p2pdiloco.daemon.rest.reasons import Finding, Rest, RestReason
from p2pdiloco.daemon.rest.sources import RestSource

BEGINS_AFTER_S = {RestReason.BATTERY: 5.0, RestReason.TEMPERATURE: 10.0, RestReason.POWER: 15.0}
"""Time for which other reasons must hold before the learner rests; it is 0 for who is not here."""
ENDS_AFTER_S = 30.0
"""Time for which other reasons must not hold before it goes on."""
LEAST_S = 60.0
"""Least time of a rest for other reasons: what is handed over, and begun again, has its price."""
_ORDER = {reason: number for number, reason in enumerate(RestReason)}


class _Held:
    """Reason that was seen."""

    def __init__(self, finding: Finding, now: float, wall: float) -> None:
        self.finding = finding
        self.since = finding.since or wall
        self.seen_first_s = self.seen_last_s = now
        self.began_s: float | None = None
        """Time since which the learner rests for it; None: it does not, yet."""


class Governor:
    """Decides whether the learner rests."""

    def __init__(self, sources: Sequence[RestSource] = ()) -> None:
        self._sources = list(sources)
        self._held: dict[RestReason, _Held] = {}
        self._is_changed = False

    def use(self, sources: Sequence[RestSource]) -> None:
        """Go by these sources from now on. A reason that none of them finds ends with the next look."""
        self._sources, self._is_changed = list(sources), True

    def look(self, now: float, wall: float, words: Sequence[Finding] = ()) -> Rest | None:
        """Look at everything. `now` is a clock that is never set, `wall` the time of day. `words`: what
        people said.

        Returns the rest for the first reason that holds; None: it trains.
        """
        looked = (source.look(wall) for source in self._sources)
        found = [*words, *(finding for finding in looked if finding is not None)]
        for finding in found:
            held = self._held.setdefault(finding.reason, _Held(finding, now, wall))
            held.finding, held.seen_last_s = finding, now
            if held.began_s is None and now - held.seen_first_s >= BEGINS_AFTER_S.get(finding.reason, 0.0):
                held.began_s = now
        holding = {finding.reason for finding in found}
        stays = self._held.items() if not self._is_changed else ()
        lasting = {reason for reason, held in stays if _lasts(reason, held, now)}
        self._held = {r: h for r, h in self._held.items() if r in holding | lasting}
        self._is_changed = False
        resting = [held for held in self._held.values() if held.began_s is not None]
        if not resting:
            return None
        first = min(resting, key=lambda held: _ORDER[held.finding.reason])
        return Rest(first.finding.reason, first.since, first.finding.words, first.finding.ends)


def _lasts(reason: RestReason, held: _Held, now: float) -> bool:
    """Tell whether a reason that is not found any more goes on to count."""
    if reason.is_at_once or held.began_s is None:
        return False
    return now - held.seen_last_s < ENDS_AFTER_S or now - held.began_s < LEAST_S
