"""What an orderly end leaves unmerged, and how much of it the next life may take up again.

A displacement is what the learner made since what the chain has of it. A copy of its first part (the slot)
may be with a syncer when we go, and be merged after that, or not. Taking up again what is merged as well
would count tokens twice, dropping what nobody merged would lose them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from p2pdiloco.core.api.types import Stamp

TakeUp = Literal["all", "rest", "none"]
"""Of a saved displacement: the whole, what was made after the copy in the slot, or nothing."""


class Unmerged(msgspec.Struct, frozen=True):
    """One fragment's displacement at an orderly end, by what the chain may come to have of it."""

    whole_at: tuple[Stamp, ...]
    """Our watermarks in the chain at which nothing of the displacement is merged."""
    slot: Stamp | None = None
    """Of the contribution whose copy is in the slot, if there is one."""
    sent: bool = False
    """A syncer may have all of the slot's: it is left to it, however long a merge takes."""
    doubts: tuple[Stamp, ...] = ()
    """Contributions that are in the whole displacement and that somebody may have: merged by any chance, the
    displacement must go."""

    def take_up(self, watermark: Stamp) -> tuple[TakeUp, tuple[Stamp, ...]]:
        """(how much a new life may take up while the chain has of us what `watermark` says, what that life
        must doubt until a contribution that contains it is merged)."""
        if self.slot is not None and watermark == self.slot:
            return "rest", ()
        if watermark not in self.whole_at:
            return "none", ()
        return ("rest", ()) if self.sent else ("all", self.doubts)
