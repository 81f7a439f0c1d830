"""Hierarchy of groups, as a round and its merger see it: what is above and below them on this node."""

from __future__ import annotations

from typing import Protocol

from p2pdiloco.core.api.messages import Closing, Pass
from p2pdiloco.core.api.partials import SignedPartial
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import Ticket
from p2pdiloco.core.context import Tenure


class Hierarchy(Protocol):
    """Seats of this node above and below a level (`core.groups.seats`). Level 0: the leaf group."""

    def call_own(self, level: int, call: Closing, now: float) -> None:
        """Call this node as a child of its own group on that level: its learner, or the group below."""

    def pass_up(self, peer: str, message: Pass, now: float) -> None:
        """Tell the syncer above that a group has nothing."""

    def office_above(self, level: int) -> Tenure | None:
        """Find the office of the group above that level, if we have a seat there."""

    def hand_up(self, level: int, signed: SignedPartial, ticket: Ticket, now: float) -> Verdict:
        """Put that level's partial into our own inbox of the group above."""

    def take_back(self, level: int, group: str) -> None:
        """Take that group's partial out of our own inbox of the group above, if it is there. It is not to be
        merged, unless that has begun."""
