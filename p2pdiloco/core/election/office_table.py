"""How a member may stand towards a group's office, and what moves it (`core.election.office` says when)."""

from __future__ import annotations

from enum import Enum, auto

from p2pdiloco.core.machine import direct_members

NOT_IN_OFFICE = "the syncer says that it is not in office"
"""Why a holder is suspected that refused a contribution."""
COUNTED_ON = "the syncer in office is alive"
"""Why a voter keeps to it."""


@direct_members
class OfficeState(Enum):
    """Where this member stands towards the office."""

    VACANT = auto()
    FOLLOWING = auto()
    CANDIDATE = auto()
    HOLDING = auto()


@direct_members
class OfficeSignal(Enum):
    """What moves it."""

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
