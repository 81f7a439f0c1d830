"""Elections, one test per claim (docs/protocol/election.md)."""

from __future__ import annotations

from typing import Any

import pytest
from election_scenes import refusal, request
from kit import (
    RUN,
    Solo,
    announce,
    branch,
    certificate,
    child,
    config,
    contribution,
    found,
    reasons,
    saved,
    sent,
    table,
    vote,
)

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.config import Timing
from p2pdiloco.core.api.reasons import Suspicion, Verdict, VoteRefusal
from p2pdiloco.core.api.types import NEVER, Contributor, Stamp
from p2pdiloco.core.api.versions import Plan
from p2pdiloco.core.candidates import ranking
from p2pdiloco.core.context import Electorate
from p2pdiloco.core.delegate import LeafElectorate, UpperElectorate
from p2pdiloco.core.election import OfficeState
from p2pdiloco.core.pending import Underway
from p2pdiloco.core.voting import HEARSAY, Candidacy

PEERS = ("p1", "p2", "p3", "p4")


def standing(solo: Solo) -> tuple[float, int, list[ev.Effect]]:
    """Wait until we stand: (seconds waited, the term, effects)."""
    start = solo.now
    while solo.fragment.office.state is not OfficeState.CANDIDATE:
        assert solo.now < start + 10
        effects = solo.wait(0.01)
    return solo.now - start, sent(effects, msg.VoteRequest)[0].term, effects


def test_one_vote_a_term() -> None:
    solo = Solo(peers=PEERS)
    granted = sent(request(solo, "p1", 5), msg.VoteGranted, to="p1")[0]
    assert granted.vote == vote("me", "p1", 5)
    assert refusal(request(solo, "p2", 5)) is VoteRefusal.VOTE_GIVEN
    assert refusal(request(solo, "p2", 4)) is VoteRefusal.VOTE_GIVEN
    assert sent(request(solo, "p1", 5), msg.VoteGranted, to="p1"), "a lost answer is given again"
    assert sent(request(solo, "p2", 6), msg.VoteGranted, to="p2")


def test_a_vote_is_durable_before_it_is_sent() -> None:
    solo = Solo(peers=PEERS)
    solo.slow_disk = True
    for _ in range(2):  # asked again while the disk is at it: still not a word
        effects = request(solo, "p1", 5)
        assert not sent(effects, msg.VoteGranted)
        assert found(effects, ev.Persist)[0].record == ev.VoteRecord(0, 5, "p1")
    assert refusal(request(solo, "p2", 5)) is VoteRefusal.VOTE_GIVEN, "chosen is chosen"
    assert sent(solo.write(), msg.VoteGranted, to="p1")


def test_a_vote_survives_a_restart() -> None:
    solo = Solo(peers=PEERS, restored=saved(branch(0), (ev.VoteRecord(0, 5, "p1"),)))
    assert refusal(request(solo, "p2", 5)) is VoteRefusal.VOTE_GIVEN
    assert sent(request(solo, "p1", 5), msg.VoteGranted, to="p1")


def test_a_vote_that_cannot_be_saved_is_not_sent() -> None:
    solo = Solo(peers=PEERS)
    solo.slow_disk = True
    request(solo, "p1", 5)
    effects = solo.answer(solo.writing.pop(), ev.Undone("disk full"))
    assert not sent(effects, msg.VoteGranted)


def test_the_term_of_a_certificate_that_is_refused_is_used_up() -> None:
    solo = Solo(peers=PEERS)
    refused = solo.message("p1", msg.Elected(certificate("p1", ("p1",), 5)))
    assert reasons(refused, "refusal") == ["certificate-minority"]
    assert solo.fragment.office._terms.next() == 6


def test_our_own_vote_is_durable_before_we_ask() -> None:
    solo = Solo(peers=PEERS)
    solo.slow_disk = True
    effects = solo.wait(5 * solo.config.timing.stagger_s)
    record = found(effects, ev.Persist)[0].record
    assert record == ev.VoteRecord(0, 1, "me") and not sent(effects, msg.VoteRequest)
    assert {s.peer for s in found(solo.write(), ev.Send) if isinstance(s.message, msg.VoteRequest)} == set(
        PEERS
    )


