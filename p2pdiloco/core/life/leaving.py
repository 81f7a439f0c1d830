"""Leaving on purpose: what is in flight is finished, offices are handed over, then good-bye.

Rules: docs/protocol/rounds.md, section 7.
"""

from __future__ import annotations

from p2pdiloco.core.api.effects import Left
from p2pdiloco.core.api.messages import Leaving
from p2pdiloco.core.fragment import Fragment
from p2pdiloco.core.shared import Shared

GATHER_SHARE = 0.5
"""Share of the time that leaving may take, during which a round of ours waits for answers. A merge, and
perhaps another round, follow."""


class Departure:
    """Way from the operator's wish to `Left`, in bounded time."""

    def __init__(self, shared: Shared, fragments: tuple[Fragment, ...]) -> None:
        self._shared = shared
        self._fragments = fragments
        self._leave_by_s: float | None = None

    def deadline(self) -> float | None:
        """Time at which our patience ends; None: we are not leaving, or have left."""
        return None if self._shared.departed else self._leave_by_s

    def begin(self, now: float) -> bool:
        """Begin to leave, as the operator wants. False: we leave already."""
        if self._leave_by_s is not None:
            return False
        leave_s = self._shared.timing.leave_s
        self._shared.leave(now + GATHER_SHARE * leave_s)
        self._leave_by_s = now + leave_s
        alone = not self._shared.view.live(now)
        for fragment in self._fragments:
            if self._shared.confirmed and (fragment.office.holding or not alone):
                fragment.flush()
        return True

    def _handed_over(self, now: float) -> bool:
        """Tell whether another member holds the newest versions that we made: else they would go away with
        us."""
        shared, view = self._shared, self._shared.view
        others = [peer for peer in view.live(now) if (p := view.progress(peer)) and p.confirmed]
        others = [peer for peer in others if shared.has_worked(peer)] or others
        made = [f for f in self._fragments if f.chain.signed.header.syncer == shared.me]
        return not others or all(
            any((h := view.head(peer, f.index)) and h.number >= f.chain.head.number for peer in others)
            for f in made
        )

    def poll(self, now: float) -> None:
        """Go, once nothing of ours is pending or our patience is over."""
        if self._leave_by_s is None or self._shared.departed:
            return
        remaining = [f for f in self._fragments if not f.leave(now)]
        helped = bool(self._shared.view.live(now))
        waits = any(helped or f.office.holding for f in remaining) or not self._handed_over(now)
        if now < self._leave_by_s and waits:
            return
        making = any(seat.round.busy for f in self._fragments for seat in f.seats.taken)
        for fragment in self._fragments:
            fragment.seats.leave(now, "leaving")
        heads = () if making else tuple(f.chain.head for f in self._fragments)
        for peer in self._shared.view.members(now):
            self._shared.out.send(peer, Leaving(self._shared.incarnation, heads))
        reason = (
            f"{len(remaining)} contributions were not merged in time" if remaining else "nothing was pending"
        )
        self._shared.out.record("leave", None, reason)
        self._shared.out.put(Left())
        self._shared.depart()
