"""Exhaustive model of finality: no two conflicting versions both become final (`core.finality.advance`).

A world is a chain, common at first, and then its two branches. At every milestone an adversary chooses:

- *Papers.* Who gets a seat, and whose seat ends, on which branch. Newcomers are one liar, or a crowd that
  outnumbers the founders two to one. A crowd after the fork lies: liars can do all that honest seats can.
- *Attestations.* Which honest seats attest which branch. An honest seat attests targets of increasing number
  and sources of never decreasing number, and only the link that the branch's own chain asks for. Liars attest
  everything.
- *Omission.* Which attestations a branch carries. Branches may differ in those of the last common milestone.

The exploration is breadth-first. Equal seats are counted, not named. A link is attested by nobody, or by a
smallest set of honest seats that justifies it: more of them change nothing, and can do less afterwards.
`advance` looks at milestones only, so the versions between two of them are one.

*Safety.* Take any common version from the last one on that was final before the fork. Let n be the seats that
began by it and still stand at the fork, l the liars among them, and e how many of them end after the fork, on
one branch or the other. If 3 l + 2 e < n for each such version, no two conflicting versions are final. Seats
that begin after the fork do not matter. A liar is a seat that signs two attestations of which an honest one
never makes both. So where two conflicting versions are final, and no seat has ended, proofs name a third of a
roster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import NamedTuple

import pytest
from msgspec.structs import replace

from p2pdiloco.core.api.types import NEVER, NOT_FINAL, Finality, Milestone, Seat, Watermark
from p2pdiloco.core.finality import FIRST, absent, advance

NO_FORK = ABSENT = -1
BRANCHES = LEFT, RIGHT = 0, 1


class Voter(NamedTuple):
    lies: bool
    since: tuple[int, int]
    """Version that began its seat, on each branch."""
    ended: tuple[int, int] = (0, 0)
    source: int = 0
    """Highest source that it attested."""


Seats = tuple[tuple[Voter, int], ...]
Votes = dict[Voter, int]


class World(NamedTuple):
    fork: int
    """Newest common milestone."""
    floor: int
    """Newest version that was final before the fork."""
    number: int
    """Newest milestone."""
    chains: tuple[Finality, Finality]
    seats: Seats
    joins: int
    """Times that newcomers may still come."""
    ends: tuple[int, int]
    """Seats that may still end on each branch."""


def following(number: int) -> int:
    return max(FIRST, 2 * number)


def source_of(chain: Finality) -> int:
    """Find the source of the link to the next milestone."""
    return (chain.target if chain.justified else chain.source).number


def moved(seats: Seats, *moves: tuple[Voter | None, Voter, int]) -> Seats:
    counts = Counter(dict(seats))
    for old, new, count in moves:
        if old:
            counts[old] -= count
        counts[new] += count
    return tuple(sorted((voter, count) for voter, count in counts.items() if count))


def is_sound(world: World) -> bool:
    """Tell whether few enough lie or end: see above. There is a common seat."""
    common = [
        (voter, count)
        for voter, count in world.seats
        if voter.since[LEFT] == voter.since[RIGHT] <= world.fork
        and not (voter.ended[LEFT] == voter.ended[RIGHT] and 0 < voter.ended[LEFT] <= world.fork)
    ]
    for number in {max(voter.since[LEFT], world.floor) for voter, _ in common}:
        old = [(voter, count) for voter, count in common if voter.since[LEFT] <= number]
        bad = sum(count * (3 * voter.lies + 2 * sum(map(bool, voter.ended))) for voter, count in old)
        if bad >= sum(count for _, count in old):
            return False
    return bool(common)


class Model:
    """Worlds that can be reached from one run's founding seats."""

    def __init__(self, honest: int, liars: int = 0, *, sound: bool = True, surrounds: bool = False) -> None:
        """`sound`: only worlds in which few enough lie or end; `surrounds`: honest seats may attest a source
        below an earlier one."""
        self._founders = moved((), (None, Voter(False, (0, 0)), honest), (None, Voter(True, (0, 0)), liars))
        self._sound, self._surrounds = sound, surrounds
        self._crowd = max(2, 2 * (honest + liars) + 1)
        self._known: dict[object, Finality] = {}
        self.worlds: set[World] = set()

    def conflict(self, milestones: int, joins: int = 0, ends: tuple[int, int] = (0, 0)) -> World | None:
        """Find a world with so many milestones in which both branches have a final version of their own."""
        start = World(NO_FORK, 0, 0, (NOT_FINAL, NOT_FINAL), self._founders, joins, ends)
        worlds = {start} | {forked for forked in [start._replace(fork=0)] if self._allowed(forked)}
        for _ in range(milestones):
            children = (self._canonical(child) for world in worlds for child in self._children(world))
            worlds = {child for child in children if self._allowed(child)}
            self.worlds |= worlds
            for world in worlds:
                if NO_FORK < world.fork < min(chain.final.number for chain in world.chains):
                    return world
        return None

    def _allowed(self, world: World) -> bool:
        return world.fork == NO_FORK or not self._sound or is_sound(world)

    def _children(self, parent: World) -> Iterator[World]:
        number = following(parent.number)
        for world in self._papered(parent, number):
            silent = [self._child(world, side, number, {}) for side in BRANCHES]
            for votes in (None, *self._links(world, LEFT, number, {})):
                left = silent[LEFT] if votes is None else self._child(world, LEFT, number, votes)
                seats = self._attested(world, LEFT, votes or {}, world.seats)
                child = world._replace(number=number, chains=(left, left), seats=seats)
                if world.fork == NO_FORK:
                    yield child
                    yield child._replace(fork=number, floor=left.final.number)
                    alone = child._replace(fork=number, chains=(left, silent[RIGHT]))
                    yield alone._replace(floor=silent[LEFT].final.number)
                    continue
                for others in (None, *self._links(world, RIGHT, number, votes or {})):
                    right = silent[RIGHT] if others is None else self._child(world, RIGHT, number, others)
                    both = self._attested(world, RIGHT, others or {}, seats)
                    yield child._replace(chains=(left, right), seats=both)

    def _papered(self, world: World, number: int) -> set[World]:
        """Find what papers of the versions up to a milestone can make of a world."""
        found, todo = {world}, [world]
        while todo:
            new = {child for child in self._papers(todo.pop(), number) if self._allowed(child)} - found
            found |= new
            todo += new
        return found

    def _papers(self, world: World, number: int) -> Iterator[World]:
        common = world.fork == NO_FORK
        if world.joins:
            fewer = world._replace(joins=world.joins - 1)
            both, one, other = (number, number), (number, ABSENT), (ABSENT, number)
            for since in [both] if common else [one, other, both]:
                yield fewer._replace(seats=moved(world.seats, (None, Voter(not common, since), self._crowd)))
            if common:
                yield fewer._replace(seats=moved(world.seats, (None, Voter(True, both), 1)))
        for side in [LEFT] if common else BRANCHES:
            ends = (world.ends[LEFT] - (side == LEFT), world.ends[RIGHT] - (side == RIGHT))
            for voter, _ in world.seats if ends[side] >= 0 else ():
                if 0 <= voter.since[side] < number and not voter.ended[side]:
                    left, right = (common or side == each for each in BRANCHES)
                    ended = (number if left else voter.ended[LEFT], number if right else voter.ended[RIGHT])
                    seats = moved(world.seats, (voter, voter._replace(ended=ended), 1))
                    yield world._replace(seats=seats, ends=ends)

    def _child(self, world: World, side: int, number: int, votes: Votes) -> Finality:
        """Compute the finality of a version after that milestone which carries these attestations of it."""
        rows: Counter[tuple[int, int, int]] = Counter()
        for voter, count in world.seats:
            if voter.since[side] != ABSENT:
                rows[voter.since[side], voter.ended[side], number] += votes.get(voter, 0)
                rows[voter.since[side], voter.ended[side], 0] += count - votes.get(voter, 0)
        key = world.chains[side], number, tuple(sorted((+rows).items()))
        if key not in self._known:
            table = [mark(*row) for row in rows.elements()]
            self._known[key] = advance(world.chains[side], Milestone(number, bytes(32)), table)
        return self._known[key]

    def _links(self, world: World, side: int, number: int, taken: Votes) -> Iterator[Votes]:
        """Find the smallest sets of seats that justify a milestone, without those that attest the other
        branch's. Liars attest."""
        liars: Votes = {}
        able: dict[tuple[int, int], list[tuple[Voter, int]]] = {}
        for voter, count in world.seats:
            since, ended = voter.since[side], voter.ended[side]
            free = count if voter.lies else count - taken.get(voter, 0)
            if not free or not 0 <= since <= number or 0 < ended <= number:
                continue
            if voter.lies:
                liars[voter] = count
            elif self._surrounds or voter.source <= source_of(world.chains[side]):
                able.setdefault((since, ended), []).append((voter, free))
        alike = list(able.values())

        def justified(*parts: Votes) -> bool:
            return self._child(world, side, number, joined(liars, *parts)).justified

        enough: list[tuple[int, ...]] = []
        if justified(*map(dict, alike)):
            totals = (range(sum(free for _, free in group) + 1) for group in alike)
            for counts in sorted(product(*totals), key=sum):
                if any(all(map(int.__le__, fewer, counts)) for fewer in enough):
                    continue
                ways = [list(shared(*each)) for each in zip(counts, alike, strict=True)]
                if justified(*(way[0] for way in ways)):
                    enough.append(counts)
                    yield from (joined(liars, *way) for way in product(*ways))

    @staticmethod
    def _attested(world: World, side: int, votes: Votes, seats: Seats) -> Seats:
        source = source_of(world.chains[side])
        honest = [(voter, count) for voter, count in votes.items() if not voter.lies]
        return moved(seats, *((voter, voter._replace(source=source), count) for voter, count in honest))

    @staticmethod
    def _canonical(world: World) -> World:
        """Forget what makes no difference: sources that bind nobody, and which branch is which."""
        low = min(map(source_of, world.chains))
        bound = Counter[Voter]()
        for voter, count in world.seats:
            bound[voter if voter.source > low else voter._replace(source=0)] += count
        turned = {
            voter._replace(since=voter.since[::-1], ended=voter.ended[::-1]): bound[voter] for voter in bound
        }
        same = world._replace(seats=moved(tuple(bound.items())))
        other = same._replace(
            seats=moved(tuple(turned.items())), chains=world.chains[::-1], ends=world.ends[::-1]
        )
        return min(same, other, key=lambda each: (each.seats, each.ends, source_of(each.chains[LEFT])))