def test_no_vote_for_a_lighter_candidate() -> None:
    chain = branch(2)
    solo = Solo(peers=PEERS, restored=saved(chain))
    lighter = chain[1].header.head()
    assert refusal(request(solo, "p1", 5, lighter)) is VoteRefusal.LIGHTER
    assert sent(request(solo, "p1", 6, solo.head), msg.VoteGranted)


def test_no_vote_while_the_syncer_is_alive() -> None:
    solo = Solo(peers=PEERS)
    solo.elect("p1")
    assert refusal(request(solo, "p2", 2)) is VoteRefusal.COUNTED_ON
    solo.wait(solo.config.timing.suspect_s + 1, silent=("p1",))
    assert sent(request(solo, "p2", solo.fragment.office._terms.next()), msg.VoteGranted)


def test_a_vote_for_the_holder_itself_who_laid_the_office_down() -> None:
    solo = Solo(peers=PEERS)
    solo.elect("p1")
    assert sent(request(solo, "p1", 2), msg.VoteGranted)


def test_no_vote_for_strangers_or_newcomers_or_terms_that_were() -> None:
    solo = Solo(peers=PEERS)
    assert refusal(request(solo, "stranger")) is VoteRefusal.NOT_CONFIRMED
    solo.hear("p2", confirmed=False)
    assert refusal(request(solo, "p2")) is VoteRefusal.NOT_CONFIRMED
    solo.elect("p1", term=4)
    assert refusal(request(solo, "p1", 4)) is VoteRefusal.CERTIFIED


def test_who_has_a_version_of_a_late_term_stands_in_a_later_one() -> None:
    """Else its versions would begin no term, and no paper would count, for many elections."""
    solo = Solo(restored=saved(branch(3, term=11)))
    solo.take_office()
    assert solo.fragment.office.term == 12


def test_nobody_can_use_the_terms_up_at_once() -> None:
    solo = Solo(peers=PEERS)
    assert refusal(request(solo, "p1", 1 << 62)) is VoteRefusal.FAR_AHEAD
    assert solo.fragment.office._terms.next() <= HEARSAY + 1
    # One who was away for long catches up at once.
    solo = Solo(peers=PEERS)
    assert sent(request(solo, "p1", 2500), msg.VoteGranted)


def test_the_first_ranked_stands_first_and_each_rank_waits_longer() -> None:
    waits = {}
    for term in range(1, 40):
        solo = Solo(peers=PEERS, restored=saved(branch(0), (ev.VoteRecord(0, term - 1, "p9"),)))
        rank = ranking("run", "all", 0, term, (*PEERS, "me")).index("me")
        if rank not in waits:
            waited_s, stood, _ = standing(solo)
            assert stood == term
            waits[rank] = waited_s
    stagger_s = Solo().config.timing.stagger_s
    assert [waits[r] for r in range(5)] == pytest.approx([r * stagger_s for r in range(5)], abs=0.02)


def test_who_does_not_stand_is_not_waited_for() -> None:
    solo = Solo(peers=PEERS, stands=False)
    waited_s, _, _ = standing(solo)
    assert waited_s < solo.config.timing.stagger_s


def test_a_majority_of_votes_puts_us_in_office() -> None:
    solo = Solo(peers=PEERS)
    _, term, _ = standing(solo)
    assert not sent(solo.message("p1", msg.VoteGranted(vote("p1", "me", term))), msg.Elected)
    assert not sent(solo.message("p1", msg.VoteGranted(vote("p1", "me", term))), msg.Elected), "counted once"
    effects = solo.message("p2", msg.VoteGranted(vote("p2", "me", term)))
    proof = sent(effects, msg.Elected, to="p4")[0].certificate
    assert {v.body.voter for v in proof.votes} == {"me", "p1", "p2"}
    assert (proof.syncer, proof.term, proof.base[0]) == ("me", term, 0)


@pytest.mark.parametrize(
    ("reason", "sender", "made"),
    [
        ("vote-of-another", "p2", {"voter": "p1"}),
        ("vote-for-another", "p1", {"candidate": "p2"}),
        ("vote-signature", "p1", {"signer": "p2"}),
        ("", "p1", {"term": 99}),
        ("", "stranger", {"voter": "stranger"}),
    ],
)
def test_a_false_vote_does_not_count(reason: str, sender: str, made: dict[str, Any]) -> None:
    solo = Solo(peers=("p1", "p2"))
    _, term, _ = standing(solo)
    given = vote(made.get("voter", "p1"), made.get("candidate", "me"), made.get("term", term))
    if "signer" in made:
        given = type(given)(given.body, vote("p2", "me", term).signature)
    effects = solo.message(sender, msg.VoteGranted(given))
    assert reasons(effects, "refusal") == ([reason] if reason else [])
    assert not solo.fragment.office.holding


