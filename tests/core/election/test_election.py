"""Elections and what a syncer's death costs, one test per claim (design 5.3)."""

from __future__ import annotations

from typing import Any

import pytest
from kit import (
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
    vote,
)

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.reach import Reach
from p2pdiloco.core.api.reasons import Suspicion, Verdict, VoteRefusal
from p2pdiloco.core.api.types import NEVER, Contributor, Head, Stamp
from p2pdiloco.core.election.electorate import Electorate
from p2pdiloco.core.election.office import MAX_TERM_LEAP
from p2pdiloco.core.election.office_table import OfficeState
from p2pdiloco.core.election.rendezvous import ranking
from p2pdiloco.core.groups.electorates import LeafElectorate, UpperElectorate
from p2pdiloco.core.members.vote_disk import HEARD_S, TRY_EVERY_S

PEERS = ("p1", "p2", "p3", "p4")


def request(solo: Solo, candidate: str, term: int = 1, head: Head | None = None) -> list[ef.Effect]:
    return solo.message(candidate, msg.VoteRequest("all", 0, term, head or solo.head, "open"))


def refusal(effects: list[ef.Effect]) -> VoteRefusal:
    assert not sent(effects, msg.VoteGranted)
    return sent(effects, msg.VoteRefused)[0].reason


def standing(solo: Solo) -> tuple[float, int, list[ef.Effect]]:
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
        assert found(effects, ef.Persist)[0].record == ef.VoteRecord(0, 5, "p1")
    assert refusal(request(solo, "p2", 5)) is VoteRefusal.VOTE_GIVEN, "chosen is chosen"
    assert sent(solo.write(), msg.VoteGranted, to="p1")


def test_a_vote_survives_a_restart() -> None:
    solo = Solo(peers=PEERS, restored=saved(branch(0), (ef.VoteRecord(0, 5, "p1"),)))
    assert refusal(request(solo, "p2", 5)) is VoteRefusal.VOTE_GIVEN
    assert sent(request(solo, "p1", 5), msg.VoteGranted, to="p1")


def test_a_vote_that_cannot_be_saved_is_not_sent() -> None:
    solo = Solo(peers=PEERS)
    solo.slow_disk = True
    request(solo, "p1", 5)
    effects = solo.feed(ev.PersistFailed(solo.writing.pop().token, "disk full"))
    assert not sent(effects, msg.VoteGranted)


def says_votes(effects: list[ef.Effect]) -> set[bool]:
    """What heartbeats among these effects say of our disk."""
    said = sent(effects, msg.Progress)
    assert all(message.stands is message.votes for message in said)
    return {message.votes for message in said}


def test_who_cannot_save_a_vote_has_none_until_it_can() -> None:
    solo = Solo(peers=PEERS)
    solo.slow_disk = True
    request(solo, "p1", 5)
    effects = solo.feed(ev.PersistFailed(solo.writing.pop().token, "disk full"))
    assert says_votes(effects) == {False}, "told at once"
    assert reasons(effects, "disk") == ["no vote until one can be saved: disk full"]
    assert refusal(request(solo, "p1", 6)) is VoteRefusal.NO_DISK
    effects = solo.wait(TRY_EVERY_S + 1)  # neither does it stand, though nobody is in office
    assert not sent(effects, msg.VoteRequest) and says_votes(effects) == {False}
    assert [job.record for job in solo.writing] == [ef.VoteRecord(0, 5, "p1")], "the same vote, tried again"
    solo.feed(ev.PersistFailed(solo.writing.pop().token, "disk full"))
    solo.wait(TRY_EVERY_S + 1)
    effects = solo.write()
    assert says_votes(effects) == {True}
    assert not sent(effects, msg.VoteGranted), "nobody waits for it any more"
    solo.slow_disk = False
    assert sent(request(solo, "p1", solo.fragment.office._next_term()), msg.VoteGranted, to="p1")


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
    shared, since_s = solo.core.shared, solo.now
    groups = (
        Electorate(shared, 0),
        LeafElectorate(shared, 0, (1, 1), 0, since_s),
        UpperElectorate(shared, 0, (1, 2), (1, 0), "1/0/0", since_s),
    )
    for works in (True, False):
        shared.saving.works = works
        assert [shared.me in group.voters(solo.now) for group in groups] == [works] * 3


