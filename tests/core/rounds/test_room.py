"""Room in an inbox (docs/protocol/rounds.md, section 1): for seats, for who is to have one, for guests."""

from __future__ import annotations

import pytest
from kit import OWNER, Solo, child, contribution, found, word
from scenes import called, header, here, syncer

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import Stamp
from p2pdiloco.core.inbox import ROOM


def test_strangers_headers_leave_half_of_the_room_to_those_who_have_worked() -> None:
    solo = syncer(founders=("me", "p1", "p2"))
    room = ROOM * solo.config.group_size
    taken = [
        bool(found(solo.feed(ev.Offered(n, f"s{n}", contribution(f"s{n}", solo.head))), ev.AcceptTransfer))
        for n in range(1, room + 1)
    ]
    assert taken == [True] * (room // 2) + [False] * (room // 2)
    assert found(solo.feed(ev.Offered(99, "p1", contribution("p1", solo.head))), ev.AcceptTransfer)


def test_those_that_are_to_have_a_seat_leave_a_place_to_the_first_that_has_one() -> None:
    solo = syncer(quorum=1, peers=("p1",), founders=("me", "p1"), group_size=4, owner=OWNER)
    friends = [f"f{n}" for n in range(ROOM * 4 + 1)]
    solo.feed(ev.Guided(papers=tuple(word(peer, number) for number, peer in enumerate(friends, 1))))
    taken = [bool(found(header(solo, peer, n), ev.AcceptTransfer)) for n, peer in enumerate(friends, 1)]
    assert taken == [True] * (ROOM * 4) + [False]
    assert not found(header(solo, "stranger", 98), ev.AcceptTransfer)
    assert found(header(solo, "p1", 99), ev.AcceptTransfer), "or there is never a merge"


def crowded(guests: int) -> Solo:
    """A syncer beside so many learners without a seat that are here: all were merged in the version before
    the last, and half of them in the last one too."""
    names = tuple(f"s{n:02d}" for n in range(guests))
    solo = syncer(quorum=1, peers=("p1", "p2", *names), founders=("me", "p1", "p2"), group_size=8)
    for learners in (("p1", *names), ("p1", *names[: guests // 2])):
        made = child(solo.fragment.chain.header, "p1", learners, seats=("me", "p1", "p2"))
        solo.fragment.chain.extend(made)
    return solo


@pytest.mark.parametrize(("guests", "waits"), [(16, False), (17, True)])
def test_learners_without_a_seat_come_in_turn_where_they_are_more_than_the_room_for_them(
    guests: int, waits: bool
) -> None:
    assert ROOM * 8 // 2 == 16
    solo = crowded(guests)

    def asks(learner: str, transfer: int) -> bool:
        after = solo.fragment.chain.marks.stamp(learner)
        stamp = Stamp(1, after.sequence + 1)
        signed = contribution(learner, solo.fragment.chain.head, stamp, after=after)
        return bool(found(solo.feed(ev.Offered(transfer, learner, signed)), ev.AcceptTransfer))

    last, before = "s00", f"s{guests - 1:02d}"
    assert asks("p1", 91) and asks(before, 92), "seats always, others after a version without their work"
    assert asks(last, 93) is not waits
    assert asks("newcomer", 94)


def test_headers_of_newcomers_give_way_to_a_guest_whose_turn_it_is() -> None:
    solo, half = crowded(8), ROOM * 8 // 2
    for transfer in range(1, half + 1):
        assert found(header(solo, f"new{transfer}", transfer), ev.AcceptTransfer)
    after = solo.fragment.chain.marks.stamp("s07")
    guest = {"stamp": Stamp(1, after.sequence + 1), "after": after}
    assert found(header(solo, "new0", 50), ev.AnswerTransfer)[0].verdict is Verdict.FULL
    assert found(header(solo, "s07", 51, **guest), ev.AcceptTransfer)
    assert found(header(solo, "new0", 52), ev.AnswerTransfer)[0].verdict is Verdict.FULL
    gone = [n for n in range(1, half + 1) if not solo.fragment.round.inbox.has(f"new{n}")]
    assert len(gone) == 1
    assert found(here(solo, gone[0]), ev.AnswerTransfer)[0].verdict is Verdict.FULL, "and no syncer's end"


def test_a_round_calls_and_waits_for_nobody_whose_turn_it_is_not() -> None:
    solo = crowded(20)
    after = solo.fragment.chain.marks.stamp("p1")
    signed = contribution("p1", solo.fragment.chain.head, Stamp(1, after.sequence + 1), after=after)
    effects = solo.feed(ev.Offered(90, "p1", signed)) + solo.feed(ev.PayloadReceived(90, 700))
    effects += solo.wait(1.0)
    assert called(effects) == ["p2", *(f"s{n:02d}" for n in range(10, 20))]
