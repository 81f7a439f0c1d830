"""What a syncer's death, slowness or new life costs."""

from __future__ import annotations

import itertools

import pytest
from election_scenes import refusal, request
from kit import (
    Solo,
    branch,
    child,
    config,
    found,
    reasons,
    saved,
    sent,
)
from scenes import expels

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.config import Timing
from p2pdiloco.core.api.reasons import Suspicion, Verdict, VoteRefusal
from p2pdiloco.core.api.types import Stamp
from p2pdiloco.core.distrust import Cause

PEERS = ("p1", "p2", "p3", "p4")


def test_a_dead_syncers_contribution_goes_to_the_next_one() -> None:
    solo = Solo(peers=PEERS)
    solo.learn()
    solo.elect("p1")
    first = found(solo.ready(), ev.Offer)[0]
    solo.answer(first, ev.OfferAnswered(Verdict.IN_ROUND, None))
    solo.wait(solo.config.timing.suspect_s + 0.1, silent=("p1",))
    again = found(solo.elect("p2", term=solo.fragment.office._terms.next()), ev.Offer)
    assert [(o.peer, o.ticket) for o in again] == [("p2", first.ticket)]
    assert again[0].signed.header.stamp == first.signed.header.stamp, "the same one: it cannot count twice"


def test_a_syncer_that_was_restarted_holds_its_office_no_more() -> None:
    solo = Solo(peers=PEERS)
    solo.elect("p1")
    assert refusal(request(solo, "p2", 2)) is VoteRefusal.COUNTED_ON
    solo.hear("p1", incarnation=solo.core.shared.view.progress("p1").incarnation + 1)
    assert sent(request(solo, "p2", solo.fragment.office._terms.next()), msg.VoteGranted)


def test_a_first_failed_send_is_followed_by_a_probe_and_a_second_one_is_believed() -> None:
    solo = Solo(peers=PEERS)
    solo.elect("p1")
    solo.wait(0.01)
    solo.feed(ev.SendFailed("p1"))
    assert solo.core.next_deadline() <= solo.now + solo.config.timing.probe_s
    effects = solo.wait(solo.config.timing.probe_s, silent=("p1",))
    assert "p1" in [send.peer for send in found(effects, ev.Send)]
    assert solo.fragment.office.why_open(solo.now) == ""
    solo.feed(ev.SendFailed("p1"))
    assert solo.fragment.office.why_open(solo.now) == "the syncer is unreachable"


def test_once_merged_never_sent_again() -> None:
    solo = Solo(peers=PEERS)
    solo.learn()
    solo.elect("p1")
    offer = found(solo.ready(), ev.Offer)[0]
    # The syncer merged it, but its answer was lost on the way.
    effects = solo.announce(child(solo.fragment.chain.header, learners=("me",)))
    commit = found(effects, ev.CommitVersion)[0]
    assert (commit.merged_ticket, commit.after) == (offer.ticket, Stamp(1, 1))
    assert solo.fragment.own.idle
    assert not found(solo.elect("p2", term=2, start=1) + solo.wait(1.0), ev.Offer)


def test_a_slow_syncer_is_suspected() -> None:
    solo = Solo(peers=PEERS)
    solo.learn()
    solo.elect("p1")
    offer = found(solo.ready(), ev.Offer)[0]
    solo.answer(offer, ev.OfferAnswered(Verdict.IN_ROUND, None))
    effects = solo.wait(30.0)
    assert reasons(effects, "suspicion")[0] == str(Suspicion.NO_VERSION)
    assert sent(effects, msg.VoteRequest)


def test_who_stays_in_office_though_we_suspect_it_gets_our_work_again() -> None:
    """It may have lost it, in a fork, and wait for it: for others nothing has come too late."""
    solo = Solo(peers=PEERS)
    solo.learn()
    solo.elect("p1")
    offer = found(solo.ready(), ev.Offer)[0]
    solo.answer(offer, ev.OfferAnswered(Verdict.IN_ROUND, None))
    late = (sent(solo.wait(0.6), msg.VoteRequest) for _ in range(60))
    requests = next(sent for sent in late if sent)
    again: list[ev.Offer] = []
    for peer in PEERS:
        assert not again
        answer = msg.VoteRefused("all", 0, requests[0].term, 1, solo.head, VoteRefusal.COUNTED_ON)
        again = found(solo.message(peer, answer) + solo.wait(0.01), ev.Offer)
        if again:
            break
    assert [(o.peer, o.signed.header.stamp) for o in again] == [("p1", offer.signed.header.stamp)]
    assert solo.fragment.office.why_open(solo.now) == str(Suspicion.NO_VERSION), "and may be voted away"


