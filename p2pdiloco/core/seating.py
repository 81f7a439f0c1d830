"""Seats of one table while papers change them: who may be seated, by what, and what may end.

Rules: docs/protocol/seats.md, section 1.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec.structs import replace

from p2pdiloco.core.api.papers import Admission, Paper, Word
from p2pdiloco.core.api.types import NEVER, Seat, Watermark

LINK_PLACES = 6
"""Places that a chain ever has up to which invites fill them; later ones wait for the owner's word: whoever
holds an invite for several can use all of it alone."""
LEAP = 1024
"""Limit by which the number of a word is above the highest before it: numbers end, and a thief of the owner's
key would else say the last one."""
ENDS_SHARE, ENDS_VERSIONS = 5, 64
"""Limit of ends: one seat of so many, and one at least, in that many versions."""


class Seating:
    """Seats of one table while papers change them, in the order in which a version carries these.

    A paper that changes nothing, or is not to count (yet), is not taken, and a version that carries such a
    one is refused.
    """

    def __init__(self, table: Iterable[Watermark], number: int) -> None:
        """`number`: the version that carries the papers; `table`: its parent's."""
        self._number = number
        self._seats = {mark.learner: mark.seat for mark in table if mark.seat}
        since = max(0, number - ENDS_VERSIONS)
        ended = sum(seat.ended > since for seat in self._seats.values() if seat.place)
        self._may_end = max(1, len(self.standing) // ENDS_SHARE) - ended
        self._highest = max((seat.word for seat in self._seats.values()), default=0)
        self._places = max((seat.place for seat in self._seats.values()), default=0)
        self._by_link = False
        self._changed: set[str] = set()

    @property
    def standing(self) -> frozenset[str]:
        """Peers whose seat stands."""
        return frozenset(peer for peer, seat in self._seats.items() if stands(seat))

    def take(self, paper: Paper) -> bool:
        """Let a paper change the seats. False: it does not."""
        return self._admit(paper) if isinstance(paper, Admission) else self._hear(paper)

    def _admit(self, paper: Admission) -> bool:
        """Seat somebody by an invite: one in a term, in the first places only, as often as it has uses."""
        grant, used = paper.grant, sum(seat.key == paper.grant.key for seat in self._seats.values())
        barred = paper.peer in self._seats or grant.key in self._seats or self._by_link
        if barred or self._places >= LINK_PLACES or used >= grant.uses:
            return False
        self._by_link = True
        self._give(paper.peer, grant.key, 0)
        return True

    def _hear(self, word: Word) -> bool:
        seat = self._seats.get(word.peer)
        if word.number <= (seat.word if seat else 0) or word.number > self._highest + LEAP:
            return False
        replaced = self._seats.get(word.replaces)
        ends = [seat] if seat and not word.seated else []
        ends += [replaced] if word.seated and replaced else []
        ends = [each for each in ends if stands(each)]
        if ends and len(ends) > self._may_end:
            return False
        self._may_end -= len(ends)
        if word.seated and replaced and stands(replaced):
            self._set(word.replaces, replace(replaced, ended=self._number))
        if not word.seated:
            self._set(word.peer, replace(seat or Seat(0), word=word.number, ended=self._number))
        elif seat and stands(seat):
            self._set(word.peer, replace(seat, word=word.number))
        else:
            self._give(word.peer, "", word.number)
        self._highest = max(self._highest, word.number)
        return True

    def _give(self, peer: str, key: str, word: int) -> None:
        self._places += 1
        self._set(peer, Seat(self._places, self._number, key, word))

    def _set(self, peer: str, seat: Seat) -> None:
        self._seats[peer] = seat
        self._changed.add(peer)

    def into(self, table: Iterable[Watermark]) -> tuple[Watermark, ...]:
        """Put what changed into a table."""
        marks = {mark.learner: mark for mark in table}
        for peer in self._changed:
            mark = marks.get(peer) or Watermark(peer, NEVER, 0, 0, 0)
            marks[peer] = replace(mark, seat=self._seats[peer])
        return tuple(mark for _, mark in sorted(marks.items()))


def stands(seat: Seat) -> bool:
    """Tell whether a seat stands: it has a place, and has not ended."""
    return seat.place > 0 and not seat.ended
