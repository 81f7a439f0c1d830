"""Inquiry after the certificate of an office: who claims to hold it is asked for the proof.

Rules: docs/protocol/election.md, section 10.
"""

from __future__ import annotations

from p2pdiloco.core.api.messages import OfficeQuery
from p2pdiloco.core.api.types import WHOLE_RUN
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.election.electorate import Electorate
from p2pdiloco.util import BoundedDict

MAX_ASKED = 64
"""Claimants that were asked last and are remembered."""


class Inquiry:
    """Inquiry in one group, from when our seat in it was taken."""

    def __init__(self, context: FragmentContext, group: str, electorate: Electorate, now: float) -> None:
        self._shared = context.shared
        self._electorate = electorate
        self._fragment = context.index
        self._group = group
        self._since_s = now
        self._asked_s: BoundedDict[str, float] = BoundedDict(MAX_ASKED)
        """Times at which claimants were asked: each has its own pause, or one that claims what it has not,
        again and again, would keep us from asking whoever has it."""

    def claimed(self, peer: str, term: int, known_term: int, now: float) -> None:
        """Ask for the certificate of a claim above the term of ours, now and then."""
        due_s = self._asked_s.get(peer, -1e18) + self._shared.timing.query_s
        if term > known_term and now >= due_s:
            self._asked_s[peer] = now
            self._shared.out.send(peer, OfficeQuery(self._group, self._fragment, known_term))

    def finds_holder(self, now: float) -> bool:
        """Tell whether a seat is new to us only, and its group has a syncer; ask that for its certificate. We
        have none. Who could not be elected there claims what he likes."""
        if self._group == WHOLE_RUN:
            return False
        claims = self._shared.claims.of(self._fragment, self._group)
        live = [
            (term, peer)
            for peer, term in claims.items()
            if self._electorate.decides(peer, now) and self._shared.view.alive(peer, now)
        ]
        if not live or now >= self._since_s + self._shared.timing.suspect_s:
            return False
        term, peer = max(live)
        self.claimed(peer, term, 0, now)
        return True