@pytest.mark.parametrize(
    ("reason", "voters", "odd"),
    [
        ("certificate-minority", ("p1", "p2"), {}),
        ("certificate-minority", ("p1", "p2", "x1", "x2"), {}),
        ("certificate-empty", (), {}),
        ("certificate-signature", ("p1", "p2", "p3"), {"syncer": "p2"}),
        ("certificate-signature", ("p1", "p2", "p3"), {"term": 2}),
    ],
)
def test_only_our_own_majority_is_believed(reason: str, voters: tuple[str, ...], odd: dict[str, Any]) -> None:
    solo = Solo(peers=PEERS)
    good = certificate("p1", voters)
    proof = type(good)(good.group, 0, odd.get("term", good.term), odd.get("syncer", "p1"), good.votes)
    assert reasons(solo.message("p1", msg.Elected(proof)), "refusal") == [reason]
    assert solo.fragment.office.syncer is None
    solo.elect("p1")
    assert solo.fragment.office.syncer == "p1"


@pytest.mark.parametrize(("voters", "follows"), [(("p1",), None), (("p1", "p2"), "p1")])
def test_a_seat_that_voted_and_that_we_do_not_hear_counts_as_here(
    voters: tuple[str, ...], follows: str | None
) -> None:
    """Of five seats we hear one: the syncer, which another hidden seat has elected (storm seed 29)."""
    solo = Solo(peers=("p1",))
    solo.message("p1", msg.Elected(certificate("p1", voters)))
    assert solo.fragment.office.syncer == follows
    solo.wait(10.0)
    assert (solo.fragment.office.term == 1) == bool(follows), "for as long as it is in office"


def test_a_forged_vote_spoils_a_certificate() -> None:
    solo = Solo(peers=PEERS)
    good = certificate("p1", ("p1", "p2", "p3"))
    forged = tuple(type(v)(v.body, good.votes[0].signature) for v in good.votes)
    proof = type(good)(good.group, 0, 1, "p1", forged)
    assert reasons(solo.message("p1", msg.Elected(proof)), "refusal") == ["certificate-signature"]


def test_of_a_certificate_no_more_votes_are_checked_than_count() -> None:
    """Strangers' votes may be sound, and hundreds."""
    solo = Solo(peers=("p1", "p2"))
    for version in branch(2, learners=("me", "p1", "p2"))[1:]:
        solo.announce(version)
    voters = "p1", "p2", *(f"a{index:02}" for index in range(20))
    good = certificate("p1", voters, 9, 2, base=solo.head.digest)
    checked: list[str] = []
    shared = solo.core.shared
    shared.signed_by = lambda peer, *_: not checked.append(peer)  # type: ignore[method-assign, func-returns-value]
    solo.message("p1", msg.Elected(good))
    assert checked == ["p1", "p2"] and solo.fragment.office.syncer == "p1"


def test_only_a_version_clears_the_syncer_of_suspicion() -> None:
    solo = Solo(peers=PEERS)
    solo.elect("p1")
    solo.fragment.office.suspect(Suspicion.NO_VERSION)
    solo.message("p1", announce(solo.fragment.chain.signed))
    assert solo.fragment.office.why_open(solo.now) == str(Suspicion.NO_VERSION), "it says what we have"
    solo.elect("p1", term=2)
    assert solo.fragment.office.why_open(solo.now) == str(Suspicion.NO_VERSION), "it made nothing yet"
    solo.announce(child(solo.fragment.chain.header, "p1", term=2))
    assert solo.fragment.office.why_open(solo.now) == ""


