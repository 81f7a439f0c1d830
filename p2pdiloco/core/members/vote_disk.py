"""Ability of this node's disk to save votes: a vote that is not durable is not given.

A member whose disk is full would so stand in the way of every majority that needs it, two members' always. So
it says that it has no vote until its disk takes one, and counts in no majority meanwhile, its own view's
included (docs/protocol/election.md, section 9). It trains, contributes and follows as before.
"""

from __future__ import annotations

from collections.abc import Callable

TRY_EVERY_S = 3.0
"""Interval at which a disk that refused a vote is tried with it again."""
HEARD_S = 1.0
"""Pause before a member that has a vote again stands: another that has its own again in the same moment is
heard of first."""


class VoteDisk:
    """State of the disk for votes. It tries by itself whether there is room again.

    Args:
        on_change: called with the reason once votes can be saved no more, or again.
    """

    def __init__(self, on_change: Callable[[str, float], None]) -> None:
        self.works = True
        """True: votes can be saved, for all that is known."""
        self._on_change = on_change
        self._again: Callable[[], None] = lambda: None
        self._try_s = 0.0

    def saved(self, now: float) -> None:
        """Take in that the disk took a vote."""
        if not self.works:
            self.works = True
            self._on_change("votes can be saved again", now)

    def failed(self, again: Callable[[], None], why: str, now: float) -> None:
        """Take in that the disk did not. `again` saves that vote once more: it binds us, whoever heard of
        it."""
        self._again, self._try_s = again, now + TRY_EVERY_S
        if self.works:
            self.works = False
            self._on_change(f"no vote until one can be saved: {why}", now)

    def poll(self, now: float) -> None:
        """Try again, if it is time."""
        if not self.works and now >= self._try_s:
            self._try_s = now + TRY_EVERY_S
            self._again()
