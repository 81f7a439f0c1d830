"""Amendments of a run: what its owner changes on the way, and from how many tokens on each change holds.

They change what learners do by themselves: the rate of inner steps, and whether there are any. Merges and
outer steps know nothing of them: whoever hears of one late only trains otherwise for a while, and still makes
the same versions as all others.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Annotated

from msgspec import Meta

from p2pdiloco.core.api.types import Count, Wire

MAX_AMENDMENTS = 32
MAX_MESSAGE = 240
LEAST_FACTOR, MOST_FACTOR = 1e-3, 1e3


class Going(StrEnum):
    """Ways for a run to go."""

    TRAIN = "train"
    PAUSE = "pause"
    END = "end"


class Amendment(Wire, frozen=True):
    """Change of a run by its owner. It says all that holds from then on, whatever earlier ones said."""

    number: Annotated[int, Meta(ge=1, le=1 << 53)]
    from_tokens: Count
    """Tokens merged into the run (the mean over its fragments) from which on it holds."""
    schedule_tokens: Count = 0
    """Length of the schedule; 0: the manifest's."""
    rate_factor: Annotated[float, Meta(ge=LEAST_FACTOR, le=MOST_FACTOR)] = 1.0
    """Factor of the inner learning rate."""
    going: Going = Going.TRAIN
    message: Annotated[str, Meta(max_length=MAX_MESSAGE)] = ""
    """Message to everybody who takes part; shown as soon as it is heard."""


def newest(amendments: Iterable[Amendment]) -> Amendment | None:
    """Return the amendment with the highest number, in force or not; None: there is none."""
    return max(amendments, key=lambda amendment: amendment.number, default=None)


def in_force(amendments: Iterable[Amendment], tokens: int) -> Amendment | None:
    """Return the amendment that holds where so many tokens are merged; None: only the manifest does."""
    return newest(amendment for amendment in amendments if amendment.from_tokens <= tokens)


def amended(amendments: tuple[Amendment, ...], by: Amendment) -> tuple[Amendment, ...]:
    """Add an amendment. Those that were to hold as late, or later, are taken back; the oldest are forgotten
    where there are too many."""
    kept = [amendment for amendment in amendments if amendment.from_tokens < by.from_tokens]
    return tuple([*kept, by][-MAX_AMENDMENTS:])
