"""What a closed round hands over to be merged, and to whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from p2pdiloco.core.rounds.inbox import Held

if TYPE_CHECKING:
    from p2pdiloco.core.rounds.round import Round


@dataclass(frozen=True)
class Job:
    """What a round hands over to be merged."""

    round: Round
    group: str
    term: int
    number: int
    """Of the version for which it is meant."""
    held: tuple[Held, ...]
    due: bool
    """It began with what was due, not with a call from above."""
    closed_s: float


class Finish(Protocol):
    """What becomes of a closed round."""

    last: bool
    """The version is made here: the fragment's spare copy is needed."""

    def begin(self, job: Job, missing: int, expected: int) -> None:
        """Merge what is in."""

    def withdraw(self, now: float) -> bool:
        """The office is lost: forget what was not finished. False: it cannot be stopped any more."""

    def chain_moved(self, now: float) -> None:
        """The chain has a new head."""

    def hurry(self, now: float) -> None:
        """The group above calls and has nothing of us."""