def test_what_an_earlier_life_left_behind_comes_before_what_this_one_has() -> None:
    solo = Solo(peers=PEERS)
    solo.learn()
    solo.elect("p1")
    sent_first = found(solo.ready(), ev.Offer)[0]
    offer = sent_first.signed.header
    assert offer.after == NEVER
    part = (Contributor("me", Stamp(0, 9), 40, 4),)
    solo.announce(child(solo.fragment.chain.header, contributors=part, tokens=40))
    solo.answer(sent_first, ev.OfferAnswered(Verdict.OVERLAP, solo.head))
    again = found(solo.wait(1.0), ev.Offer)[0].signed.header
    assert (again.stamp, again.after) == (offer.stamp, Stamp(0, 9))


def test_a_term_ends_after_its_versions_and_the_next_is_elected() -> None:
    solo = Solo(config(term_versions=2), peers=PEERS)
    solo.learn()
    solo.elect("p1")
    for version in branch(2, learners=(*PEERS, "me"))[1:]:
        assert solo.fragment.office.syncer == "p1"
        solo.announce(version)
    assert solo.fragment.office.syncer is None and solo.fragment.office.why_open(solo.now) == "term 1 is over"
    next_first = ranking("run", "all", 0, 2, (*PEERS, "me"))[0]
    if next_first == "me":
        assert standing(solo)[1] == 2
    else:
        assert sent(request(solo, next_first, 2), msg.VoteGranted), "though the last syncer is alive"


def test_a_holder_whose_term_is_over_stops_by_itself() -> None:
    solo = Solo(config(term_versions=1))
    solo.take_office()
    merge = found(solo.offer("p1", 1) + solo.offer("p2", 2), ev.Merge)[0]
    effects = solo.merged(merge)
    assert "laid down: term 1 is over" in reasons(effects, "office")
    late = contribution("p1", solo.head, Stamp(1, 2), after=Stamp(1, 1))
    answer = found(solo.feed(ev.Offered(3, "p1", late)), ev.AnswerTransfer)[0]
    assert answer.verdict is Verdict.NOT_SYNCER


def test_a_lost_candidacy_waits_before_the_next() -> None:
    solo = Solo(peers=PEERS)
    _, term, _ = standing(solo)
    effects = solo.wait(solo.config.timing.election_timeout_s + 0.1)
    assert any("no majority in time" in r for r in reasons(effects, "election"))
    assert standing(solo)[1] > term


def test_members_who_come_make_an_old_certificate_void() -> None:
    solo = Solo(peers=("p1", "p2"))
    solo.elect("p1")
    solo.peers = PEERS
    effects = [e for peer in ("p3", "p4") for e in solo.hear(peer)] + solo.wait(1.0)
    assert solo.fragment.office.syncer == "p1" and not reasons(effects, "office"), "the holder goes first"
    effects = solo.wait(solo.config.timing.suspect_s)
    assert solo.fragment.office.syncer is None and reasons(effects, "office")


def test_a_candidate_that_is_ahead_of_us_gets_our_vote() -> None:
    solo = Solo(peers=PEERS)
    ahead = branch(2)[2].header.head()
    assert sent(request(solo, "p2", 1, ahead), msg.VoteGranted)


def test_votes_that_come_after_the_majority_are_in_the_certificate_that_others_ask_for() -> None:
    """Others may count more voters than we do."""
    solo = Solo(peers=PEERS)
    _, term, _ = standing(solo)
    for peer in PEERS[:2]:
        effects = solo.message(peer, msg.VoteGranted(vote(peer, "me", term)))
    told = sent(effects, msg.Elected)[0].certificate
    assert solo.fragment.office.holding and len(told.votes) == 3
    solo.message("p3", msg.VoteGranted(vote("p3", "me", term)))
    solo.message("p3", msg.VoteGranted(vote("p3", "me", term)))
    solo.message("p4", msg.VoteGranted(vote("p4", "me", term + 1)))
    solo.message("s1", msg.VoteGranted(vote("s1", "me", term)))
    (given,) = sent(solo.message("p4", msg.OfficeQuery("all", 0, 0)), msg.Elected, to="p4")
    assert [each.body.voter for each in given.certificate.votes] == ["me", "p1", "p2", "p3"]


def test_who_claims_what_it_has_not_keeps_nobody_from_asking_whoever_has_it() -> None:
    solo = Solo(peers=PEERS)
    asked: set[str] = set()
    for _ in range(20):
        solo.now += 0.1
        effects = solo.hear("p1", offices=(("all", 0, 1_000),)) + solo.hear("p2", offices=(("all", 0, 1),))
        asks = [send.peer for send in found(effects, ev.Send) if isinstance(send.message, msg.OfficeQuery)]
        assert len(asks) == len(set(asks))
        asked.update(asks)
    assert asked == {"p1", "p2"}