@pytest.mark.parametrize("votes", [True, False])
def test_a_holder_without_a_vote_is_not_counted_as_an_unknown_one_as_well(
    votes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four groups below, the syncer of one unknown: two of four are no majority, whoever has a vote still."""
    solo = Solo(peers=PEERS)
    group = UpperElectorate(solo.core.shared, 0, (1, 4), (1, 0), "1/0/0", solo.now)
    holders = {"1/0/0": "me", "1/0/1": "p1", "1/0/2": "p2"}
    monkeypatch.setattr(group, "holders", lambda now: holders)
    monkeypatch.setattr(group, "_believed", lambda now: ["1/0/3"])
    solo.hear("p2", votes=votes, stands=votes)
    now, gave = solo.now, {"p1", "p2"}
    mute = group.had_votes(gave, now)
    assert mute == (not votes)
    assert 2 * (group.count(gave, now) + mute) <= group.size(now) + mute


def test_a_candidate_is_elected_when_those_that_did_not_answer_have_no_vote() -> None:
    solo = Solo(peers=PEERS)
    while solo.fragment.office.state is not OfficeState.CANDIDATE:
        solo.wait(0.1)
    for peer in PEERS:
        assert not solo.fragment.office.holding
        solo.hear(peer, votes=False, stands=False)
    assert solo.fragment.office.holding


def test_who_has_a_vote_again_leaves_the_others_time_to_hear_of_it() -> None:
    solo = Solo(peers=(), genesis=True)
    solo.slow_disk = True
    solo.wait(10.0)  # our own vote
    solo.feed(ev.PersistFailed(solo.writing.pop().token, "disk full"))
    solo.wait(TRY_EVERY_S + 1)
    solo.slow_disk = False
    solo.write()
    solo.wait(HEARD_S - 0.1)
    assert not solo.fragment.office.holding
    solo.wait(1.0)
    assert solo.fragment.office.holding


def test_a_holder_without_a_vote_lays_its_office_down() -> None:
    solo = Solo(peers=PEERS)
    solo.take_office()
    solo.slow_disk = True
    request(solo, "p1", solo.fragment.office._next_term())
    assert solo.fragment.office.holding, "no reason to vote for another"
    solo.core.shared.saving.failed(lambda: None, "disk full", solo.now)
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


def test_votes_that_were_given_count_when_their_givers_have_none_any_more() -> None:
    solo = Solo(peers=PEERS)
    solo.message("p1", msg.Elected(certificate("p1", ("p1", "p2", "p3"), 1)))
    for peer in ("p2", "p3"):
        solo.says[peer] = {"votes": False, "stands": False}
    effects = solo.wait(solo.config.timing.suspect_s + 2)
    assert solo.fragment.office.syncer == "p1" and not reasons(effects, "office")
    late = Solo(peers=PEERS)
    late.says = solo.says
    late.wait(1.0)
    late.message("p1", msg.Elected(certificate("p1", ("p1", "p2", "p3"), 1)))
    assert late.fragment.office.syncer == "p1"


@pytest.mark.parametrize("votes", [True, False])
def test_of_those_that_a_hidden_member_cannot_hear_are_none_that_it_hears(votes: bool) -> None:
    solo = Solo(peers=PEERS, votes=votes)
    solo.feed(ev.ReachChanged(Reach.OUTBOUND))
    solo.wait(1.0)
    assert solo.fragment.office._electorate.out_of_earshot({*PEERS, "me"}, solo.now) == 0


def test_the_term_of_a_certificate_that_is_refused_is_used_up() -> None:
    solo = Solo(peers=PEERS)
    refused = solo.message("p1", msg.Elected(certificate("p1", ("p1",), 5)))
    assert reasons(refused, "refusal") == ["certificate-minority"]
    assert solo.fragment.office._next_term() == 6


@pytest.mark.parametrize("genesis", [False, True])
def test_members_without_a_vote_are_members_with_the_run(genesis: bool) -> None:
    """A newcomer that hears only of such waits for them and takes their state; it founds nothing."""
    heads = (branch(2)[-1].header.head(),)
    solo = Solo(peers=PEERS, votes=False, stands=False, heads=heads, genesis=genesis)
    solo.wait(30.0)
    assert not solo.core.confirmed
    assert solo.core.waits_for(solo.now) == "the state of the members"


def test_our_own_vote_is_durable_before_we_ask() -> None:
    solo = Solo(peers=PEERS)
    solo.slow_disk = True
    effects = solo.wait(5 * solo.config.timing.stagger_s)
    record = found(effects, ef.Persist)[0].record
    assert record == ef.VoteRecord(0, 1, "me") and not sent(effects, msg.VoteRequest)
    assert {s.peer for s in found(solo.write(), ef.Send) if isinstance(s.message, msg.VoteRequest)} == set(
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
    assert sent(request(solo, "p2", solo.fragment.office._next_term()), msg.VoteGranted)


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


def test_nobody_can_use_the_terms_up_at_once() -> None:
    solo = Solo(peers=PEERS)
    assert refusal(request(solo, "p1", 1 << 62)) is VoteRefusal.FAR_AHEAD
    assert solo.fragment.office._next_term() <= 3 * MAX_TERM_LEAP
    # One who was away for long catches up in a few requests.
    solo = Solo(peers=PEERS)
    answers = [sent(request(solo, "p1", 2500), msg.VoteGranted) for _ in range(3)]
    assert answers[-1]


def test_the_first_ranked_stands_first_and_each_rank_waits_longer() -> None:
    waits = {}
    for term in range(1, 40):
        solo = Solo(peers=PEERS, restored=saved(branch(0), (ef.VoteRecord(0, term - 1, "p9"),)))
        rank = ranking("run", "all", 0, term, (*PEERS, "me")).index("me")
        if rank not in waits:
            waited_s, stood, _ = standing(solo)
            assert stood == term
            waits[rank] = waited_s
    stagger_s = Solo().config.timing.stagger_s
    assert [waits[r] for r in range(5)] == pytest.approx([r * stagger_s for r in range(5)], abs=0.02)


def test_who_cannot_be_reached_does_not_stand_and_is_not_waited_for() -> None:
    solo = Solo(peers=PEERS, stands=False)
    waited_s, _, _ = standing(solo)
    assert waited_s < solo.config.timing.stagger_s
    solo = Solo(peers=PEERS)
    solo.core.shared.stands = False
    assert not sent(solo.wait(5.0), msg.VoteRequest)


def test_a_majority_of_votes_puts_us_in_office() -> None:
    solo = Solo(peers=PEERS)
    _, term, _ = standing(solo)
    assert not sent(solo.message("p1", msg.VoteGranted(vote("p1", "me", term))), msg.Elected)
    assert not sent(solo.message("p1", msg.VoteGranted(vote("p1", "me", term))), msg.Elected), "counted once"
    effects = solo.message("p2", msg.VoteGranted(vote("p2", "me", term)))
    proof = sent(effects, msg.Elected, to="p4")[0].certificate
    assert {v.body.voter for v in proof.votes} == {"me", "p1", "p2"}
    assert (proof.syncer, proof.term, proof.start_number) == ("me", term, 0)


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
    proof = type(good)(good.group, 0, odd.get("term", good.term), odd.get("syncer", "p1"), 0, good.votes)
    assert reasons(solo.message("p1", msg.Elected(proof)), "refusal") == [reason]
    assert solo.fragment.office.syncer is None
    solo.elect("p1")
    assert solo.fragment.office.syncer == "p1"


def test_a_forged_vote_spoils_a_certificate() -> None:
    solo = Solo(peers=PEERS)
    good = certificate("p1", ("p1", "p2", "p3"))
    forged = tuple(type(v)(v.body, good.votes[0].signature) for v in good.votes)
    proof = type(good)(good.group, 0, 1, "p1", 0, forged)
    assert reasons(solo.message("p1", msg.Elected(proof)), "refusal") == ["certificate-signature"]


def test_only_a_version_of_the_syncers_own_clears_it_of_suspicion() -> None:
    solo = Solo(peers=PEERS)
    solo.elect("p1")
    solo.fragment.office.suspect(Suspicion.NO_VERSION)
    version = child(solo.fragment.chain.header, "p2")
    solo.message("p2", announce(version))
    assert solo.fragment.office.why_open(solo.now) == str(Suspicion.NO_VERSION)
    solo.message("p1", announce(child(solo.fragment.chain.header, "p1")))
    assert solo.fragment.office.why_open(solo.now) == ""


def test_what_an_earlier_life_left_behind_comes_before_what_this_one_has() -> None:
    solo = Solo(peers=PEERS)
    solo.learn()
    solo.elect("p1")
    sent_first = found(solo.ready(), ef.Offer)[0]
    offer = sent_first.signed.header
    assert offer.after == NEVER
    part = (Contributor("me", Stamp(0, 9), 40, 4),)
    solo.announce(child(solo.fragment.chain.header, contributors=part, tokens=40))
    solo.feed(ev.OfferAnswered(sent_first, Verdict.OVERLAP, solo.head))
    again = found(solo.wait(1.0), ef.Offer)[0].signed.header
    assert (again.stamp, again.after) == (offer.stamp, Stamp(0, 9))


def test_a_term_ends_after_its_versions_and_the_next_is_elected() -> None:
    solo = Solo(config(term_versions=2), peers=PEERS)
    solo.learn()
    solo.elect("p1")
    for version in branch(2)[1:]:
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
    merge = found(solo.offer("p1", 1) + solo.offer("p2", 2), ef.Merge)[0]
    effects = solo.merged(merge)
    assert "laid down: term 1 is over" in reasons(effects, "office")
    late = contribution("p1", solo.head, Stamp(1, 2), after=Stamp(1, 1))
    answer = found(solo.feed(ev.Offered(3, "p1", late)), ef.AnswerTransfer)[0]
    assert answer.verdict is Verdict.NOT_SYNCER


def test_a_dead_syncers_contribution_goes_to_the_next_one() -> None:
    solo = Solo(peers=PEERS)
    solo.learn()
    solo.elect("p1")
    first = found(solo.ready(), ef.Offer)[0]
    solo.feed(ev.OfferAnswered(first, Verdict.IN_ROUND, None))
    solo.wait(solo.config.timing.suspect_s + 0.1, silent=("p1",))
    again = found(solo.elect("p2", term=solo.fragment.office._next_term()), ef.Offer)
    assert [(o.peer, o.ticket) for o in again] == [("p2", first.ticket)]
    assert again[0].signed.header.stamp == first.signed.header.stamp, "the same one: it cannot count twice"


def test_a_syncer_that_was_restarted_holds_its_office_no_more() -> None:
    solo = Solo(peers=PEERS)
    solo.elect("p1")
    assert refusal(request(solo, "p2", 2)) is VoteRefusal.COUNTED_ON
    solo.hear("p1", incarnation=solo.core.shared.view.progress("p1").incarnation + 1)
    assert sent(request(solo, "p2", solo.fragment.office._next_term()), msg.VoteGranted)


def test_a_first_failed_send_is_followed_by_a_probe_and_a_second_one_is_believed() -> None:
    solo = Solo(peers=PEERS)
    solo.elect("p1")
    solo.wait(0.01)
    solo.feed(ev.SendFailed("p1"))
    assert solo.core.next_deadline() <= solo.now + solo.config.timing.probe_s
    effects = solo.wait(solo.config.timing.probe_s, silent=("p1",))
    assert "p1" in [send.peer for send in found(effects, ef.Send)]
    assert solo.fragment.office.why_open(solo.now) == ""
    solo.feed(ev.SendFailed("p1"))
    assert solo.fragment.office.why_open(solo.now) == "the syncer is unreachable"


def test_once_merged_never_sent_again() -> None:
    solo = Solo(peers=PEERS)
    solo.learn()
    solo.elect("p1")
    offer = found(solo.ready(), ef.Offer)[0]
    # The syncer merged it, but its answer was lost on the way.
    effects = solo.announce(child(solo.fragment.chain.header, learners=("me",)))
    commit = found(effects, ef.CommitVersion)[0]
    assert (commit.merged_ticket, commit.after) == (offer.ticket, Stamp(1, 1))
    assert solo.fragment.own.idle
    assert not found(solo.elect("p2", term=2, start=1) + solo.wait(1.0), ef.Offer)


def test_a_slow_syncer_is_suspected() -> None:
    solo = Solo(peers=PEERS)
    solo.learn()
    solo.elect("p1")
    offer = found(solo.ready(), ef.Offer)[0]
    solo.feed(ev.OfferAnswered(offer, Verdict.IN_ROUND, None))
    effects = solo.wait(30.0)
    assert reasons(effects, "suspicion")[0] == str(Suspicion.NO_VERSION)
    assert sent(effects, msg.VoteRequest)


def test_who_stays_in_office_though_we_suspect_it_gets_our_work_again() -> None:
    """It may have lost it, in a fork, and wait for it: for others nothing has come too late."""
    solo = Solo(peers=PEERS)
    solo.learn()
    solo.elect("p1")
    offer = found(solo.ready(), ef.Offer)[0]
    solo.feed(ev.OfferAnswered(offer, Verdict.IN_ROUND, None))
    late = (sent(solo.wait(0.6), msg.VoteRequest) for _ in range(60))
    requests = next(sent for sent in late if sent)
    again: list[ef.Offer] = []
    for peer in PEERS:
        assert not again
        answer = msg.VoteRefused("all", 0, requests[0].term, 1, solo.head, VoteRefusal.COUNTED_ON)
        again = found(solo.message(peer, answer) + solo.wait(0.01), ef.Offer)
        if again:
            break
    assert [(o.peer, o.signed.header.stamp) for o in again] == [("p1", offer.signed.header.stamp)]
    assert solo.fragment.office.why_open(solo.now) == str(Suspicion.NO_VERSION), "and may be voted away"


def test_one_who_says_it_is_not_in_office_is_believed_the_second_time() -> None:
    solo = Solo(peers=PEERS)
    solo.learn()
    solo.elect("p1")
    offers = found(solo.ready(), ef.Offer)
    for _ in range(2):
        effects = solo.feed(ev.OfferAnswered(offers[0], Verdict.NOT_SYNCER, solo.head))
        effects += solo.wait(0.5)
        offers = found(effects, ef.Offer)
    assert reasons(effects, "suspicion") == ["the syncer says that it is not in office"]


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
