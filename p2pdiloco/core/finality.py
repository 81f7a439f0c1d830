"""Finality of a chain: which of its versions two thirds of the seats have said to stand on (Casper FFG).

Rules: docs/protocol/belief.md, section 6.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from p2pdiloco.core.api.types import GENESIS, Finality, Milestone, Seat, Watermark
from p2pdiloco.core.seating import stands

FIRST = 8
"""Number of the first milestone. Each has twice the number of the one before: half of a run's life is time
enough for whoever comes by now and then, however fast its versions are, and nobody has to choose a time."""


def is_milestone(number: int) -> bool:
    """Tell whether the version of that number is a milestone."""
    return number >= FIRST and not number & (number - 1)


def opened(known: Finality, parent: Milestone) -> Finality:
    """Compute what is attested upon a version: itself, if it is a milestone."""
    if not is_milestone(parent.number):
        return known
    source = known.target if known.justified else known.source
    return replace(known, target=parent, source=source, justified=False)


def advance(known: Finality, parent: Milestone, table: Iterable[Watermark]) -> Finality:
    """Compute the finality of a child, of its parent's, its parent, and its own table.

    A link counts if two thirds of each of three rosters attest it, by the time of the next milestone: of the
    target's seats, and of those of the last two final versions, so that newcomers never decide alone. It
    justifies its target, and its source is final if there is no milestone between them.
    """
    known = opened(known, parent)
    if known.justified or not _linked(known, table):
        return known
    if known.target.number != max(FIRST, 2 * known.source.number):
        return replace(known, justified=True)
    return replace(known, justified=True, final=known.source, before=known.final.number)


def absent(known: Finality, table: Iterable[Watermark]) -> tuple[str, ...]:
    """List the seats that attested neither the newest milestone nor the one before, though they are older,
    where no version has become final for that long."""
    number = known.target.number
    if number <= 4 * max(known.final.number, FIRST // 2):
        return ()
    seats = [(mark.learner, mark.seat) for mark in table if mark.seat and 2 * mark.attested < number]
    return tuple(peer for peer, seat in seats if 2 * seat.begun < number and stands(seat))


def coherent(known: Finality, number: int) -> bool:
    """Tell whether the version of that number may state that: milestones in their order, below it."""
    shown = known.final, known.source, known.target
    numbers = [milestone.number for milestone in shown]
    right = all(each == GENESIS or is_milestone(each.number) for each in shown)
    return right and numbers == sorted(numbers) and numbers[-1] < max(1, number)


def _linked(known: Finality, table: Iterable[Watermark]) -> bool:
    """Tell whether the link from source to target has two thirds of each roster: of the seats that stand at
    the target, those that began by a version, or with the oldest of them."""
    target = known.target.number
    if not target:
        return False
    votes = [(mark.seat, mark.attested == target) for mark in table if mark.seat]
    seats = [(seat.begun, attests) for seat, attests in votes if _stood(seat, target)]
    first = min((begun for begun, _ in seats), default=0)
    for number in (known.before, known.final.number, target):
        roster = [attests for begun, attests in seats if begun <= max(number, first)]
        if 3 * sum(roster) < 2 * len(roster):
            return False
    return any(attests for _, attests in seats)


def _stood(seat: Seat, number: int) -> bool:
    """Tell whether a seat had not ended by that version."""
    return seat.place > 0 and not 0 < seat.ended <= number
