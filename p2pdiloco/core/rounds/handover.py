"""Handover of a closed round: what is to be merged, and who takes it.

The topmost group's goes to `core.rounds.publishing`, any other's to `core.groups.delegate`. Both ask the
daemon for the arithmetic by an effect (`daemon.payloads.merging`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import Ticket
from p2pdiloco.core.rounds.inbox import Held

Unusable = tuple[tuple[Ticket, Verdict], ...]
"""Inputs in which a merge found a fault, by their tickets."""


class ClosedRound(Protocol):
    """Round that hears what becomes of its job (`core.rounds.round`)."""

    def awaits(self, term: int, number: int) -> bool:
        """Tell whether this merge is still wanted."""

    def merge_done(self) -> None:
        """Note that the merge worker is done."""

    def published(self, sync_s: float | None) -> None:
        """Note that what was merged is in the chain, `sync_s` after the round closed."""

    def failed(self, reason: str, now: float, unusable: Unusable = ()) -> None:
        """Hand over again without what was unusable; or lay the office down: nothing could be merged, for
        reasons of ours, or it could not be kept."""


@dataclass(frozen=True)
class Job:
    """Inputs of one merge, as a closed round hands them over."""

    round: ClosedRound
    group: str
    term: int
    number: int
    """Number of the version for which it is meant."""
    held: tuple[Held, ...]
    due: bool
    """True: it began with what was due, not with a call from above."""
    closed_s: float


class Merger(Protocol):
    """Merger of a closed round: the publisher of versions, or the delegate that sends a partial merge up."""

    makes_version: bool
    """True: the version is made here, and the fragment's spare copy is needed."""

    def begin(self, job: Job, missing: int, expected: int) -> None:
        """Merge what is in."""

    def withdraw(self, now: float) -> bool:
        """Forget what was not finished: the office is lost. False: it cannot be stopped any more."""

    def chain_moved(self, now: float) -> None:
        """Take in that the chain has a new head."""

    def hurry(self, now: float) -> None:
        """Do not wait any longer: the group above calls and has nothing of us."""