def joined(*parts: Votes) -> Votes:
    return {voter: count for votes in parts for voter, count in votes.items()}


def mark(since: int, ended: int = 0, attested: int = 0) -> Watermark:
    return Watermark("", NEVER, 0, seat=Seat(1, since, ended=ended), attested=attested)


def shared(count: int, group: list[tuple[Voter, int]]) -> Iterator[Votes]:
    """List the ways in which so many of these seats can attest."""
    for counts in product(*(range(min(count, most), -1, -1) for _, most in group)):
        if sum(counts) == count:
            yield {voter: each for (voter, _), each in zip(group, counts, strict=True) if each}


@pytest.mark.parametrize(
    ("honest", "liars", "milestones", "joins", "ends"),
    [
        pytest.param(1, 0, 6, 1, (0, 0), id="one-founder-and-a-crowd"),
        pytest.param(1, 0, 4, 2, (0, 0), id="one-founder-and-two-crowds"),
        pytest.param(0, 0, 5, 2, (0, 0), id="no-founder"),
        pytest.param(0, 1, 6, 1, (0, 0), id="a-lying-founder-among-honest-others"),
        pytest.param(3, 0, 5, 1, (0, 0), id="three-and-a-crowd"),
        pytest.param(3, 1, 5, 1, (0, 0), id="four-a-liar-and-a-crowd"),
        pytest.param(4, 1, 6, 0, (0, 0), id="five-and-a-liar"),
        pytest.param(5, 1, 6, 0, (0, 0), id="six-and-a-liar"),
        pytest.param(3, 0, 4, 1, (1, 0), id="three-of-which-one-ends"),
        pytest.param(5, 1, 4, 0, (1, 0), id="six-a-liar-and-one-that-ends"),
        pytest.param(5, 0, 4, 0, (1, 1), id="five-of-which-one-ends-on-each-branch"),
    ],
)
def test_no_two_conflicting_versions_are_final(
    honest: int, liars: int, milestones: int, joins: int, ends: tuple[int, int]
) -> None:
    model = Model(honest, liars)
    assert model.conflict(milestones, joins, ends) is None
    assert len(model.worlds) > 500, "it has explored something"