def outvoted_for(solo: Solo, seconds: float) -> list[float]:
    """Everybody else counts on p1, which says that it has our work and makes nothing of it. Returns when we
    stood against it."""
    stood: dict[int, float] = {}
    effects, until_s = solo.ready(), solo.now + seconds
    while solo.now < until_s:
        for offer in found(effects, ev.Offer):
            solo.answer(offer, ev.OfferAnswered(Verdict.IN_ROUND, None))
        effects = solo.wait(0.6)
        for term in {asked.term for asked in sent(effects, msg.VoteRequest)} - set(stood):
            stood[term] = solo.now
            for peer in PEERS:
                answer = msg.VoteRefused("all", 0, term, 1, solo.head, VoteRefusal.COUNTED_ON)
                effects += solo.message(peer, answer)
    return list(stood.values())


def test_who_was_outvoted_in_this_term_gives_its_work_at_once_when_it_suspects_again() -> None:
    solo = Solo(peers=PEERS)
    solo.learn()
    solo.elect("p1")
    stood = outvoted_for(solo, 40.0)
    assert len(stood) > 2 and all(b - a >= Timing().member_ttl_s for a, b in itertools.pairwise(stood))
    solo.announce(child(solo.fragment.chain.header, "p1", ("p2",)))
    assert not solo.fragment.office.why_open(solo.now)
    solo.fragment.office.suspect(Suspicion.NO_VERSION)
    assert solo.fragment.office.takes(solo.now)
    solo.elect("p1", term=solo.fragment.office._terms.next())
    solo.fragment.office.suspect(Suspicion.NO_VERSION)
    assert not solo.fragment.office.takes(solo.now), "anew in each term"


@pytest.mark.parametrize("why", ["distrusted", "expelled"])
def test_who_stays_in_office_though_we_found_something_against_it_gets_our_work(why: str) -> None:
    """What this node alone found moves nobody else: then it stands no more for a while, and goes on."""
    solo = Solo(config(1, loss_audits=0.5, update_codec="bf16"), PEERS)
    solo.learn()
    solo.elect("p1")
    if why == "expelled":
        expels(solo, "p1")
    else:
        solo.core.shared.distrust.add("p1", Cause.FALSE, solo.now)
    offers, terms = found(solo.ready(), ev.Offer), set[int]()
    assert not offers
    for _ in range(12):
        effects = solo.wait(0.5)
        for term in {asked.term for asked in sent(effects, msg.VoteRequest)} - terms:
            terms.add(term)
            for peer in PEERS:
                answer = msg.VoteRefused("all", 0, term, 1, solo.head, VoteRefusal.COUNTED_ON)
                effects += solo.message(peer, answer)
        offers += found(effects, ev.Offer)
        if offers and not solo.head.number:
            solo.announce(child(solo.fragment.chain.header, "p1", ("p2",)))  # a version does not end it
    assert len(terms) == 1 and offers[0].peer == "p1"
    assert solo.fragment.office.takes(solo.now) and solo.fragment.office.why_open(solo.now)
    assert sent(request(solo, "p2", max(terms) + 1), msg.VoteGranted), "and may be voted away"
    again = solo.elect("p1", term=max(terms) + 3)
    assert not found(again, ev.Offer) and not solo.fragment.office.takes(solo.now), "anew in each term"


def test_who_has_no_seat_gives_its_work_to_a_syncer_that_it_distrusts() -> None:
    """It cannot find out whether others count on that one."""
    solo = Solo(peers=PEERS, restored=saved(branch(4, learners=PEERS, seats=PEERS)))
    solo.learn()
    solo.elect("p1", start=4)
    assert not solo.core.shared.has_seat("me")
    solo.core.shared.distrust.add("p1", Cause.FALSE, solo.now)
    assert [offer.peer for offer in found(solo.ready(), ev.Offer)] == ["p1"]


def test_who_stood_in_vain_stands_in_its_turn_once_the_term_is_over() -> None:
    solo = Solo(peers=PEERS)
    solo.elect("p1")
    solo.core.shared.distrust.add("p1", Cause.FALSE, solo.now)

    def stood(s: float) -> set[int]:
        terms = set[int]()
        for _ in range(round(2 * s)):
            new = {asked.term for asked in sent(solo.wait(0.5), msg.VoteRequest)} - terms
            terms |= new
            for term in new:
                for peer in PEERS:
                    solo.message(peer, msg.VoteRefused("all", 0, term, 1, solo.head, VoteRefusal.COUNTED_ON))
        return terms

    assert len(stood(6.0)) == 1, "the others count on it"
    for _ in range(solo.config.term_versions):
        solo.announce(child(solo.fragment.chain.header, "p1", ("me", *PEERS)))
    assert stood(6.0), "there is nobody to count on"


def test_one_who_says_it_is_not_in_office_is_believed_the_second_time() -> None:
    solo = Solo(peers=PEERS)
    solo.learn()
    solo.elect("p1")
    offers = found(solo.ready(), ev.Offer)
    for _ in range(2):
        effects = solo.answer(offers[0], ev.OfferAnswered(Verdict.NOT_SYNCER, solo.head))
        effects += solo.wait(0.5)
        offers = found(effects, ev.Offer)
    assert reasons(effects, "suspicion") == ["the syncer says that it is not in office"]
