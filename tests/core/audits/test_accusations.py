"""Accusations of false merges: who makes them, who finds out, and whom that excludes."""

from __future__ import annotations

import pytest
from kit import (
    RUN,
    Solo,
    announce,
    branch,
    child,
    config,
    found,
    reasons,
    restored_nothing,
    sent,
    sign,
    table,
)
from msgspec.structs import replace

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.config import Restored, RestoredFragment
from p2pdiloco.core.api.proofs import short_of
from p2pdiloco.core.api.reasons import AuditOutcome, MessageFault
from p2pdiloco.core.api.statements import Accusation, FalseVersion, Refutation
from p2pdiloco.core.api.types import UNMEASURED
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.audits import accusations, auditor
from p2pdiloco.lab.simulation.world.crypto import HashCrypto

Effects = list[ef.Effect]
SAME, DIFFERENT, MISSING = AuditOutcome.SAME, AuditOutcome.DIFFERENT, AuditOutcome.MISSING
PEERS = ("p1", "p2", "p3", "p4")
ALL = ("me", *PEERS)
VERIFY = HashCrypto("").verify


@pytest.fixture(autouse=True)
def nobody_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditor, "DRAWN", 0.0)


CHAIN = branch(9, learners=ALL)
"""A chain by which all of them vote, made by p1."""


def node(chain: list[SignedVersion] = CHAIN, *, saved: bool = True, **run: object) -> Solo:
    """We hold that chain, and so do the others."""
    fragment = RestoredFragment(log=tuple(chain), watermarks=table(chain[-1]))
    solo = Solo(
        config(1, audited=True, log_versions=20, **run), PEERS, Restored(fragments=(fragment,), saved=saved)
    )
    solo.wait(2.0)
    return solo


def accusation(version: SignedVersion = CHAIN[-1], by: str = "p2") -> Accusation:
    subject = FalseVersion(short_of(version))
    return Accusation(subject, by, sign(by, "accusation", subject))


def refutation(of: Accusation, by: str) -> Refutation:
    return Refutation(of, by, sign(by, "refutation", of))


def states(solo: Solo, statement: Accusation | Refutation, by: str = "") -> Effects:
    return solo.message(by or statement.author(), msg.Stated(statement))


def excluded(solo: Solo) -> tuple[str, ...]:
    return solo.core.shared.excluded.peers


def outcome(solo: Solo, audit: ef.Audit, how: AuditOutcome) -> Effects:
    header = audit.version.header
    return solo.feed(ev.Audited(audit.fragment, header.number, header.digest(), how))


def stated(effects: Effects) -> dict[str, list[object]]:
    """What is stated, by whom it is told."""
    told: dict[str, list[object]] = {}
    for each in found(effects, ef.Send):
        if isinstance(each.message, msg.Stated):
            told.setdefault(each.peer, []).append(each.message.statement)
    return told


# --- accusing ------------------------------------------------------------------------------------------


def finds_false(solo: Solo) -> tuple[SignedVersion, Effects]:
    """p1's next version hardly goes our way, and is false."""
    made = child(solo.fragment.chain.header, "p1", ALL)
    effects = solo.message("p1", announce(made))
    for pull in found(effects, ef.FetchUpdate):
        effects += solo.feed(ev.UpdateFetched(0, pull.peer, made, 900))
    for job in found(effects, ef.ApplyUpdate):
        effects += solo.feed(ev.UpdateApplied(0, job.number, 900, made.header.state_digest, cosine=0.0))
    (audit,) = found(effects, ef.Audit)
    assert audit.givers == ()
    return made, outcome(solo, audit, DIFFERENT)


def test_who_finds_a_merge_false_excludes_its_syncer_for_good_and_accuses_it_before_all() -> None:
    solo = node()
    made, effects = finds_false(solo)
    ours = accusation(made, by="me")
    assert ours.holds(RUN, VERIFY)
    assert excluded(solo) == ("p1",)
    assert reasons(effects, "excluded") == ["version 10 of fragment 0 is not the merge of what it names"]
    assert stated(effects) == {peer: [ours] for peer in PEERS}, "the accused, too"
    assert found(effects, ef.KeepProofs) == [ef.KeepProofs((ours,))]
    kept = replace(restored_nothing(solo.config), proofs=(ours,))
    assert excluded(Solo(solo.config, PEERS, kept)) == ("p1",), "also after a restart"


def test_what_others_state_is_no_evidence_on_our_disk() -> None:
    made = accusation()
    assert not excluded(Solo(node().config, PEERS, replace(restored_nothing(config()), proofs=(made,))))


