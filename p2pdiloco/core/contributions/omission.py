"""Versions that leave out what their syncer says that it has.

A syncer merges all that is here when a round closes. So what it has is in its next version, or in the one
after that, if the next was in the making. A version without it is a miss; it is then offered again, and an
honest syncer that had to drop it takes it. Who says time and again that it has it, and makes versions without
it, leaves it out on purpose.

Rules: docs/protocol/exactly-once.md, section 5.
"""

from __future__ import annotations

from p2pdiloco.core.api.types import NEVER, Head
from p2pdiloco.core.api.versions import VersionHeader
from p2pdiloco.core.contributions.pending import Pending, SendState

MOST_MISSES = 3
"""Times in a row that a syncer may say that it has a contribution, and make a version without it."""
MOST_AHEAD = 4
"""Versions that a syncer can be ahead of us where we take in its versions one by one. It may say that it is
further, so that none counts as made since."""


class Omissions:
    """Misses of the contribution that is first in the queue, by the syncer that has it."""

    def __init__(self) -> None:
        self._of = NEVER, ""
        self._from = self.misses = 0

    def acknowledged(self, pending: Pending, theirs: Head | None, ours: Head) -> None:
        """Take in that its syncer, who has that head, has a contribution."""
        if self._of != (pending.stamp, pending.peer):
            self._of, self.misses = (pending.stamp, pending.peer), 0
        ahead = theirs.number - ours.number if theirs is not None else 0
        self._from = ours.number + min(max(0, ahead), MOST_AHEAD) + 2

    def missed(self, pending: Pending, header: VersionHeader) -> bool:
        """Look at a new version of our chain. Tell whether it is to have that contribution, and has not."""
        held = pending.state is SendState.HELD and self._of == (pending.stamp, pending.peer)
        if not held or header.syncer != pending.peer or header.number < self._from or header.groups > 1:
            return False
        self.misses += 1
        return True
