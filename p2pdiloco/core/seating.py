"""Seats of one table while papers change them: who may be seated, by what, and what may end.

Rules: docs/protocol/seats.md, section 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec.structs import replace

from p2pdiloco.core.api.papers import (
    LEAP,
    MAX_PAPERS,
    RECOVERY_FROM,
    Admission,
    Paper,
    Proof,
    Word,
)
from p2pdiloco.core.api.types import MAX_PEERS, NEVER, Seat, Watermark

LINK_PLACES = 6
"""Places that a chain ever has up to which invites fill them; later ones wait for the owner's word: whoever
holds an invite for several can use all of it alone."""
ENDS_SHARE, ENDS_VERSIONS = 5, 64
"""Limit of ends by the owner's words: one seat of so many, and one at least, in that many versions."""
TURNS = 4
"""Limit by which the turn of a word of seats is above the last one: fragments may differ by some, and whoever
says more is heard no further."""
MAX_DEPUTIES = MAX_PAPERS
NO_SEAT = Seat(0)


class Seating:
    """Seats of one table while papers change them, in the order in which a version carries these.

    A paper that changes nothing, or is not to count (yet), is not taken, and a version that carries such a
    one is refused.
    """

    def __init__(self, table: Sequence[Watermark], number: int) -> None:
        """`number`: the version that carries the papers; `table`: its parent's."""
        self._number = number
        self._seats = {mark.learner: mark.seat for mark in table if mark.seat}
        old = [seat for seat in self._seats.values() if seat.place and is_old(seat, seat.ended or number)]
        ended = sum(seat.ended > max(0, number - ENDS_VERSIONS) and not seat.turn for seat in old)
        self._may_end = max(1, sum(map(stands, old)) // ENDS_SHARE) - ended
        self._highest = max((seat.word for seat in self._seats.values()), default=0)
        self._places = max((seat.place for seat in self._seats.values()), default=0)
        self._deputies = deputies(table)
        self._by_link = False
        self._changed: set[str] = set()

    @property
    def standing(self) -> frozenset[str]:
        """Peers whose seat stands."""
        return frozenset(peer for peer, seat in self._seats.items() if stands(seat))

    def take(self, paper: Paper) -> bool:
        """Let a paper change the seats. False: it does not."""
        if isinstance(paper, Admission):
            return self._admit(paper)
        return self._hear(paper) if isinstance(paper, Word) else self._convict(paper)

    def _admit(self, paper: Admission) -> bool:
        """Seat somebody by an invite: one in a term, in the first places only, as often as it has uses; none
        once the recovery key has spoken."""
        grant, used = paper.grant, sum(seat.key == paper.grant.key for seat in self._seats.values())
        barred = paper.peer in self._seats or grant.key in self._seats or self._by_link
        late = self._places >= LINK_PLACES or self._highest >= RECOVERY_FROM
        if barred or late or used >= grant.uses:
            return False
        self._by_link = True
        self._give(paper.peer, grant.key)
        return True

    def _convict(self, proof: Proof) -> bool:
        """End the seat of whoever has lied."""
        seat = self._seats.get(proof.culprit(), NO_SEAT)
        if not stands(seat):
            return False
        self._set(proof.culprit(), replace(seat, ended=self._number, turn=seat.turn + 1))
        return True

    def _hear(self, word: Word) -> bool:
        seat = self._seats.get(word.peer, NO_SEAT)
        # Who has a seat, had one, or ends an invite, is never forgotten.
        room = MAX_PEERS * (2 if word.number >= RECOVERY_FROM else 1)
        if word.peer not in self._seats and len(self._seats) >= room:
            return False
        losing = word.replaces if word.seated else word.peer
        lost = self._seats.get(losing, NO_SEAT)
        ends = stands(lost) and is_old(lost, self._number)
        if not (self._may_seats(word, seat) if word.turn else self._may_owner(word, seat, ends)):
            return False
        if stands(lost):
            order = (lost.word, lost.turn + 1) if word.turn else (word.number, 0)
            self._set(losing, replace(lost, ended=self._number, word=order[0], turn=order[1]))
        if word.seated and not stands(self._seats.get(word.peer, NO_SEAT)):
            self._give(word.peer)
        seat = self._seats.get(word.peer) or Seat(0, ended=self._number)
        self._set(word.peer, replace(seat, word=word.number, turn=word.turn))
        if not word.seated and word.replaces != word.peer:
            self._end_invited(word.peer)
        return True

    def _end_invited(self, key: str) -> None:
        """End the seats that an invite gave and that no word has named."""
        for peer, seat in self._seats.items():
            if seat.key == key and stands(seat) and not (seat.word or seat.turn):
                self._set(peer, replace(seat, ended=self._number, turn=1))

    def _may_owner(self, word: Word, seat: Seat, ends: bool) -> bool:
        """Tell whether the owner's word counts: its number is one of the next, and it ends no more than it
        may. Once the recovery key has spoken, the owner's key says nothing."""
        floor = max(self._highest, RECOVERY_FROM if word.number >= RECOVERY_FROM else 0)
        barred = word.number <= seat.word or self._highest >= RECOVERY_FROM > word.number
        if barred or word.number > floor + LEAP or (ends and self._may_end < 1):
            return False
        self._may_end -= ends
        self._highest = max(self._highest, word.number)
        return True

    def _may_seats(self, word: Word, seat: Seat) -> bool:
        """Tell whether a word of seats counts: it is most deputies', or its own of the seat that it ends."""
        leaves = word.peer in word.authors and stands(seat) and not word.seated
        most = 2 * len(word.authors & self._deputies) > len(self._deputies)
        return (most or leaves) and is_next(word, seat)

    def _give(self, peer: str, key: str = "") -> None:
        """A peer that had a seat is as old as that: else its end, once it is given again, would be free."""
        before = self._seats.get(peer, NO_SEAT)
        self._places += 1
        if before.place:
            self._set(peer, Seat(self._places, before.since, key, again=self._number))
        else:
            self._set(peer, Seat(self._places, self._number, key))

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


def is_old(seat: Seat, number: int) -> bool:
    """Tell whether ends of this seat, by that version, are limited. Of younger ones they are not: a thief's
    own seats would raise the limit, and nobody could end them soon."""
    return not seat.since or seat.since + ENDS_VERSIONS <= number


def stands(seat: Seat) -> bool:
    """Tell whether a seat stands: it has a place, and has not ended."""
    return seat.place > 0 and not seat.ended


def is_next(word: Word, seat: Seat) -> bool:
    """Tell whether a word of seats may follow what is known of a seat, and says something else."""
    follows = word.number == seat.word and seat.turn < word.turn <= seat.turn + TURNS
    return follows and word.seated != stands(seat)


def deputies(table: Iterable[Watermark]) -> frozenset[str]:
    """Find the seats of a table of which more than half say what the owner may say of seats: the oldest."""
    standing = ((mark.seat.place, mark.learner) for mark in table if mark.seat and stands(mark.seat))
    return frozenset(peer for _, peer in sorted(standing)[:MAX_DEPUTIES])
