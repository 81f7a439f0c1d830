"""Nobody is in office by its own word, and who makes nothing of an office is the last to have it again."""

from __future__ import annotations

import pytest
from election_scenes import refusal, request
from kit import Solo, announce, branch, child, found, sent

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.reasons import Verdict, VoteRefusal
from p2pdiloco.core.candidates import FIRST_S, LONGEST_S, Idle, ranking
from p2pdiloco.core.election import OfficeState
from p2pdiloco.core.voting import LAST_AFTER_S

PEERS = ("p1", "p2", "p3", "p4")
LAST = branch(4)[4].header.head()
"""Head with which a term that began at version 0 is over."""


def waited_in_vain(solo: Solo) -> None:
    """p1 takes our work in its first term, and makes nothing of it."""
    solo.learn()
    solo.elect("p1")
    offer = found(solo.ready(), ef.Offer)[0]
    solo.feed(ev.OfferAnswered(offer, Verdict.IN_ROUND, None))
    for _ in range(60):
        solo.wait(0.6)
        if solo.fragment.office._candidates.idle.now(solo.now):
            return
    raise AssertionError("counted on for ever")


def test_no_candidate_ends_a_term_with_a_head_that_it_alone_names() -> None:
    solo = Solo(peers=PEERS)
    solo.elect("p1")
    solo.hear("p2", heads=(LAST,))
    assert refusal(request(solo, "p2", 2, LAST)) is VoteRefusal.NOT_PROVEN, "it may be true: asked again"
    solo.hear("p3", heads=(LAST,))
    assert refusal(request(solo, "p2", 2, LAST)) is VoteRefusal.NOT_PROVEN
    solo.hear("p1", heads=(LAST,))
    assert sent(request(solo, "p2", 2, LAST), msg.VoteGranted), "the holder itself says so"


def test_a_term_is_over_once_its_last_version_is_here() -> None:
    solo = Solo(peers=PEERS)
    solo.elect("p1")
    for version in branch(4, learners=PEERS)[1:]:
        assert refusal(request(solo, "p2", 2)) is VoteRefusal.COUNTED_ON
        solo.announce(version)
    assert sent(request(solo, "p2", 2), msg.VoteGranted)


def test_who_voted_stands_in_its_turn_as_soon_as_the_term_of_that_office_is_over() -> None:
    """However short it was: else one syncer stays where terms are shorter than a voter's pause."""
    solo = Solo(peers=PEERS[:2])
    assert sent(request(solo, "p1"), msg.VoteGranted)
    solo.elect("p1")
    for version in branch(4, learners=(*PEERS[:2], "me"))[1:]:
        solo.announce(version)
    timing = solo.config.timing
    rank = ranking("run", "all", 0, 2, (*PEERS[:2], "me")).index("me")
    assert (rank + 1) * timing.stagger_s < timing.election_timeout_s, "or this shows nothing"
    solo.wait((rank + 1) * timing.stagger_s)
    assert solo.fragment.office.state is OfficeState.CANDIDATE


def test_who_voted_leaves_the_candidate_the_time_to_be_elected() -> None:
    solo = Solo(peers=PEERS)
    assert sent(request(solo, "p1"), msg.VoteGranted)
    solo.wait(solo.config.timing.election_timeout_s - 0.1)
    assert solo.fragment.office.state is OfficeState.VACANT


def test_a_vote_ends_no_other_pause() -> None:
    """Neither when it is given nor when the office is filled: who failed would else stand again at once."""
    solo = Solo(peers=PEERS[:2])
    office, timing = solo.fragment.office, solo.config.timing
    pause_s = 2 * timing.election_timeout_s
    office.stand_later(solo.now + pause_s)
    assert sent(request(solo, "p1"), msg.VoteGranted)
    solo.elect("p1")
    for version in branch(4, learners=(*PEERS[:2], "me"))[1:]:
        solo.announce(version)
    solo.wait(pause_s - 0.1)
    assert office.state is OfficeState.VACANT
    solo.wait(0.2 + 2 * timing.stagger_s)
    assert office.state is OfficeState.CANDIDATE


def test_who_made_nothing_of_its_office_gets_it_last() -> None:
    solo = Solo(peers=PEERS)
    waited_in_vain(solo)
    term = solo.fragment.office._terms.next()
    assert refusal(request(solo, "p1", term)) is VoteRefusal.OUT_OF_TURN
    assert sent(request(solo, "p2", term), msg.VoteGranted)
    solo.wait(LAST_AFTER_S + 0.1)
    term = solo.fragment.office._terms.next()
    assert sent(request(solo, "p1", term), msg.VoteGranted), "where nobody else could be elected"


