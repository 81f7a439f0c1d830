"""How a member may stand towards a group's office, and what moves it (`core.election.office` says when)."""

from __future__ import annotations

from enum import Enum, auto

from p2pdiloco.core.machine import direct_members


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