# Nobody is in office by its own word, and who makes nothing of an office is the last to have it again.

LAST = branch(4)[4].header.head()
"""Head with which a term that began at version 0 is over."""


def waited_in_vain(solo: Solo) -> None:
    """p1 takes our work in its first term, and makes nothing of it."""
    solo.learn()
    solo.elect("p1")
    offer = found(solo.ready(), ev.Offer)[0]
    solo.answer(offer, ev.OfferAnswered(Verdict.IN_ROUND, None))
    for _ in range(60):
        solo.wait(0.6)
        if solo.fragment.office._trust.suspected:
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
    office._turn._not_before_s = solo.now + pause_s
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
    solo.wait(Timing().settle_s + 0.1)
    term = solo.fragment.office._terms.next()
    assert sent(request(solo, "p1", term), msg.VoteGranted), "where nobody else could be elected"


def test_where_nobody_else_stands_it_is_not_passed_over() -> None:
    solo = Solo(peers=PEERS)
    waited_in_vain(solo)
    for peer in ("p2", "p3", "p4"):
        solo.hear(peer, stands=False)
    solo.core.shared.leaving = True
    assert sent(request(solo, "p1", solo.fragment.office._terms.next()), msg.VoteGranted)


def test_who_gets_votes_time_and_again_and_comes_into_no_office_comes_last() -> None:
    """One seat asked for votes in ever new terms: an office of seven was open for 552 of 600 seconds."""
    solo = Solo(peers=PEERS)
    office, open_s = solo.fragment.office, 0.0
    while open_s < Timing().suspect_s:
        solo.wait(0.3)
        open_s = office.open_s(solo.now)
        assert sent(request(solo, "p1", office._terms.next()), msg.VoteGranted)
    assert refusal(request(solo, "p1", solo.fragment.office._terms.next())) is VoteRefusal.OUT_OF_TURN
    assert sent(request(solo, "p2", solo.fragment.office._terms.next()), msg.VoteGranted)


def test_an_office_is_of_the_branch_for_which_it_was_elected() -> None:
    """A holder that had copied another went on, and nobody could follow what it made: no office was shown."""
    chain = branch(3, learners=PEERS)
    solo = Solo(peers=PEERS, restored=saved(chain))
    solo.wait(1.0)
    solo.elect("p1", term=5, start=3)
    assert solo.fragment.office.syncer == "p1"
    other = child(chain[2].header, "p2", (*PEERS, "me"), term=chain[3].header.term)
    solo.fragment.chain.replace(other, table(other), yields=True)
    assert solo.fragment.office.syncer is None


def test_a_holder_that_copied_a_state_lays_down_an_office_of_before() -> None:
    """It counted on itself, and for the others it was of another branch: nobody was elected (seed 500036)."""
    chain = branch(3, learners=PEERS)
    solo = Solo(peers=PEERS, restored=saved(chain))
    solo.wait(1.0)
    solo.learn()
    solo.take_office()
    assert solo.fragment.office.holding
    other = child(child(chain[2].header, "p2", (*PEERS, "me")).header, "p2", (*PEERS, "me"))
    solo.fragment.chain.replace(other, table(other))
    solo.wait(0.1)
    assert not solo.fragment.office.holding


def test_who_has_itself_elected_again_is_waited_for_no_longer() -> None:
    """One that made nothing stood again every five seconds: no version in 533 seconds, and no suspicion."""
    solo = Solo(peers=PEERS)
    solo.learn()
    solo.elect("p1")
    effects, began_s = solo.ready(), solo.now
    while solo.fragment.office.why_open(solo.now) != str(Suspicion.NO_VERSION):
        assert solo.now < began_s + 30.0
        for offer in found(effects, ev.Offer):
            solo.answer(offer, ev.OfferAnswered(Verdict.IN_ROUND, None))
        effects = solo.wait(3.0)
        effects += solo.elect("p1", term=solo.fragment.office._terms.next())


