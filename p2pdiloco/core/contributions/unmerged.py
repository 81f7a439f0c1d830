"""Work that an orderly end leaves unmerged, and how much of it the next life may take up again.

A displacement is what the learner made since what the chain has of it. A copy of its first part (the slot)
may be with a syncer when we go, and be merged after that, or not. Taking up again what is merged as well
would count tokens twice; dropping what is not merged would lose them.

Rules: docs/protocol/exactly-once.md, section 6.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from p2pdiloco.core.api.types import Stamp

TakeUp = Literal["all", "rest", "none"]
"""Part of a saved displacement: the whole, what was made after the copy in the slot, or nothing."""


class Unmerged(msgspec.Struct, frozen=True):
    """Displacement of one fragment at an orderly end, by what the chain may come to have of it."""

    whole_at: tuple[Stamp, ...]
    """Watermarks of ours in the chain at which nothing of the displacement is merged."""
    slot: Stamp | None = None
    """Stamp of the contribution whose copy is in the slot, if there is one."""
    sent: bool = False
    """True: a syncer may have all of the slot's; it is left to it, however long a merge takes."""
    doubts: tuple[Stamp, ...] = ()
    """Contributions that are in the whole displacement and that a peer may have: merged by any chance, the
    displacement must go."""

    def take_up(self, watermark: Stamp) -> tuple[TakeUp, tuple[Stamp, ...]]:
        """Decide how much a new life may take up while the chain has of us what `watermark` says.

        Returns (that part, what the new life must doubt until a contribution that contains it is merged).
        """
        if self.slot is not None and watermark == self.slot:
            return "rest", ()
        if watermark not in self.whole_at:
            return "none", ()
        return ("rest", ()) if self.sent else ("all", self.doubts)