@pytest.mark.parametrize("how", [SAME, MISSING, AuditOutcome.UNABLE])
def test_nobody_is_accused_of_anything_else(how: AuditOutcome) -> None:
    solo = node()
    made = child(solo.fragment.chain.header, "p1", ALL)
    solo.fragment.auditor.own_part(made.header)
    solo.fragment.chain.extend(made)
    solo.fragment.auditor.applied(made, 0.0, solo.now)
    (audit,) = found(solo.core.shared.out.take(), ef.Audit)
    assert not stated(outcome(solo, audit, how)) and not excluded(solo)


# --- hearing -------------------------------------------------------------------------------------------


def test_who_hears_an_accusation_passes_it_on_once_and_makes_the_merge_again() -> None:
    solo = node()
    effects = states(solo, accusation())
    assert [(audit.version, audit.givers) for audit in found(effects, ef.Audit)] == [(CHAIN[-1], ("p2",))]
    assert stated(effects) == {peer: [accusation()] for peer in ("p1", "p3", "p4")}
    more = states(solo, accusation(), by="p3") + states(solo, accusation(by="p4"))
    assert not stated(more) and not found(more, ef.Audit), "another one of the same is audited with it"


def test_if_it_is_true_the_syncer_is_excluded_for_good_by_our_own_word() -> None:
    solo = node()
    (audit,) = found(states(solo, accusation()), ef.Audit)
    effects = outcome(solo, audit, DIFFERENT)
    assert excluded(solo) == ("p1",)
    assert found(effects, ef.KeepProofs)[0].proofs == (accusation(by="me"),)


def test_if_it_is_false_all_who_accused_are_excluded() -> None:
    solo = node()
    (audit,) = found(states(solo, accusation()) + states(solo, accusation(by="p4")), ef.Audit)
    effects = outcome(solo, audit, SAME)
    assert sorted(excluded(solo)) == ["p2", "p4"]
    words = "it accused version 9 of fragment 0, which is the merge of what it names"
    assert reasons(effects, "excluded") == [words] * 2
    assert refutation(accusation(), "me") in stated(effects)["p3"]
    late = states(solo, accusation(by="p3"))
    assert "p3" in excluded(solo) and not found(late, ef.Audit), "it knows already"
    assert "p1" not in excluded(solo), "though most of those who vote say so"


def test_nothing_follows_where_the_contributions_are_gone_and_the_accuser_is_not_heard_for_a_while() -> None:
    solo = node()
    (audit,) = found(states(solo, accusation()), ef.Audit)
    outcome(solo, audit, MISSING)
    assert not excluded(solo)
    assert not found(states(solo, accusation(CHAIN[-2])), ef.Audit)
    assert found(states(solo, accusation(CHAIN[-2], by="p3")), ef.Audit), "others are"
    solo.now += accusations.PAUSE_S + 1.0
    for peer in PEERS:
        solo.hear(peer)
    assert solo.core.shared.accusations.hears("p2", solo.now)


def test_an_audit_that_was_under_way_is_made_again_with_what_the_accuser_has() -> None:
    solo = node()
    made = child(solo.fragment.chain.header, "p1", ALL)
    solo.fragment.auditor.own_part(made.header)
    solo.fragment.chain.extend(made)
    solo.fragment.auditor.applied(made, 0.0, solo.now)
    (first,) = found(solo.core.shared.out.take(), ef.Audit)
    assert not found(states(solo, accusation(made)), ef.Audit)
    (second,) = found(outcome(solo, first, MISSING), ef.Audit)
    assert second.givers == ("p2",)
    outcome(solo, second, DIFFERENT)
    assert excluded(solo) == ("p1",)


def test_a_version_that_is_still_on_its_way_is_waited_for() -> None:
    solo = node()
    made = child(CHAIN[-1].header, "p1", ALL)
    assert not found(states(solo, accusation(made)), ef.Audit)
    solo.fragment.chain.extend(made)
    assert found(solo.feed(ev.Tick()), ef.Audit)


def test_one_of_another_branch_is_forgotten() -> None:
    solo = node()
    states(solo, accusation(child(CHAIN[-2].header, "p1", ("p1",))))
    solo.now += accusations.WAIT_S + 1.0
    solo.feed(ev.Tick())
    assert not solo.core.shared.accusations._waiting


def test_of_what_groups_made_the_sum_is_audited() -> None:
    chain = [*CHAIN, child(CHAIN[-1].header, "p1", ALL, groups=2)]
    chain.append(child(chain[-1].header, "p1", ALL))
    solo = node(chain)
    (audit,) = found(states(solo, accusation(chain[-1])), ef.Audit)
    assert audit.part is None and len(audit.below) == 2


def test_an_accusation_of_ourselves_is_looked_into_and_nobody_accuses_itself() -> None:
    chain = branch(9, syncer="me", learners=ALL)
    for how, culprits in ((SAME, ("p2",)), (DIFFERENT, ())):
        solo = node(chain)
        (audit,) = found(states(solo, accusation(chain[-1])), ef.Audit)
        assert not found(outcome(solo, audit, how), ef.CastOut)
        assert excluded(solo) == culprits


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
    assert not found(effects, ef.Audit)


