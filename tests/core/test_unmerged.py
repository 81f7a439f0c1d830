"""An orderly end over a bad link loses nothing: what the next life takes up (issue 3, design 5.3)."""

from __future__ import annotations

import pytest
from kit import Solo, branch, child, found, genesis, saved

from p2pdiloco.core import effects as ef
from p2pdiloco.core import events as ev
from p2pdiloco.core.types import NEVER, Contributor, SignedVersion, Stamp
from p2pdiloco.core.unmerged import TakeUp, Unmerged

OLD, SLOT, NEWER = Stamp(1, 4), Stamp(1, 5), Stamp(2, 1)
FREE = Unmerged((OLD,))
NEVER_SENT = Unmerged((OLD,), SLOT)
UNANSWERED = Unmerged((OLD,), SLOT, doubts=(SLOT,))
HELD = Unmerged((OLD,), SLOT, held_until=8, doubts=(SLOT,))
BESIDE = Unmerged((OLD, Stamp(1, 5)), Stamp(1, 6), doubts=(Stamp(1, 6),))


@pytest.mark.parametrize(
    ("left", "mark", "number", "mode", "doubts"),
    [
        (FREE, OLD, 7, "all", ()),
        (FREE, NEWER, 8, "none", ()),  # another life of ours was merged: the displacement may be in it
        (FREE, NEVER, 8, "none", ()),  # on another branch
        (NEVER_SENT, OLD, 7, "all", ()),
        (NEVER_SENT, OLD, 99, "all", ()),
        (UNANSWERED, OLD, 7, "all", (SLOT,)),
        (UNANSWERED, SLOT, 8, "rest", ()),  # it got there after all
        (UNANSWERED, NEWER, 8, "none", ()),
        (HELD, OLD, 7, "rest", ()),  # it will be merged, at the latest in version 9
        (HELD, OLD, 8, "rest", ()),
        (HELD, OLD, 9, "all", (SLOT,)),  # its holder died
        (HELD, SLOT, 8, "rest", ()),
        (
            BESIDE,
            Stamp(1, 5),
            8,
            "all",
            (Stamp(1, 6),),
        ),  # an earlier learner's, no part of it
    ],
)
def test_what_is_taken_up(
    left: Unmerged, mark: Stamp, number: int, mode: TakeUp, doubts: tuple[Stamp, ...]
) -> None:
    assert left.take_up(mark, number) == (mode, doubts)


def leave(solo: Solo) -> Unmerged:
    """It goes, with whatever is unmerged."""
    solo.feed(ev.LeaveRequested())
    solo.ready(ticket=7)
    assert found(solo.wait(solo.config.timing.leave_s + 0.1), ef.Left)
    return solo.fragment.own.unmerged()


def returned(left: Unmerged, log: list[SignedVersion]) -> tuple[Solo, TakeUp]:
    """The next life, with this chain."""
    again = Solo(restored=saved(log))
    again.learn()
    return again, again.fragment.own.take_up(left)


def test_what_nobody_was_offered_is_taken_up_and_never_doubted() -> None:
    solo = Solo()
    solo.learn()
    left = leave(solo)  # nobody is in office
    assert left == Unmerged((NEVER,), Stamp(1, 1))
    assert returned(left, branch(0))[1] == "all"


def test_what_nobody_answered_is_taken_up_and_goes_if_it_was_merged_after_all() -> None:
    solo = Solo()
    solo.learn()
    solo.elect("p1")
    left = leave(solo)
    again, mode = returned(left, branch(0))
    assert mode == "all"
    again.ready(ticket=9)
    merged = child(genesis(0).header, learners=("me",))  # of the first life: Stamp(1, 1)
    effects = again.announce(merged)
    assert [commit.overwrite for commit in found(effects, ef.CommitVersion)] == [True]
    assert again.fragment.own.idle, "the new contribution contained it"


def test_what_a_syncer_took_is_left_to_it() -> None:
    solo = Solo()
    solo.learn()
    solo.elect("p1")
    solo.feed(ev.LeaveRequested())
    stamp = found(solo.ready(), ef.OfferContribution)[0].signed.header.stamp
    solo.feed(ev.ContributionAnswered(0, stamp, "p1", True, "", None))
    assert found(solo.wait(solo.config.timing.leave_s + 0.1), ef.Left)
    left = solo.fragment.own.unmerged()
    assert returned(left, branch(0))[1] == "rest"
    assert returned(left, branch(1))[1] == "rest", "it may have been held over"
    again, mode = returned(left, branch(2))
    assert mode == "all"
    mine = (Contributor("me", stamp, 40, 4),)
    late = again.announce(child(branch(2)[2].header, contributors=mine))
    assert [commit.overwrite for commit in found(late, ef.CommitVersion)] == [True]


def test_doubts_outlive_a_second_end() -> None:
    left = Unmerged((NEVER,), SLOT, doubts=(SLOT,))
    again, mode = returned(left, branch(0))
    assert mode == "all"
    again.feed(ev.LeaveRequested())
    again.wait(again.config.timing.leave_s + 0.1)
    assert again.fragment.own.unmerged() == Unmerged((NEVER,), doubts=(SLOT,))
