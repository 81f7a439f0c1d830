"""A syncer that says that it has our work, and leaves it out of its versions."""

from __future__ import annotations

import pytest
from kit import announce, child, found, reasons
from msgspec.structs import replace
from scenes import held_by_p1, without_ours

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import FetchFailure, Suspicion, Verdict
from p2pdiloco.core.contributions import ELSEWHERE, MOST_AHEAD, MOST_MISSES


def test_whoever_leaves_our_work_out_time_and_again_gets_no_vote_of_ours() -> None:
    solo = held_by_p1()
    effects = without_ours(solo, 2 * MOST_MISSES - 1)
    assert not reasons(effects, "suspicion") and not solo.core.shared.distrust.has("p1", solo.now)
    assert len(found(effects, ef.Offer)) == MOST_MISSES - 1, "offered again after each miss"
    assert reasons(without_ours(solo, 1), "suspicion") == [str(Suspicion.LEFT_OUT)]
    assert solo.core.shared.distrust.has("p1", solo.now)
    assert not found(effects, ef.RetireSlot), "nothing of it is lost"


def test_whoever_says_so_again_before_each_version_gets_no_more_time_by_it() -> None:
    """Who waits for less than a round lasts asks again before each version."""
    solo = held_by_p1()
    effects: list[ef.Effect] = []
    for _ in range(2 * MOST_MISSES):
        own = solo.fragment.own
        own._withheld.acknowledged(own._queue[0], solo.head)
        effects += without_ours(solo, 1)
    assert reasons(effects, "suspicion") == [str(Suspicion.LEFT_OUT)]


def test_the_version_that_was_in_the_making_is_no_miss() -> None:
    assert not found(without_ours(held_by_p1(), 1), ef.Offer)


def test_versions_that_were_made_before_it_had_our_work_are_no_miss() -> None:
    solo = held_by_p1()
    ahead = replace(solo.head, number=solo.head.number + MOST_AHEAD)
    assert len(found(without_ours(solo, 2, head=ahead), ef.Offer)) == 1
    assert not found(without_ours(solo, MOST_AHEAD - 1), ef.Offer)


def test_whoever_says_that_it_is_far_ahead_is_found_all_the_same() -> None:
    solo = held_by_p1()
    far = replace(solo.head, number=1 << 40)
    effects = without_ours(solo, MOST_MISSES * (MOST_AHEAD + 2), head=far)
    assert reasons(effects, "suspicion") == [str(Suspicion.LEFT_OUT)]


def test_a_syncer_that_had_to_drop_it_says_so_and_is_not_suspected() -> None:
    solo = held_by_p1()
    effects = without_ours(solo, 12, says=Verdict.NO_MEMORY)
    assert not reasons(effects, "suspicion")


def test_a_merged_contribution_ends_the_count() -> None:
    solo = held_by_p1()
    without_ours(solo, 4)
    solo.announce(child(solo.fragment.chain.header, "p1", ("me", "p2")))
    offer = found(solo.ready(ticket=2), ef.Offer)
    assert offer and not solo.core.shared.distrust.has("p1", solo.now)
    assert not reasons(without_ours(solo, 4), "suspicion")


@pytest.mark.parametrize("verdict", ELSEWHERE)
def test_whoever_is_elsewhere_with_what_nobody_can_have_is_not_counted_on(verdict: Verdict) -> None:
    solo = held_by_p1(says=verdict)
    solo.message("p1", announce(child(solo.fragment.chain.header, "p1", ("p2",))))
    seen, effects = [], solo.feed(ev.FetchFailed(0, 1, "p1", FetchFailure.BUSY))
    while not reasons(seen, "suspicion") and len(seen) < 2000:
        answers = [ev.OfferAnswered(offer, verdict, None) for offer in found(effects, ef.Offer)]
        answers += [
            ev.FetchFailed(0, pull.number, pull.peer, FetchFailure.BUSY)
            for pull in found(effects, ef.FetchUpdate)
        ]
        seen += effects
        effects = [effect for answer in answers for effect in solo.feed(answer)] + solo.wait(0.5)
    assert reasons(seen, "suspicion") == [str(Suspicion.NO_VERSION)]
    assert solo.now > 5.0, "not before its patience is over"
