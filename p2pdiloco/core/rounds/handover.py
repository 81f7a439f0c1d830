"""What a closed round hands over to be merged, and to whom."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from p2pdiloco.core.rounds.inbox import Held


class ClosedRound(Protocol):
    """What becomes of a job is told to the round that it is from (`core.rounds.round`)."""

    def awaits(self, term: int, number: int) -> bool:
        """Whether this merge is still wanted."""

    def merged(self) -> None:
        """The merge worker is done."""

    def published(self, sync_s: float | None) -> None:
        """What was merged is in the chain, `sync_s` after the round closed."""

    def failed(self, reason: str) -> None:
        """Nothing could be merged, or it could not be kept."""


@dataclass(frozen=True)
class Job:
    """What a round hands over to be merged."""

    round: ClosedRound
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