@pytest.mark.parametrize(
    ("honest", "liars", "ends"),
    [
        pytest.param(2, 1, (0, 0), id="a-third-lies"),
        pytest.param(4, 2, (0, 0), id="two-of-six-lie"),
        pytest.param(3, 1, (1, 0), id="one-of-four-lies-and-one-ends"),
        pytest.param(4, 0, (1, 1), id="one-of-four-ends-on-each-branch"),
        pytest.param(3, 0, (2, 0), id="two-of-three-end"),
    ],
)
def test_where_more_lie_or_end_conflicting_versions_are_final(
    honest: int, liars: int, ends: tuple[int, int]
) -> None:
    """So the model finds what there is, and the bound is tight."""
    found = Model(honest, liars, sound=False).conflict(3, 0, ends)
    assert found and not is_sound(found)


def test_an_honest_seat_attests_no_source_below_an_earlier_one() -> None:
    assert Model(3, surrounds=True).conflict(5)


def linked(known: Finality, *table: Watermark) -> Finality:
    """Compute the finality after the next milestone."""
    number = following(known.target.number)
    return advance(known, Milestone(number, bytes(32)), table)


def test_newcomers_on_the_smaller_side_decide_nothing() -> None:
    """Twenty seats split into 14 and 6, and 22 newcomers join the six: 28 of 42, but 6 of the twenty."""
    larger = smaller = NOT_FINAL
    number = 0
    for _ in range(6):
        number = following(number)
        yes, no = mark(0, attested=number), mark(0)
        larger = linked(larger, *[yes] * 14, *[no] * 6)
        smaller = linked(smaller, *[yes] * 6, *[no] * 14, *[mark(5, attested=number)] * 22)
    assert (larger.final.number, larger.before) == (128, 64)
    assert (smaller.final.number, smaller.source.number, smaller.justified) == (0, 0, False)


