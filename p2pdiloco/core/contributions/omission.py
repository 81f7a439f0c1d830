"""Watch over what a syncer withholds: contributions that it leaves out, and versions that nobody gets.

A syncer merges all that is here when a round closes. So what it has is in its next version, or in the one
after that, if the next was in the making. A version without it is a miss; it is then offered again, and an
honest syncer that had to drop it takes it. Who says time and again that it has it, and makes versions without
it, leaves it out on purpose.

Nor is a syncer of use that refuses our work because its chain is another, where nobody can have that chain.

Rules: docs/protocol/exactly-once.md, section 5.
"""

from __future__ import annotations

from p2pdiloco.core.api.reasons import Suspicion, Verdict
from p2pdiloco.core.api.types import NEVER, Head
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.contributions.patience import Patience
from p2pdiloco.core.contributions.pending import Pending, SendState

MOST_MISSES = 3
"""Times in a row that a syncer may say that it has a contribution, and make a version without it."""
MOST_AHEAD = 4
"""Versions that a syncer can be ahead of us where we take in its versions one by one. It may say that it is
further, so that none counts as made since."""
ELSEWHERE = (
    Verdict.ALREADY_MERGED,
    Verdict.OVERLAP,
    Verdict.BEHIND,
    Verdict.UNKNOWN_BASE,
    Verdict.STALE_BASE,
)
"""Words of a syncer whose chain is another than ours, or further."""


class Withheld:
    """Watch over the syncer that is to merge the first contribution of the queue."""

    def __init__(self, context: FragmentContext, patience: Patience) -> None:
        self._context, self._patience = context, patience
        self._of = NEVER, ""
        self._from: int | None = None
        """First version that is to have it; None: missed or refused since, or never said to be."""
        self._misses = 0
        self._elsewhere: tuple[str, int, float] | None = None
        """Syncer that said that its chain is another, than which version of ours, and since when."""

    def acknowledged(self, pending: Pending, theirs: Head | None) -> None:
        """Take in that its syncer, who has that head, has a contribution. What it said before still binds it:
        else who is asked again and again, as rounds last longer than our patience, never misses any."""
        if self._of != (pending.stamp, pending.peer):
            self._of, self._misses, self._from = (pending.stamp, pending.peer), 0, None
        if self._from is not None:
            return
        ours = self._context.chain.head.number
        ahead = theirs.number - ours if theirs is not None else 0
        self._from = ours + min(max(0, ahead), MOST_AHEAD) + 2

    def missed(self, pending: Pending, now: float) -> bool:
        """Look at a new version of our chain. Tell whether it is to have that contribution, and has not."""
        header, office = self._context.chain.header, self._context.leaf.office
        held = pending.state is SendState.HELD and self._of == (pending.stamp, pending.peer)
        if self._from is None or header.number < self._from or header.groups > 1:
            return False
        if not held or header.syncer != pending.peer:
            return False
        self._misses, self._from = self._misses + 1, None
        if self._misses >= MOST_MISSES and pending.peer == office.syncer:
            self._context.shared.distrust.add(pending.peer, now)
            office.suspect(Suspicion.LEFT_OUT)
        return True

    def refused(self, pending: Pending, verdict: Verdict, behind: bool, now: float) -> None:
        """Take in that a syncer refused it. `behind`: a version is on its way to us, or can be had."""
        self._from = None
        office, ours = self._context.leaf.office, self._context.chain.head.number
        if verdict not in ELSEWHERE or pending.peer != office.syncer:
            return
        if self._elsewhere is None or self._elsewhere[:2] != (pending.peer, ours):
            self._elsewhere = pending.peer, ours, now
        waited_s = now - self._elsewhere[2]
        if not behind and waited_s > self._patience.wait_s(0.0, Verdict.HELD, now):
            office.suspect(Suspicion.NO_VERSION, waited_s=round(waited_s, 1))
