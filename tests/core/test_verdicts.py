"""Every word on an offer: how it comes about, and what a learner and a group do that hear it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import version_rows
from kit import (
    FIRST,
    PULLS,
    Solo,
    branch,
    certificate,
    child,
    config,
    found,
    genesis,
    progress,
    reasons,
    sent,
    sign,
    table,
    vote,
)
from refusal_rows import ELSEWHERE, GROUP, LEAF, PAYLOAD, Below, Effects, too_many, unsound, verdicts
from scenes import FORGED_STATEMENTS, shown_a_lie

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.papers import TwoVotes
from p2pdiloco.core.api.reasons import (
    FetchFailure,
    MessageFault,
    Suspicion,
    Then,
    Verdict,
    VersionFault,
    VoteRefusal,
)
from p2pdiloco.core.api.types import Certificate, Contributor, Finality, Head, Milestone, Stamp, Vote
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.distrust import Cause

PEERS = ("p1", "p2", "p3", "p4")

# --- offers: how each verdict comes about ------------------------------------------------------------

BOTH = [(v, row) for table in (LEAF, GROUP) for v, rows in table.items() for row in rows]


@pytest.mark.parametrize(("verdict", "row"), BOTH, ids=lambda value: getattr(value, "name", ""))
def test_how_a_verdict_comes_about(verdict: Verdict, row: Callable[[], Effects]) -> None:
    effects = row()
    assert verdicts(effects) == [verdict]
    assert reasons(effects, "refusal") == [str(verdict)] * verdict.counted


@pytest.mark.parametrize("verdict", PAYLOAD)
def test_a_payload_that_is_not_as_promised(verdict: Verdict) -> None:
    assert reasons(unsound(verdict)(), "refusal") == [str(verdict)] * verdict.counted


def test_a_partial_of_more_contributions_than_a_header_may_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert verdicts(too_many(monkeypatch.setattr)) == [Verdict.FULL]


def test_no_verdict_is_without_a_row() -> None:
    assert {*LEAF, *GROUP, *PAYLOAD, *ELSEWHERE} == set(Verdict)


# --- offers: what the sender does --------------------------------------------------------------------


@pytest.mark.parametrize("verdict", Verdict)
def test_what_a_learner_does_after_a_verdict(verdict: Verdict) -> None:
    solo = Solo(peers=PEERS)
    solo.learn()
    solo.elect("p1")
    offer = found(solo.ready(), ev.Offer)[0]
    solo.announce(child(solo.fragment.chain.header, "p1", ("p2",)))
    effects = solo.answer(offer, ev.OfferAnswered(verdict, solo.head))
    at_once = found(effects, ev.Offer)
    effects += solo.wait(1.0)
    again = found(effects, ev.Offer)
    assert not at_once, "never without a pause"
    refused = not verdict.taken
    assert reasons(effects, "contribution")[:refused] == [f"refused: {verdict}"] * refused
    match verdict.then:
        case Then.WAIT | Then.WAIT_LONGER:
            assert not again and not reasons(effects, "contribution")
        case Then.GIVE_UP:
            assert found(effects, ev.RetireSlot) and not again
            assert reasons(effects, "contribution")[-1] == f"given up: {verdict}"
        case _:
            bases = {other.signed.header.base_number for other in again}  # type: ignore[union-attr]
            assert bases == {1 if verdict.then is Then.RELABEL else 0}
            assert not reasons(effects, "suspicion"), "the first time"


@pytest.mark.parametrize("verdict", [v for v in Verdict if v.then in (Then.RETRY, Then.DOUBT)])
def test_what_a_learner_does_after_the_same_verdict_for_the_second_time(verdict: Verdict) -> None:
    solo = Solo(peers=PEERS)
    solo.learn()
    solo.elect("p1")
    effects = solo.ready()
    for _ in range(2):
        effects = solo.answer(found(effects, ev.Offer)[0], ev.OfferAnswered(verdict, None)) + solo.wait(1.0)
    doubts = [str(Suspicion.NOT_IN_OFFICE)] * (verdict.then is Then.DOUBT)
    assert reasons(effects, "suspicion") == doubts


def test_who_is_held_over_is_more_patient() -> None:
    waited = {}
    for verdict in (Verdict.IN_ROUND, Verdict.HELD):
        solo = Solo(config(quorum=1), peers=PEERS)
        solo.learn()
        solo.elect("p1")
        solo.answer(found(solo.ready(), ev.Offer)[0], ev.OfferAnswered(verdict, None))
        since_s = solo.now
        while not reasons(solo.wait(0.5), "suspicion"):
            pass
        waited[verdict] = solo.now - since_s
    assert waited[Verdict.HELD] > waited[Verdict.IN_ROUND] + solo.config.timing.hold_floor_s - 0.6


@pytest.mark.parametrize("verdict", Verdict)
def test_what_a_group_does_after_a_verdict_on_its_partial(verdict: Verdict) -> None:
    below = Below()
    below.answer(verdict)
    again = below.again(0.5)
    if verdict.taken:
        assert not again
        return
    assert f"refused: {verdict}" in below.recorded("partial")
    assert again and again[0].ticket == below.offer.ticket, "whatever is wrong with it: it is all there is"
    assert not below.recorded("suspicion")
    below.answer(verdict, again[-1])
    below.again(0.5)
    assert below.recorded("suspicion") == [str(Suspicion.NOT_IN_OFFICE)] * (verdict.then is Then.DOUBT)


# Every other reason for which something is refused: how it comes about, and what whoever hears it does.

# --- fetches -----------------------------------------------------------------------------------------


def asks_for_update() -> tuple[Solo, str]:
    """We pull version 1 from one of two holders."""
    solo = Solo(peers=PEERS)
    head = branch(1)[1].header.head()
    effects = solo.hear("p1", heads=(head,))
    return solo, found(effects, ev.FetchUpdate)[0].peer


@pytest.mark.parametrize("failure", FetchFailure)
def test_what_is_done_when_a_holder_does_not_deliver(failure: FetchFailure) -> None:
    solo, holder = asks_for_update()
    head = branch(1)[1].header.head()
    for peer in ("p2", "p3"):
        solo.hear(peer, heads=(head,))
    effects = solo.answer(PULLS, ev.FetchFailed(failure, "in a word"))
    assert reasons(effects, "catchup") == ["not delivered: in a word"]
    at_once = found(effects, ev.FetchUpdate)
    asked = [pull.peer == holder for pull in at_once]
    assert asked == [False] * (not failure.innocent), "a liar costs no pause"
    forgotten = failure in (FetchFailure.UNREACHABLE, FetchFailure.NOT_READY)
    assert (holder not in solo.fragment.follower.heads.holders(head.digest)) == forgotten
    effects += solo.wait(1.0, silent=("p1",))
    assert bool(found(effects, ev.FetchState)) == (failure is FetchFailure.GONE), "then a whole state"


@pytest.mark.parametrize("failure", FetchFailure)
def test_one_failure_of_the_only_holder_is_forgiven_in_seconds(failure: FetchFailure) -> None:
    solo, holder = asks_for_update()
    solo.says[holder] = {"heads": (branch(1)[1].header.head(),)}
    solo.answer(PULLS, ev.FetchFailed(failure))
    soon, later = solo.wait(1.5), solo.wait(2.0)
    assert not found(soon, ev.FetchUpdate) and not found(soon, ev.FetchState)
    assert found(later, ev.FetchUpdate) or found(later, ev.FetchState)


# --- versions ----------------------------------------------------------------------------------------


def fetched(version: SignedVersion) -> Effects:
    """An update comes with this header, and whatever follows."""
    solo, _ = asks_for_update()
    for peer in ("p2", "p3"):
        solo.hear(peer, heads=(branch(1)[1].header.head(),))
    return solo.answer(ev.FetchUpdate, ev.UpdateFetched(version, 900)) + solo.wait(1.0, silent=PEERS)


def odd(**fields: Any) -> SignedVersion:
    """Version 1, wrong in this, and rightly signed."""
    header = msgspec.structs.replace(child(genesis(0).header).header, **fields)
    return SignedVersion(header, sign(header.syncer, "version", header))


def forged_version() -> SignedVersion:
    return SignedVersion(odd().header, odd(tokens=80).signature)


def another_result(certain: bool = False) -> Effects:
    solo, _ = asks_for_update()
    solo.says = {peer: {"heads": (branch(1)[1].header.head(),)} for peer in ("p1", "p2", "p3")}
    solo.hear("p2")
    solo.hear("p3")
    job = found(solo.answer(ev.FetchUpdate, ev.UpdateFetched(odd(), 900)), ev.ApplyUpdate)[0]
    return solo.answer(job, ev.UpdateApplied(bytes(32), certain=certain)) + solo.wait(1.0)


def another_state() -> Effects:
    """Who is asked for a state gives one of a version on which nobody else stands."""
    solo, _ = asks_for_update()
    solo.says = {peer: {"heads": (branch(1)[1].header.head(),)} for peer in ("p1", "p2", "p3")}
    solo.hear("p2")
    solo.hear("p3")
    solo.answer(PULLS, ev.FetchFailed(FetchFailure.GONE))
    solo.wait(1.0)
    other = branch(3)[3]
    return solo.answer(ev.FetchState, ev.StateFetched(other, table(other)))


def part(tokens: int = 40, stamp: Stamp = FIRST) -> tuple[Contributor, ...]:
    return (Contributor("p1", stamp, tokens, 4),)


def by_another() -> tuple[Contributor, ...]:
    """The work of p1, as somebody else says."""
    return child(genesis(0).header, by="p2").header.contributors


VERSIONS: dict[VersionFault, Callable[[], Effects]] = {
    VersionFault.CHAIN_MOVED: lambda: fetched(odd(number=2)),
    VersionFault.PARENT_DIFFERS: lambda: fetched(odd(parent=bytes(32))),
    VersionFault.UNELECTED: lambda: fetched(odd(elected=None)),
    VersionFault.OTHER_HOLDER: lambda: fetched(
        odd(elected=certificate("p1", ("p1",), base=genesis(0).header.digest()))
    ),
    VersionFault.DIGEST_DIFFERS: another_result,
    VersionFault.FALSE_STATE: lambda: another_result(certain=True),
    VersionFault.WRONG_FRAGMENT: lambda: fetched(odd(codec="fp8")),
    VersionFault.SIGNATURE: lambda: fetched(forged_version()),
    VersionFault.FALSE_PLAN: lambda: fetched(odd(epoch=7)),
    VersionFault.UNSUPPORTED: another_state,
    VersionFault.FALSE_TOKENS: lambda: fetched(odd(tokens=7)),
    **version_rows.ROWS,
    VersionFault.FALSE_TRUST: lambda: fetched(odd(contributors=part())),
    VersionFault.FALSE_TABLE: lambda: fetched(odd(table=bytes(32))),
    VersionFault.FALSE_FINALITY: lambda: fetched(odd(finality=Finality(Milestone(8, bytes(32))))),
    VersionFault.FALSE_SCALE: lambda: fetched(odd(unit=41)),
    VersionFault.OUT_OF_SCALE: lambda: fetched(odd(norm=math.inf)),
    VersionFault.FALSE_STAMP: lambda: fetched(odd(contributors=part(stamp=Stamp(1, 1 << 17)))),
    VersionFault.FALSE_LABEL: lambda: fetched(odd(contributors=by_another())),
    VersionFault.IMPLAUSIBLE_TOKENS: lambda: fetched(odd(contributors=part(4000), tokens=4000)),
}


@pytest.mark.parametrize("fault", VersionFault)
def test_why_a_version_does_not_become_ours(fault: VersionFault) -> None:
    effects = VERSIONS[fault]()
    assert not found(effects, ev.CommitVersion)
    told = [*reasons(effects, "fork"), *reasons(effects, "refusal"), *reasons(effects, "catchup")]
    assert told[0].removeprefix("not taken: ") == str(fault)
    assert bool(reasons(effects, "fork")) == (fault.forked and fault is not VersionFault.DIGEST_DIFFERS)
    assert bool(found(effects, ev.FetchState)) == fault.forked


# --- votes -------------------------------------------------------------------------------------------


def asked(solo: Solo, term: int, by: str = "p1", head: Head | None = None, group: str = "all") -> Effects:
    return solo.message(by, msg.VoteRequest(group, 0, term, head or solo.head, "open"))


def full_disk() -> Effects:
    solo = Solo(peers=PEERS)
    solo.slow_disk = True
    asked(solo, 5)
    solo.answer(solo.writing.pop(), ev.Undone("disk full"))
    return asked(solo, 6)


def two_are_being_saved() -> Effects:
    solo = Solo(peers=PEERS)
    solo.slow_disk = True
    asked(solo, 2)
    asked(solo, 3)
    return asked(solo, 4)


def has_no_seat() -> Effects:
    """s1, who asks, was merged, and has no seat."""
    solo = Solo(peers=(*PEERS, "s1"))
    for version in branch(2, learners=("p1", "s1"))[1:]:
        solo.announce(version)
    return asked(solo, 1, "s1")


def newcomer() -> Effects:
    solo = Solo(peers=PEERS, heads=(branch(3)[3].header.head(),))
    return asked(solo, 1)


def ahead_by_its_own_word() -> Effects:
    return after(lambda solo: solo.elect("p2"), 2, head=branch(4)[4].header.head())


def made_nothing_of_it() -> Effects:
    def idle(solo: Solo) -> None:
        solo.elect("p1")
        solo.fragment.office.suspect(Suspicion.NO_VERSION)
        solo.feed(ev.Tick())

    return after(idle, 2)


def after(what: Callable[[Solo], object], term: int, candidate: str = "p1", **request: Head) -> Effects:
    solo = Solo(peers=PEERS)
    what(solo)
    return asked(solo, term, candidate, **request)


def unheard_in_our_group() -> Effects:
    below = Below()
    group = below.member.core.fragments[0].posts.leaf.name
    request = msg.VoteRequest(group, 0, 9, below.member.core.fragments[0].chain.head, "open")
    return below.member.core.handle(ev.MessageReceived("stranger", request), below.swarm.now)


VOTES: dict[VoteRefusal, Callable[[], Effects]] = {
    VoteRefusal.OTHER_EPOCH: lambda: asked(Solo(peers=PEERS), 1, group="0/0/1"),
    VoteRefusal.NOT_HEARD_OF: unheard_in_our_group,
    VoteRefusal.NO_DISK: full_disk,
    VoteRefusal.CATCHING_UP: newcomer,
    VoteRefusal.NOT_CONFIRMED: lambda: asked(Solo(peers=PEERS), 1, "stranger"),
    VoteRefusal.NO_VOTER: has_no_seat,
    VoteRefusal.FAR_AHEAD: lambda: asked(Solo(peers=PEERS), 1 << 40),
    VoteRefusal.CERTIFIED: lambda: after(lambda solo: solo.elect("p2", 4), 4),
    VoteRefusal.VOTE_GIVEN: lambda: after(lambda solo: asked(solo, 5, "p2"), 5),
    VoteRefusal.SAVING: two_are_being_saved,
    VoteRefusal.LIGHTER: lambda: after(
        lambda solo: solo.announce(branch(1)[1]), 2, head=genesis(0).header.head()
    ),
    VoteRefusal.COUNTED_ON: lambda: after(lambda solo: solo.elect("p2"), 2),
    VoteRefusal.NOT_PROVEN: ahead_by_its_own_word,
    VoteRefusal.DISTRUSTED: lambda: after(lambda s: s.core.shared.distrust.add("p1", Cause.FALSE, s.now), 1),
    VoteRefusal.OUT_OF_TURN: made_nothing_of_it,
}


@pytest.mark.parametrize("refusal", VoteRefusal)
def test_why_a_vote_is_refused(refusal: VoteRefusal) -> None:
    effects = VOTES[refusal]()
    assert [told.reason for told in sent(effects, msg.VoteRefused)] == [refusal]
    assert not sent(effects, msg.VoteGranted)


@pytest.mark.parametrize("refusal", VoteRefusal)
def test_what_a_candidate_does_that_everybody_refuses(refusal: VoteRefusal) -> None:
    solo = Solo(peers=PEERS)
    effects: Effects = []
    while not sent(effects, msg.VoteRequest):
        effects = solo.wait(0.1)
    term = sent(effects, msg.VoteRequest)[0].term
    effects = []
    for peer in PEERS:
        effects += solo.message(peer, msg.VoteRefused("all", 0, term, 0, None, refusal))
    lost = [f"not elected: a majority is impossible: {refusal}"] * (not refusal.soft)
    assert reasons(effects, "election") == lost
    again = sent(solo.wait(0.4), msg.VoteRequest)
    assert ({request.term for request in again} == {term}) == refusal.soft


# --- messages and syncers ----------------------------------------------------------------------------


def said(message: msg.Message, sender: str = "p1") -> Effects:
    return Solo(peers=PEERS).message(sender, message)


def stands_and_hears(made: Callable[[int], Vote]) -> Effects:
    solo = Solo(peers=PEERS)
    effects: Effects = []
    while not sent(effects, msg.VoteRequest):
        effects = solo.wait(0.1)
    return solo.message("p1", msg.VoteGranted(made(sent(effects, msg.VoteRequest)[0].term)))


def elected(proof: Certificate) -> Effects:
    return said(msg.Elected(proof))


def forged_proof() -> Certificate:
    good = certificate("p1", PEERS)
    votes = tuple(Vote(given.body, good.votes[0].signature) for given in good.votes)
    return Certificate("all", 0, 1, "p1", votes)


def forged_vote() -> Vote:
    return Vote(vote("p2", "p3", 1).body, b"")


def liar_says(message: msg.Message) -> Effects:
    return shown_a_lie(Solo(peers=PEERS), "p1").message("p1", message)


def heads_out_of_order() -> Effects:
    head = genesis(0).header.head()
    return said(msgspec.structs.replace(progress(()), heads=((7, head),)))


MESSAGES: dict[MessageFault, Callable[[], Effects]] = {
    MessageFault.OUR_OWN_NAME: lambda: said(msg.OfficeQuery("all", 0, 0), "me"),
    MessageFault.UNKNOWN_FRAGMENT: lambda: said(msg.OfficeQuery("all", 7, 0)),
    MessageFault.WRONG_HEADS: heads_out_of_order,
    MessageFault.VOTE_OF_ANOTHER: lambda: said(msg.VoteGranted(vote("p2", "me", 1))),
    MessageFault.VOTE_FOR_ANOTHER: lambda: stands_and_hears(lambda term: vote("p1", "p2", term)),
    MessageFault.VOTE_SIGNATURE: lambda: stands_and_hears(
        lambda term: Vote(vote("p1", "me", term).body, vote("p2", "me", term).signature)
    ),
    MessageFault.CERTIFICATE_EMPTY: lambda: elected(certificate("p1", ())),
    MessageFault.CERTIFICATE_REPEATS: lambda: elected(certificate("p1", (*PEERS, "p1"))),
    MessageFault.CERTIFICATE_MINORITY: lambda: elected(certificate("p1", ("p1", "p2"))),
    MessageFault.CERTIFICATE_SIGNATURE: lambda: elected(forged_proof()),
    MessageFault.EXCLUDED: lambda: liar_says(msg.OfficeQuery("all", 0, 0)),
    **FORGED_STATEMENTS,
    MessageFault.FALSE_PROOF: lambda: said(msg.Proven(TwoVotes(vote("p2", "p1", 1), forged_vote()))),
}


@pytest.mark.parametrize("fault", MessageFault)
def test_what_is_wrong_with_a_message_is_recorded(fault: MessageFault) -> None:
    assert reasons(MESSAGES[fault](), "refusal") == [str(fault)]


@pytest.mark.parametrize(
    "message",
    [
        msg.VoteGranted(vote("p1", "me", 1, fragment=7)),
        msg.Elected(certificate("p1", PEERS, fragment=7)),
        msg.VoteRequest("half", 0, 1, genesis(0).header.head(), "open"),
    ],
)
def test_what_names_no_fragment_or_group_is_refused(message: msg.Message) -> None:
    assert reasons(said(message), "refusal") == [str(MessageFault.UNKNOWN_FRAGMENT)]


def given_work() -> tuple[Solo, ev.Offer]:
    solo = Solo(peers=PEERS)
    solo.learn()
    solo.elect("p1")
    return solo, found(solo.ready(), ev.Offer)[0]


def nothing_comes_of_it() -> Effects:
    solo, offer = given_work()
    solo.answer(offer, ev.OfferAnswered(Verdict.IN_ROUND, None))
    return solo.wait(60.0)


def turned_away_twice() -> Effects:
    solo, offer = given_work()
    effects = solo.answer(offer, ev.OfferAnswered(Verdict.NOT_SYNCER, None)) + solo.wait(1.0)
    return solo.answer(found(effects, ev.Offer)[0], ev.OfferAnswered(Verdict.NOT_SYNCER, None))


SUSPICIONS: dict[Suspicion, Callable[[], Effects]] = {
    Suspicion.NO_VERSION: nothing_comes_of_it,
    Suspicion.NOT_IN_OFFICE: turned_away_twice,
    Suspicion.RESTARTED: lambda: given_work()[0].hear("p1", incarnation=2),
}


@pytest.mark.parametrize("why", Suspicion)
def test_why_a_syncer_that_is_alive_is_not_counted_on(why: Suspicion) -> None:
    assert reasons(SUSPICIONS[why](), "suspicion") == [str(why)]
