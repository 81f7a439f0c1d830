"""Guidance of a node that begins with nothing: whom its person and the run's owner named to believe.

1. What the owner vouched for: members that had worked by then. What most of those that are here stand on is
   the run; without any of them a newcomer waits.
2. Else a peer that the person named to join through, as long as it delivers.
3. Else what most confirmed members stand on.

Rules: docs/protocol/trust.md, section 5.
"""

from __future__ import annotations

import math

from p2pdiloco.core.api.config import Timing
from p2pdiloco.core.api.reasons import Basis
from p2pdiloco.core.api.types import Vouch
from p2pdiloco.core.members.view import View

STUCK_TIMES = 15
"""Waits (`resume_alone_s`) for a joined peer after which what is under way keeps nobody waiting any more."""


class Guidance:
    """Guidance of one node, the same for all its fragments."""

    def __init__(self, view: View, timing: Timing) -> None:
        self._view = view
        self._timing = timing
        self.fresh = False
        """True: this life began with nothing saved, so that others' word is all that there is."""
        self.anchors: frozenset[str] = frozenset()
        """Peers that the person named to join through, and that are members."""
        self.vouches: dict[int, Vouch] = {}
        """Newest word of the owner, by fragment."""
        self.witnesses: frozenset[str] = frozenset()
        """Members that had worked when the owner vouched."""
        self._first_s = self._since_s = math.inf
        """Times since which confirmed members are here, and since which nothing of what we lack has come."""
        self._under_way: set[int] = set()
        self._anchors_failed = False

    def begin_with_nothing(self) -> None:
        """Note that nothing was saved."""
        self.fresh = True

    def told(self, anchors: tuple[str, ...], vouches: tuple[Vouch, ...]) -> None:
        """Take in what person and owner say now."""
        self.anchors = frozenset(anchors)
        self.vouches = {vouch.fragment: vouch for vouch in vouches}
        self.witnesses = frozenset(peer for vouch in vouches for peer in vouch.members)

    def hears(self, now: float) -> None:
        """Note that a confirmed member was heard."""
        if self._first_s == math.inf:
            self._first_s = self._since_s = now

    def asks(self, fragment: int, under_way: bool) -> None:
        """Note whether something of a fragment is under way."""
        (self._under_way.add if under_way else self._under_way.discard)(fragment)

    def progressed(self, now: float) -> None:
        """Note that something came."""
        self._since_s = max(now, self._first_s)

    def basis(self, fragment: int, confirmed: list[str], now: float) -> Basis:
        """Choose whose word counts now."""
        if fragment in self.vouches:
            return Basis.VOUCHED
        if not self._anchors_failed and self._may_deliver(confirmed):
            if not self._late(now):
                return Basis.JOINED
            self._anchors_failed = True
        return Basis.MOST

    def _may_deliver(self, confirmed: list[str]) -> bool:
        """Tell whether a joined peer is confirmed, or may turn out to be."""
        return any(peer in confirmed or self._view.progress(peer) is None for peer in self.anchors)

    def _late(self, now: float) -> bool:
        patience_s = self._timing.resume_alone_s
        return now - self._since_s >= patience_s * (STUCK_TIMES if self._under_way else 1)

    def heard_enough(self, now: float) -> bool:
        """Tell whether everybody who is listed has spoken, or had the time to."""
        waited_s = now - self._first_s
        return waited_s >= self._timing.genesis_wait_s or (waited_s >= 0 and not self._view.unheard(now))

    def waited_long(self, now: float) -> bool:
        """Tell whether no more agreement is to be waited for."""
        return now - self._first_s >= self._timing.resume_alone_s