def test_newcomers_and_the_seats_before_them_decide_together() -> None:
    """Three begin, and six join: two thirds of the three are needed, and of the nine."""
    for old, new, justified in ((3, 0, False), (3, 2, False), (3, 3, True), (1, 6, False), (2, 4, True)):
        table = [mark(0, attested=8)] * old + [mark(0)] * (3 - old)
        table += [mark(5, attested=8)] * new + [mark(5)] * (6 - new)
        assert linked(NOT_FINAL, *table).justified == justified, (old, new)


def test_attestations_after_the_next_checkpoint_do_not_count() -> None:
    known = linked(NOT_FINAL, mark(0))
    late = linked(known, mark(0, attested=8))
    assert not late.justified and late.source.number == 0
    in_time = advance(known, Milestone(15, bytes(32)), [mark(0, attested=8)])
    assert in_time.justified and linked(in_time, mark(0)).source.number == 8


def test_ended_seats_stop_nobody() -> None:
    """Those that have ended by the target: later ones are in its rosters."""
    gone = linked(NOT_FINAL, mark(0, attested=8), mark(0, attested=8), mark(0, 8), mark(0, 8))
    assert gone.justified and gone.final.number == 0
    assert not linked(NOT_FINAL, mark(0, attested=8), mark(0, attested=8), mark(0, 9), mark(0, 9)).justified
    founder = linked(NOT_FINAL, mark(0, 7), mark(3, attested=8), mark(5, attested=8), mark(5))
    assert founder.justified, "the oldest seat that stands goes on for those that founded the run"
    assert not linked(NOT_FINAL, mark(0, 7), mark(3), mark(5, attested=8)).justified
    assert not linked(NOT_FINAL).justified and not linked(NOT_FINAL, mark(0, 8)).justified


def test_half_of_the_seats_that_left_for_good_stop_it_until_they_are_ended() -> None:
    """The owner ends one of four, after version 64: two of three are enough for the next links."""
    known, found = NOT_FINAL, []
    for number in (8, 16, 32, 64, 128, 256, 512):
        here = [mark(0, attested=number)] * 2
        gone = [mark(0, attested=16), mark(0, ended=70 * (number > 64), attested=16)]
        known = linked(known, *here, *(gone if number > 16 else here))
        found.append((known.final.number, len(absent(known, [*here, *gone]))))
    assert found == [(0, 0), (8, 0), (8, 0), (8, 2), (8, 1), (128, 0), (256, 0)]


def test_a_seat_that_is_given_again_is_of_no_roster_before() -> None:
    """The owner ends two of three on both sides, and gives them again on one of them."""
    again = [replace(mark(0, attested=8), seat=Seat(place, again=5)) for place in (2, 3)]
    assert not linked(NOT_FINAL, mark(0), *again).justified
    assert linked(NOT_FINAL, mark(0, attested=8), *again).justified