@pytest.mark.parametrize(("next_syncer", "deadline_s"), [("p1", 10.0), ("p2", 30.0)])
def test_a_deadline_lasts_while_the_same_syncer_is_elected_again(next_syncer: str, deadline_s: float) -> None:
    work = Underway()
    for syncer, now, until_s in (("p1", 0.0, 10.0), (next_syncer, 5.0, 30.0)):
        work.office_changed(syncer, now)
        work.offered(syncer, now)
        work.office_changed(syncer, now)  # also while the work is on its way
        work.accepted()
        work.wait_until(until_s)
    assert work.deadline_s == deadline_s


def test_no_candidacy_is_won_before_our_own_vote_is_durable() -> None:
    solo = Solo(peers=PEERS)
    solo.wait(1.0)
    candidacy = Candidacy(solo.fragment.context, "all", solo.fragment.office._electorate, 3, "test")
    assert not any(candidacy.count(solo.vote_of(peer, 3), solo.now) for peer in PEERS)
    assert candidacy.count(solo.vote_of("me", 3), solo.now)
    assert candidacy.certificate().base == (solo.head.number, solo.head.digest)


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
    solo.fragment.office._turn._not_before_s = solo.now + 60.0
    solo.wait(Timing().settle_s + 0.1)
    assert sent(request(solo, "p2", solo.fragment.office._terms.next()), msg.VoteGranted)


def test_who_was_not_syncer_lately_is_ranked_before_others() -> None:
    solo = Solo(peers=PEERS)
    served(solo, "p1", "p2")
    ranks = {solo.fragment.office._candidates.our_rank(term, solo.now) for term in range(40)}
    assert ranks == {0, 1, 2}, "p1 and p2 come last"


# Whose disk takes no votes has none, until it takes them again.


def says_votes(effects: list[ev.Effect]) -> set[bool]:
    """What heartbeats among these effects say of our disk."""
    said = sent(effects, msg.Progress)
    assert all(message.stands is message.votes for message in said)
    return {message.votes for message in said}


def test_who_cannot_save_a_vote_has_none_until_it_can() -> None:
    solo = Solo(peers=PEERS)
    solo.slow_disk = True
    request(solo, "p1", 5)
    effects = solo.answer(solo.writing.pop(), ev.Undone("disk full"))
    assert says_votes(effects) == {False}, "told at once"
    assert reasons(effects, "disk") == ["no vote until one can be saved: disk full"]
    assert refusal(request(solo, "p1", 6)) is VoteRefusal.NO_DISK
    effects = solo.wait(Timing().suspect_s + 1)  # neither does it stand, though nobody is in office
    assert not sent(effects, msg.VoteRequest) and says_votes(effects) == {False}
    assert [job.record for job in solo.writing] == [ev.VoteRecord(0, 5, "p1")], "the same vote, tried again"
    solo.answer(solo.writing.pop(), ev.Undone("disk full"))
    solo.wait(Timing().suspect_s + 1)
    effects = solo.write()
    assert says_votes(effects) == {True}
    assert not sent(effects, msg.VoteGranted), "nobody waits for it any more"
    solo.slow_disk = False
    assert sent(request(solo, "p1", solo.fragment.office._terms.next()), msg.VoteGranted, to="p1")


def test_who_has_no_vote_counts_in_no_majority() -> None:
    solo = Solo(peers=PEERS)
    assert len(PEERS) > 1
    for peer in PEERS:
        solo.says[peer] = {"votes": False, "stands": False}
        solo.hear(peer)
    solo.wait(1.0)
    assert solo.fragment.office.holding, "one of one"


def test_without_a_vote_we_count_in_no_majority_of_any_group() -> None:
    solo = Solo(peers=PEERS)
    shared, since_s, roster = solo.core.shared, solo.now, solo.fragment.context.roster
    groups = (
        Electorate(shared, 0, roster),
        LeafElectorate(shared, roster, Plan(RUN, 0, 1, 1, 8), 0, since_s),
        UpperElectorate(shared, roster, Plan(RUN, 0, 1, 2, 8), (1, 0), "1/0/0", since_s),
    )
    for works in (True, False):
        shared.vote_disk.works = works
        assert [shared.me in group.voters(solo.now) for group in groups] == [works] * 3


def test_a_candidate_is_elected_when_those_that_did_not_answer_have_no_vote() -> None:
    solo = Solo(peers=PEERS)
    while solo.fragment.office.state is not OfficeState.CANDIDATE:
        solo.wait(0.1)
    for peer in PEERS:
        assert not solo.fragment.office.holding
        solo.hear(peer, votes=False, stands=False)
    assert solo.fragment.office.holding


