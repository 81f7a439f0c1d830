"""Whose disk takes no votes has none, until it takes them again."""

from __future__ import annotations

import pytest
from election_scenes import refusal, request
from kit import (
    Solo,
    branch,
    certificate,
    reasons,
    sent,
)

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.reasons import VoteRefusal
from p2pdiloco.core.api.types import Reach
from p2pdiloco.core.capacity import HEARD_S, TRY_EVERY_S
from p2pdiloco.core.context import Electorate
from p2pdiloco.core.delegate import LeafElectorate, UpperElectorate
from p2pdiloco.core.election import OfficeState

PEERS = ("p1", "p2", "p3", "p4")


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
    shared, since_s, standing = solo.core.shared, solo.now, solo.fragment.context.standing
    groups = (
        Electorate(shared, 0, standing),
        LeafElectorate(shared, 0, standing, (1, 1), 0, since_s),
        UpperElectorate(shared, 0, standing, (1, 2), (1, 0), "1/0/0", since_s),
    )
    for works in (True, False):
        shared.vote_disk.works = works
        assert [shared.me in group.voters(solo.now) for group in groups] == [works] * 3


@pytest.mark.parametrize("votes", [True, False])
def test_a_holder_without_a_vote_is_not_counted_as_an_unknown_one_as_well(
    votes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four groups below, the syncer of one unknown: two of four are no majority, whoever has a vote still."""
    solo = Solo(peers=PEERS)
    group = UpperElectorate(
        solo.core.shared, 0, solo.fragment.context.standing, (1, 4), (1, 0), "1/0/0", solo.now
    )
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
