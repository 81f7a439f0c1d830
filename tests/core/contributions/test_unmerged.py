"""An orderly end over a bad link loses nothing: what the next life takes up (docs/protocol/exactly-once.md,
section 6)."""

from __future__ import annotations

import pytest
from kit import Solo, branch, child, found, offer_to, reasons, saved

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.types import NEVER, Contributor, Stamp
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.pending import TakeUp, Unmerged

OLD, SLOT, NEWER = Stamp(1, 4), Stamp(1, 5), Stamp(2, 1)
FREE = Unmerged((OLD,))
NEVER_SENT = Unmerged((OLD,), SLOT)
UNANSWERED = Unmerged((OLD,), SLOT, doubts=(SLOT,))
SENT = Unmerged((OLD,), SLOT, sent=True, doubts=(SLOT,))
BESIDE = Unmerged((OLD, Stamp(1, 5)), Stamp(1, 6), doubts=(Stamp(1, 6),))


@pytest.mark.parametrize(
    ("left", "mark", "mode", "doubts"),
    [
        (FREE, OLD, "all", ()),
        (FREE, NEWER, "none", ()),  # another life of ours was merged: the displacement may be in it
        (FREE, NEVER, "none", ()),  # on another branch
        (NEVER_SENT, OLD, "all", ()),
        (UNANSWERED, OLD, "all", (SLOT,)),
        (UNANSWERED, SLOT, "rest", ()),  # it got there after all
        (UNANSWERED, NEWER, "none", ()),
        (SENT, OLD, "rest", ()),  # it may still be merged
        (SENT, SLOT, "rest", ()),
        (BESIDE, Stamp(1, 5), "all", (Stamp(1, 6),)),  # an earlier learner's, no part of it
    ],
)
def test_what_is_taken_up(left: Unmerged, mark: Stamp, mode: TakeUp, doubts: tuple[Stamp, ...]) -> None:
    assert left.take_up(mark) == (mode, doubts)


def at_work(syncer: str = "p1") -> Solo:
    """A node that trains, where somebody is in office."""
    solo = Solo()
    solo.learn()
    solo.elect(syncer)
    return solo


def leave(solo: Solo, sent: bool = False) -> Unmerged:
    """It goes, with whatever is unmerged."""
    solo.feed(ev.LeaveRequested())
    solo.ready(ticket=7)
    if sent:
        solo.feed(ev.ContributionSent(0, FIRST))
    assert found(solo.wait(solo.config.timing.leave_s + 0.1), ef.Left)
    return solo.fragment.own.unmerged()


def returned(left: Unmerged, log: list[SignedVersion]) -> tuple[Solo, TakeUp]:
    """The next life, with this chain."""
    again = Solo(restored=saved(log), incarnation=2)
    again.learn()
    return again, again.fragment.own.take_up(left)


def mine(parent: SignedVersion, stamp: Stamp) -> SignedVersion:
    """A version with a contribution of ours."""
    return child(parent.header, contributors=(Contributor("me", stamp, 40, 4),))


def overwrites(effects: list[ef.Effect]) -> list[bool]:
    return [commit.overwrite for commit in found(effects, ef.CommitVersion)]


FIRST = Stamp(1, 1)
"""Of the first life's only contribution."""


def test_what_nobody_was_offered_is_taken_up_and_never_doubted() -> None:
    solo = Solo()
    solo.learn()
    left = leave(solo)  # nobody is in office
    assert left == Unmerged((NEVER,), FIRST)
    assert returned(left, branch(0))[1] == "all"
    assert not found(solo.elect("p1"), ef.Offer), "no longer: the next life will"


def test_what_did_not_get_there_is_taken_up_and_goes_if_it_was_merged_after_all() -> None:
    again, mode = returned(leave(at_work()), branch(0))
    assert mode == "all"
    again.ready(ticket=9)
    effects = again.announce(mine(branch(0)[0], FIRST))
    assert overwrites(effects) == [True]
    assert reasons(effects, "contribution") == ["given up: it contains what was merged"]
    assert again.fragment.own.idle


def test_a_copy_that_contains_it_goes_too_when_the_learner_has_crashed_since() -> None:
    again, _ = returned(leave(at_work()), branch(0))
    again.ready(ticket=9)
    again.feed(ev.LearnerLost())
    effects = again.announce(mine(branch(0)[0], FIRST))
    assert overwrites(effects) == [False], "the new learner has nothing of it"
    assert again.fragment.own.idle and found(effects, ef.DiscardContribution)


def test_once_a_contribution_that_contains_it_is_merged_nothing_is_doubted() -> None:
    again, _ = returned(leave(at_work()), branch(0))
    again.ready(ticket=9)
    again.announce(mine(branch(0)[0], Stamp(2, 1)))
    assert again.fragment.own.unmerged() == Unmerged((Stamp(2, 1),))


def test_on_a_branch_that_has_it_what_contains_it_is_not_sent_again() -> None:
    again, _ = returned(leave(at_work()), branch(0))
    again.ready(ticket=9)
    again.announce(mine(branch(0)[0], Stamp(2, 1)))
    own = again.fragment.own
    assert own.keeps
    assert own._kept.moved(FIRST, 1, replaced=True) == () and not own.keeps


def test_what_a_syncer_may_have_is_left_to_it() -> None:
    left = leave(at_work(), sent=True)
    for versions in (0, 1, 9):
        assert returned(left, branch(versions))[1] == "rest", "it may be held over"
    merged = mine(branch(0)[0], FIRST)
    again, mode = returned(left, [branch(0)[0], merged])
    assert mode == "rest"
    again.ready(ticket=9)
    assert again.fragment.own.unmerged().doubts == ()


def test_that_a_syncer_may_have_it_is_not_forgotten_while_another_is_asked() -> None:
    solo = at_work()
    solo.ready(ticket=7)
    solo.feed(ev.ContributionSent(0, FIRST))
    solo.feed(ev.OfferUndelivered(offer_to("p1", FIRST)))
    solo.elect("p2", term=2)
    solo.feed(ev.LeaveRequested())
    assert found(solo.wait(solo.config.timing.leave_s + 0.1), ef.Left)
    assert returned(solo.fragment.own.unmerged(), branch(0))[1] == "rest"


def test_what_nobody_but_ourselves_holds_is_taken_up() -> None:
    solo = Solo()
    solo.learn()
    solo.take_office()
    solo.feed(ev.LeaveRequested())
    solo.ready(ticket=7)  # into our own inbox; no merge comes about
    assert found(solo.wait(solo.config.timing.leave_s + 0.1), ef.Left)
    assert returned(solo.fragment.own.unmerged(), branch(0))[1] == "all"


def test_doubts_outlive_a_second_end() -> None:
    left = Unmerged((NEVER,), SLOT, doubts=(SLOT,))
    again, mode = returned(left, branch(0))
    assert mode == "all"
    again.feed(ev.LeaveRequested())
    again.wait(again.config.timing.leave_s + 0.1)
    assert again.fragment.own.unmerged() == Unmerged((NEVER,), doubts=(SLOT,))
