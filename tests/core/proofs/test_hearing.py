"""Hearing of statements on merges: who is listened to, what is made again, and when others are believed."""

from __future__ import annotations

import pytest
from kit import (
    Solo,
    branch,
    child,
    config,
    found,
    reasons,
    sent,
    sign,
    table,
    vote,
    word,
)
from msgspec.structs import replace
from statements_kit import (
    ALL,
    CHAIN,
    DIFFERENT,
    GONE,
    MISSING,
    OLD,
    PEERS,
    SAME,
    Effects,
    accusation,
    excluded,
    node,
    outcome,
    refutation,
    stated,
    states,
)

from p2pdiloco.core import audits
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.config import Restored, RestoredFragment
from p2pdiloco.core.api.evidence import Accusation, FalseVersion, Refutation
from p2pdiloco.core.api.papers import TwoVotes
from p2pdiloco.core.api.reasons import CastOutWhy, MessageFault
from p2pdiloco.core.chain import WITHIN_VERSIONS


@pytest.fixture(autouse=True)
def nobody_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "DRAWN", 0.0)


# --- bounds ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["accusation", "subject", "refutation"])
def test_what_nobody_signed_is_held_against_who_tells_it(place: str) -> None:
    solo, made = node(), accusation()
    forged: Accusation | Refutation = replace(made, signature=b"forged")
    if place == "subject":
        subject = FalseVersion(replace(made.subject.version, signature=b"forged"))
        forged = Accusation(subject, "p2", sign("p2", "accusation", subject))
    if place == "refutation":
        forged = replace(refutation(made, "p3"), signature=b"forged")
    effects = states(solo, forged, by="p4")
    assert reasons(effects, "refusal") == [str(MessageFault.FALSE_STATEMENT)]
    assert not found(effects, ev.Audit)


def test_a_statement_of_a_peer_that_has_not_worked_is_not_even_checked() -> None:
    solo = node()
    checks: list[str] = []
    solo.core.shared.excluded._verify = lambda peer, *_: bool(checks.append(peer))  # type: ignore[method-assign]
    assert not found(states(solo, accusation(by="s1")), ev.Send) and not checks
    states(solo, accusation())
    assert checks == ["p2"]


def test_what_strangers_tell_is_not_even_checked() -> None:
    solo = node()
    checks: list[str] = []
    solo.core.shared.excluded._verify = lambda peer, *_: bool(checks.append(peer))  # type: ignore[method-assign]
    assert not states(solo, accusation(by="p3"), by="s1") and not checks
    states(solo, accusation(by="p3"))
    assert checks == ["p3"], "others are"


def test_versions_far_behind_and_far_ahead_are_not_heard() -> None:
    chain = branch(WITHIN_VERSIONS + 3, learners=ALL)
    solo, ahead = node(chain), [chain[-1]]
    while len(ahead) < WITHIN_VERSIONS + 2:
        ahead.append(child(ahead[-1].header, "p1", ALL))
    waiting = solo.core.shared.accusations._waiting
    states(solo, accusation(chain[-2 - WITHIN_VERSIONS]))
    states(solo, accusation(ahead[-1]))
    assert not waiting
    states(solo, accusation(chain[-1 - WITHIN_VERSIONS]))
    states(solo, accusation(ahead[-2], by="p3"))
    assert set(waiting) == {"p2", "p3"}


def test_a_proof_outranks_a_word_and_false_versions_of_who_is_shown_to_have_lied_are_made_again() -> None:
    """Else nobody who heard of the two votes first could take its false versions back."""
    lie = TwoVotes(vote("p1", "p2", 70), vote("p1", "p3", 70))
    solo = node()
    solo.message("p3", msg.Proven(lie))
    (audit,) = found(states(solo, accusation()), ev.Audit)
    assert not stated(outcome(solo, audit, DIFFERENT))
    assert not found(states(solo, accusation(by="p3")), ev.Audit), "it is known"
    assert solo.core.shared.excluded.proofs == (lie,)
    solo = node()
    (audit,) = found(states(solo, accusation()), ev.Audit)
    outcome(solo, audit, DIFFERENT)
    effects = solo.message("p3", msg.Proven(lie))
    assert found(effects, ev.KeepProofs) == [ev.KeepProofs((lie,))]
    assert sent(effects, msg.Proven, "p2") == [msg.Proven(lie)], "who could not audit needs it"
    assert not reasons(effects, "excluded")


def test_runs_without_audits_hear_none() -> None:
    solo = node(CHAIN)
    sparse = Solo(replace(solo.config, audited=False), PEERS)
    assert reasons(states(sparse, accusation()), "refusal") == [str(MessageFault.NO_AUDITS)]


def test_an_accuser_has_one_accusation_at_a_time() -> None:
    solo = node()
    states(solo, accusation())
    assert not stated(states(solo, accusation(CHAIN[-2])))
    assert stated(states(solo, accusation(CHAIN[-2], by="p4")))