def test_where_nobody_else_stands_it_is_not_passed_over() -> None:
    solo = Solo(peers=PEERS)
    waited_in_vain(solo)
    for peer in ("p2", "p3", "p4"):
        solo.hear(peer, stands=False)
    solo.core.shared.leaving = True
    assert sent(request(solo, "p1", solo.fragment.office._terms.next()), msg.VoteGranted)


def test_a_version_of_its_mends_it() -> None:
    solo = Solo(peers=PEERS)
    waited_in_vain(solo)
    idle = solo.fragment.office._candidates.idle
    assert idle.now(solo.now) == {"p1"}
    solo.announce(child(solo.fragment.chain.header, "p1", PEERS, term=1))
    assert not idle.now(solo.now)


def test_an_announcement_alone_mends_nothing() -> None:
    solo = Solo(peers=PEERS)
    waited_in_vain(solo)
    solo.message("p1", announce(child(solo.fragment.chain.header, "p1", PEERS, term=1)))
    assert solo.fragment.office._candidates.idle.now(solo.now) == {"p1"}


def served(solo: Solo, *syncers: str) -> None:
    """These make a term's versions each."""
    for term, syncer in enumerate(syncers, 1):
        solo.elect(syncer, term=term, start=solo.head.number)
        for _ in range(solo.config.term_versions):
            solo.announce(child(solo.fragment.chain.header, syncer, ("me", *PEERS), term=term))


def test_who_was_syncer_lately_gets_the_office_after_others() -> None:
    """Else one member that waits for no turn has every office for ever."""
    solo = Solo(peers=PEERS)
    served(solo, "p1", "p2")
    assert refusal(request(solo, "p2", 3)) is VoteRefusal.OUT_OF_TURN
    assert refusal(request(solo, "p1", 3)) is VoteRefusal.OUT_OF_TURN
    solo.hear("p3", stands=False)
    solo.hear("p4", heads=(branch(2)[2].header.head(),))
    assert refusal(request(solo, "p1", 3)) is VoteRefusal.OUT_OF_TURN, "we would stand ourselves"
    solo.says |= {"p3": {"stands": False}, "p4": {"heads": (branch(2)[2].header.head(),)}}
    solo.core.shared.leaving = True
    term = solo.fragment.office._terms.next()
    assert sent(request(solo, "p1", term), msg.VoteGranted), "nobody else stands, or has the newest versions"


def test_who_was_syncer_lately_gets_it_if_nobody_takes_it() -> None:
    solo = Solo(peers=PEERS)
    served(solo, "p1", "p2")
    solo.fragment.office.stand_later(solo.now + 60.0)
    solo.wait(LAST_AFTER_S + 0.1)
    assert sent(request(solo, "p2", solo.fragment.office._terms.next()), msg.VoteGranted)


def test_who_was_not_syncer_lately_is_ranked_before_others() -> None:
    solo = Solo(peers=PEERS)
    served(solo, "p1", "p2")
    ranks = {solo.fragment.office._candidates.our_rank(term, solo.now) for term in range(40)}
    assert ranks == {0, 1, 2}, "p1 and p2 come last"


def test_a_syncer_may_ask_again_for_its_own_office_until_it_has_made_a_term_of_versions() -> None:
    """Its votes may be no majority any more, or it wants another term before anybody sees this one end."""
    solo = Solo(peers=PEERS)
    solo.elect("p1")
    for left in range(solo.config.term_versions, 0, -1):
        solo.elect("p1", term=solo.fragment.office._terms.next(), start=solo.head.number)
        assert sent(request(solo, "p1", solo.fragment.office._terms.next()), msg.VoteGranted), left
        solo.announce(child(solo.fragment.chain.header, "p1", ("me", *PEERS), term=solo.head.term + 1))
    assert refusal(request(solo, "p1", solo.fragment.office._terms.next())) is VoteRefusal.OUT_OF_TURN


def test_nobody_waits_for_the_rank_of_who_comes_last() -> None:
    solo = Solo(peers=PEERS)
    candidates = solo.fragment.office._candidates
    before = [candidates.our_rank(term, solo.now) for term in range(40)]
    for peer in PEERS:
        candidates.idle.was(peer, 1, solo.now)
    assert max(before) > 0 and {candidates.our_rank(term, solo.now) for term in range(40)} == {0}


@pytest.mark.parametrize(("times", "pause_s"), [(1, FIRST_S), (2, 2 * FIRST_S), (5, 960.0), (30, LONGEST_S)])
def test_it_is_longer_every_time(times: int, pause_s: float) -> None:
    idle = Idle()
    for term in range(1, times + 1):
        idle.was("p1", term, 0.0)
        idle.was("p1", term, 1000.0)  # the same once more
    assert idle.now(pause_s - 1.0) == {"p1"} and not idle.now(pause_s)
    idle.made("p1", times - 1)
    assert idle.now(0.0), "a version from before it"
    idle.made("p1", times)
    idle.was("p1", times + 1, 0.0)
    assert not idle.now(FIRST_S)