def test_a_statement_of_a_peer_that_has_not_worked_is_not_even_checked() -> None:
    solo = node()
    checks: list[str] = []
    solo.core.shared.excluded._verify = lambda peer, *_: bool(checks.append(peer))  # type: ignore[method-assign]
    assert not found(states(solo, accusation(by="s1")), ef.Send) and not checks
    states(solo, accusation())
    assert checks == ["p2"]


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
    (audit,) = found(states(solo, accusation()), ef.Audit)
    outcome(solo, audit, SAME)
    assert not found(states(solo, accusation(CHAIN[-2]), by="p3"), ef.Audit)
    assert excluded(solo) == ("p2",)


# --- who could not find out for itself ---------------------------------------------------------------------


def test_who_comes_later_believes_most_of_those_who_vote() -> None:
    solo = node()
    solo.core.shared.audits.begin(7)  # it cannot audit
    states(solo, accusation())
    states(solo, accusation(CHAIN[-2], by="p3"))
    assert not excluded(solo), "two of four: the accused has no say"
    effects = states(solo, accusation(by="p4"), by="p3")
    assert excluded(solo) == ("p1",)
    assert found(effects, ef.KeepProofs) == [ef.KeepProofs(())], "it is to be heard again after a restart"


def test_what_it_finds_itself_after_that_holds_after_a_restart_as_well() -> None:
    solo = node()
    (audit,) = found(states(solo, accusation()), ef.Audit)
    states(solo, accusation(by="p3"))
    states(solo, accusation(by="p4"))
    assert excluded(solo) == ("p1",)
    effects = outcome(solo, audit, DIFFERENT)
    ours = accusation(by="me")
    assert found(effects, ef.KeepProofs) == [ef.KeepProofs((ours,))] and not reasons(effects, "excluded")
    assert stated(effects)["p2"] == [ours], "others may need our word"


def test_a_false_accuser_is_excluded_by_the_word_of_most_as_well() -> None:
    solo, made = node(), accusation()
    solo.core.shared.audits.begin(7)
    for by in ("p1", "p3"):
        states(solo, refutation(made, by))
    assert not excluded(solo)
    states(solo, refutation(made, "p4"))
    assert excluded(solo) == ("p2",)


def test_our_own_finding_is_worth_more_than_the_word_of_most() -> None:
    chain = branch(9, learners=(*ALL, "p5"))
    solo, made = node(chain), accusation(chain[-1])
    (audit,) = found(states(solo, made), ef.Audit)
    outcome(solo, audit, DIFFERENT)
    for by in ("p3", "p4", "p5", "p1"):
        states(solo, refutation(made, by))
    assert len(table(chain[-1])) == 6 and excluded(solo) == ("p1",)


def test_who_began_with_nothing_believes_nobody_before_it_is_confirmed() -> None:
    solo = node(saved=False)
    solo.core.shared.confirmed = False
    solo.core.shared.audits.begin(7)
    for by in ("p2", "p3", "p4"):
        states(solo, accusation(by=by))
    assert not excluded(solo)
    solo.core.shared.confirm()
    for by in ("p2", "p3", "p4"):
        states(solo, accusation(by=by))
    assert excluded(solo) == ("p1",), "it is told again"


def test_one_voter_alone_is_not_believed() -> None:
    chain = branch(9, syncer="p1", learners=("p2",))
    assert [mark.learner for mark in table(chain[-1]) if mark.voter] == ["p2"]
    solo = node([*chain, child(chain[-1].header, "p1", ("p1", "p2"))])
    solo.core.shared.audits.begin(7)
    states(solo, accusation(chain[-1]))
    assert not excluded(solo)


def test_most_that_state_it_of_us_end_this_node() -> None:
    chain = branch(9, syncer="me", learners=ALL)
    solo = node(chain)
    effects: Effects = []
    for by in ("p2", "p3", "p4"):
        effects += states(solo, accusation(chain[-1], by=by))
    assert [end.words for end in found(effects, ef.CastOut)] == [
        "version 9 of fragment 0 is not the merge of what it names"
    ]


def test_who_excludes_others_is_told_why_and_so_is_the_excluded() -> None:
    solo = node()
    (audit,) = found(states(solo, accusation()), ef.Audit)
    outcome(solo, audit, DIFFERENT)
    ours = msg.Stated(accusation(by="me"))
    assert sent(solo.hear("p1"), msg.Stated, "p1") == [ours]
    assert sent(solo.hear("p3"), msg.Stated, "p3") == [ours]
    assert CHAIN[-1].header.contributors[0].score == UNMEASURED


def test_a_statement_is_small() -> None:
    assert len(msg.encode(RUN, msg.Stated(refutation(accusation(), "p3")))) < 1200