def test_a_holder_without_a_vote_lays_its_office_down() -> None:
    solo = Solo(peers=PEERS)
    solo.take_office()
    solo.slow_disk = True
    request(solo, "p1", solo.fragment.office._terms.next())
    assert solo.fragment.office.holding, "no reason to vote for another"
    solo.core.shared.vote_disk.failed(lambda: None, "disk full", solo.now)
    effects = solo.wait(1.0)
    assert "laid down: our disk takes no votes" in reasons(effects, "office")
    assert not solo.fragment.office.holding and not sent(effects, msg.VoteRequest)


def test_an_office_is_open_when_its_holder_has_no_vote_and_does_not_claim_it() -> None:
    solo = Solo(peers=PEERS)
    solo.elect("p1")
    office = solo.fragment.office
    solo.says["p1"] = {"votes": False, "stands": False, "offices": (("all", 0, 1),)}
    solo.wait(1.0)
    assert office.why_open(solo.now) == "", "it goes on until it knows"
    solo.says["p1"] = {"votes": False, "stands": False}
    solo.hear("p1")
    assert office.why_open(solo.now) == "the syncer cannot save, and has laid the office down"


@pytest.mark.parametrize("genesis", [False, True])
def test_members_without_a_vote_are_members_with_the_run(genesis: bool) -> None:
    """A newcomer that hears only of such waits for them and takes their state; it founds nothing."""
    heads = (branch(2)[-1].header.head(),)
    solo = Solo(peers=PEERS, votes=False, stands=False, heads=heads, genesis=genesis)
    solo.wait(30.0)
    assert not solo.core.confirmed
    assert solo.core.waits_for(solo.now) == "the state of the members"


def test_a_machine_that_calculates_otherwise_stands_for_no_office_and_says_so() -> None:
    """What it signs would be false for all others, who would exclude it."""
    solo = Solo(peers=PEERS)
    solo.wait(1.0, silent=PEERS)
    effects = solo.feed(ev.Miscalculates())
    said = sent(effects, msg.Progress)
    assert said and not any(each.stands for each in said) and all(each.votes for each in said)
    assert reasons(effects, "office") == [
        "we stand for none: this machine calculates otherwise than all others"
    ]
    assert not sent(solo.wait(30.0), msg.VoteRequest), "nobody is in office, and it is the last in no turn"
    assert sent(request(solo, "p1", 5), msg.VoteGranted), "it votes"


def test_a_syncer_that_finds_that_it_calculates_otherwise_lays_its_office_down() -> None:
    solo = Solo(peers=PEERS)
    solo.take_office()
    solo.feed(ev.Miscalculates())
    assert not solo.fragment.office.holding
    assert not sent(solo.wait(30.0), msg.VoteRequest) and solo.core.confirmed


def test_a_syncer_may_ask_again_for_its_own_office_until_it_has_made_a_term_of_versions() -> None:
    """Its votes may be no majority any more, or it wants another term before anybody sees this one end."""
    solo = Solo(peers=PEERS)
    solo.elect("p1")
    for left in range(solo.config.term_versions, 0, -1):
        solo.elect("p1", term=solo.fragment.office._terms.next(), start=solo.head.number)
        assert sent(request(solo, "p1", solo.fragment.office._terms.next()), msg.VoteGranted), left
        solo.announce(child(solo.fragment.chain.header, "p1", ("me", *PEERS), term=solo.fragment.office.term))
    assert refusal(request(solo, "p1", solo.fragment.office._terms.next())) is VoteRefusal.OUT_OF_TURN


def test_whoever_claims_an_office_of_an_older_term_is_given_the_newer_certificate() -> None:
    """Partition seed 501: the only seat here was syncer of term 2, and waited for ever for the work of a
    learner that followed the syncer of term 3, which was gone."""
    solo = Solo(peers=PEERS)
    solo.elect("p1", term=3)
    (told,) = sent(solo.hear("p2", offices=(("all", 0, 2),)), msg.Elected, to="p2")
    assert told.certificate.term == 3
    assert not sent(solo.hear("p2", offices=(("all", 0, 2),)), msg.Elected), "now and then"
