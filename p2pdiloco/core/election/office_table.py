"""States of a member towards a group's office, and their transitions (`core.election.office`)."""

from __future__ import annotations

from enum import Enum, auto

from p2pdiloco.util import direct_members


@direct_members
class OfficeState(Enum):
    """States of this member towards the office."""

    VACANT = auto()
    FOLLOWING = auto()
    CANDIDATE = auto()
    HOLDING = auto()


@direct_members
class OfficeSignal(Enum):
    """Causes for a member's state to change."""

    STAND = auto()
    LOSE = auto()
    WIN = auto()
    FOLLOW = auto()
    OPEN = auto()


V, F, C, H = OfficeState.VACANT, OfficeState.FOLLOWING, OfficeState.CANDIDATE, OfficeState.HOLDING
OFFICE_TABLE = {
    (V, OfficeSignal.STAND): C,
    (V, OfficeSignal.FOLLOW): F,
    (F, OfficeSignal.FOLLOW): F,
    (F, OfficeSignal.OPEN): V,
    (C, OfficeSignal.LOSE): V,
    (C, OfficeSignal.WIN): H,
    (C, OfficeSignal.FOLLOW): F,
    (H, OfficeSignal.OPEN): V,
    (H, OfficeSignal.FOLLOW): F,
}