def test_the_excluded_accuse_nobody() -> None:
    solo = node()
    (audit,) = found(states(solo, accusation()), ev.Audit)
    outcome(solo, audit, SAME)
    assert not found(states(solo, accusation(CHAIN[-2]), by="p3"), ev.Audit)
    assert excluded(solo) == ("p2",)


# --- who could not find out for itself ---------------------------------------------------------------------


def test_who_comes_later_believes_most_of_those_who_vote() -> None:
    solo = node()
    states(solo, accusation(GONE))
    states(solo, accusation(OLD, by="p3"))
    assert not excluded(solo), "two of four: the accused has no say"
    effects = states(solo, accusation(GONE, by="p4"), by="p3")
    assert excluded(solo) == ("p1",)
    assert found(effects, ev.KeepProofs) == [ev.KeepProofs(())], "it is to be heard again after a restart"


def test_others_are_not_believed_before_our_own_audit_has_ended_in_vain() -> None:
    solo = node()
    (audit,) = found(states(solo, accusation()), ev.Audit)
    for by in ("p3", "p4", "p2"):
        states(solo, accusation(by=by))
    assert not excluded(solo)
    (again,) = found(outcome(solo, audit, MISSING), ev.Audit)
    outcome(solo, again, MISSING)
    assert not excluded(solo)
    states(solo, accusation(by="p4"))
    assert excluded(solo) == ("p1",), "it is told again"


def test_most_that_accuse_an_honest_syncer_before_we_have_made_the_merge_again_lose_their_own_place() -> None:
    solo = node()
    (audit,) = found(states(solo, accusation()), ev.Audit)
    for by in ("p3", "p4"):
        states(solo, accusation(by=by))
    outcome(solo, audit, SAME)
    assert sorted(excluded(solo)) == ["p2", "p3", "p4"]


@pytest.mark.parametrize(
    ("members", "named", "believed"), [(3, 0, True), (9, 0, True), (9, 1, True), (9, 6, False)]
)
def test_two_of_three_seats_are_believed_where_they_are_most_of_those_who_may_have_one(
    members: int, named: int, believed: bool
) -> None:
    """Whoever else is here counts once the owner has named it."""
    peers = tuple(f"p{n}" for n in range(1, members + 1))
    three = ("p1", "p2", "p3")
    chain = branch(2, syncer="p1", learners=peers, seats=three)
    fragment = RestoredFragment(log=tuple(chain), watermarks=table(chain[-1]))
    run = config(1, audited=True, owner="owner", seats=three)
    solo = Solo(run, peers, Restored(fragments=(fragment,), saved=True))
    papers = tuple(word(peer, number) for number, peer in enumerate(peers[3 : 3 + named], 1))
    solo.feed(ev.Guided(papers=papers))
    solo.wait(2.0)
    assert solo.fragment.chain.marks.seats == set(three)
    for by in ("p2", "p3"):
        states(solo, accusation(child(chain[0].header, "p1", ("p2",)), by=by))
    assert (excluded(solo) == ("p1",)) is believed


def test_a_false_accuser_is_excluded_by_the_word_of_most_as_well() -> None:
    solo, made = node(), accusation(GONE)
    for by in ("p1", "p3"):
        states(solo, refutation(made, by))
    assert not excluded(solo)
    states(solo, refutation(made, "p4"))
    assert excluded(solo) == ("p2",)


def test_our_own_finding_is_worth_more_than_the_word_of_most() -> None:
    chain = branch(9, learners=(*ALL, "p5"))
    solo, made = node(chain), accusation(chain[-1])
    (audit,) = found(states(solo, made), ev.Audit)
    outcome(solo, audit, DIFFERENT)
    for by in ("p3", "p4", "p5", "p1"):
        states(solo, refutation(made, by))
    assert len(table(chain[-1])) == 6 and excluded(solo) == ("p1",)


def test_who_began_with_nothing_believes_nobody_before_it_is_confirmed() -> None:
    solo = node(saved=False)
    solo.core.shared.confirmed = False
    for by in ("p2", "p3", "p4"):
        states(solo, accusation(GONE, by=by))
    assert not excluded(solo)
    solo.core.shared.confirm()
    for by in ("p2", "p3", "p4"):
        states(solo, accusation(GONE, by=by))
    assert excluded(solo) == ("p1",), "it is told again"


def test_one_seat_alone_is_not_believed() -> None:
    chain = branch(9, syncer="p1", learners=("p2",), seats=("p2",))
    solo = node([*chain, child(chain[-1].header, "p1", ("p1", "p2"))])
    assert solo.fragment.chain.marks.seats == {"p2"}
    states(solo, accusation(GONE))
    assert not excluded(solo)


def test_most_that_state_it_of_us_end_this_node() -> None:
    chain = branch(9, syncer="me", learners=ALL)
    gone = child(chain[-2].header, "me", ("p2",))
    solo = node(chain)
    effects: Effects = []
    for by in ("p2", "p3", "p4"):
        effects += states(solo, accusation(gone, by=by))
    assert found(effects, ev.CastOut) == [
        ev.CastOut("version 9 of fragment 0 is not the merge of what it names", CastOutWhy.UNSOUND)
    ]
