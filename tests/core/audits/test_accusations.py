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
)
from msgspec.structs import replace
from statements_kit import (
    ALL,
    CHAIN,
    DIFFERENT,
    MISSING,
    PEERS,
    SAME,
    VERIFY,
    Effects,
    accusation,
    excluded,
    node,
    outcome,
    refutation,
    stated,
    states,
)

from p2pdiloco.core import audit_state, audits
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.reasons import AuditOutcome, CastOutWhy
from p2pdiloco.core.api.types import UNMEASURED
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.distrust import Cause


@pytest.fixture(autouse=True)
def nobody_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "DRAWN", 0.0)


# --- accusing ------------------------------------------------------------------------------------------


def finds_false(solo: Solo) -> tuple[SignedVersion, Effects]:
    """p1's next version hardly goes our way, and is false."""
    made = child(solo.fragment.chain.header, "p1", ALL)
    effects = solo.message("p1", announce(made))
    for pull in found(effects, ev.FetchUpdate):
        effects += solo.answer(pull, ev.UpdateFetched(made, 900))
    for job in found(effects, ev.ApplyUpdate):
        effects += solo.answer(job, ev.UpdateApplied(made.header.state_digest, cosine=0.0))
    (audit,) = found(effects, ev.Audit)
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
    assert found(effects, ev.KeepProofs) == [ev.KeepProofs((ours,))]
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
    (audit,) = found(solo.taken(solo.core.shared.out.take()), ev.Audit)
    assert not stated(outcome(solo, audit, how)) and not excluded(solo)


# --- hearing -------------------------------------------------------------------------------------------


def test_who_hears_an_accusation_passes_it_on_once_and_makes_the_merge_again() -> None:
    solo = node()
    effects = states(solo, accusation())
    assert [(audit.version, audit.givers) for audit in found(effects, ev.Audit)] == [(CHAIN[-1], ("p2",))]
    assert stated(effects) == {peer: [accusation()] for peer in ("p1", "p3", "p4")}
    more = states(solo, accusation(), by="p3") + states(solo, accusation(by="p4"))
    assert not stated(more) and not found(more, ev.Audit), "another one of the same is audited with it"


def test_if_it_is_true_the_syncer_is_excluded_for_good_by_our_own_word() -> None:
    solo = node()
    (audit,) = found(states(solo, accusation()), ev.Audit)
    effects = outcome(solo, audit, DIFFERENT)
    assert excluded(solo) == ("p1",)
    assert found(effects, ev.KeepProofs)[0].proofs == (accusation(by="me"),)


def test_if_it_is_false_all_who_accused_are_excluded() -> None:
    solo = node()
    (audit,) = found(states(solo, accusation()) + states(solo, accusation(by="p4")), ev.Audit)
    effects = outcome(solo, audit, SAME)
    assert sorted(excluded(solo)) == ["p2", "p4"]
    words = "it accused version 9 of fragment 0, which is the merge of what it names"
    assert reasons(effects, "excluded") == [words] * 2
    assert refutation(accusation(), "me") in stated(effects)["p3"]
    late = states(solo, accusation(by="p3"))
    assert "p3" in excluded(solo) and not found(late, ev.Audit), "it knows already"
    assert "p1" not in excluded(solo), "though most of those who vote say so"


def test_nothing_follows_where_the_contributions_are_gone_and_the_accuser_is_not_heard_for_a_while() -> None:
    solo = node()
    (audit,) = found(states(solo, accusation()), ev.Audit)
    outcome(solo, audit, MISSING)
    assert not excluded(solo)
    assert not found(states(solo, accusation(CHAIN[-2])), ev.Audit)
    assert found(states(solo, accusation(CHAIN[-2], by="p3")), ev.Audit), "others are"
    solo.now += Cause.ACCUSED_IN_VAIN.value[1] + 1.0
    for peer in PEERS:
        solo.hear(peer)
    assert solo.core.shared.accusations.hears("p2", solo.now)


def test_an_audit_that_was_under_way_is_made_again_with_what_the_accuser_has() -> None:
    solo = node()
    made = child(solo.fragment.chain.header, "p1", ALL)
    solo.fragment.auditor.own_part(made.header)
    solo.fragment.chain.extend(made)
    solo.fragment.auditor.applied(made, 0.0, solo.now)
    (first,) = found(solo.taken(solo.core.shared.out.take()), ev.Audit)
    assert not found(states(solo, accusation(made)), ev.Audit)
    (second,) = found(outcome(solo, first, MISSING), ev.Audit)
    assert second.givers == ("p2",)
    outcome(solo, second, DIFFERENT)
    assert excluded(solo) == ("p1",)


def test_a_version_that_is_still_on_its_way_is_waited_for() -> None:
    solo = node()
    made = child(CHAIN[-1].header, "p1", ALL)
    assert not found(states(solo, accusation(made)), ev.Audit)
    solo.fragment.chain.extend(made)
    assert found(solo.feed(ev.Tick()), ev.Audit)


def test_one_of_another_branch_is_not_heard_and_one_that_never_comes_is_forgotten() -> None:
    solo = node()
    states(solo, accusation(child(CHAIN[-2].header, "p1", ("p1",))))
    assert not solo.core.shared.accusations._waiting
    states(solo, accusation(child(CHAIN[-1].header, "p1", ("p1",))))
    assert solo.core.shared.accusations._waiting
    solo.now += audit_state.WAIT_S + 1.0
    solo.feed(ev.Tick())
    assert not solo.core.shared.accusations._waiting


def test_of_what_groups_made_the_sum_is_audited() -> None:
    chain = [*CHAIN, child(CHAIN[-1].header, "p1", ALL, groups=2)]
    chain.append(child(chain[-1].header, "p1", ALL))
    solo = node(chain)
    (audit,) = found(states(solo, accusation(chain[-1])), ev.Audit)
    assert audit.part is None and len(audit.below) == 2


def test_an_accusation_of_ourselves_is_looked_into_and_nobody_accuses_itself() -> None:
    chain = branch(9, syncer="me", learners=ALL)
    false = [ev.CastOut("version 9 of fragment 0 is not the merge of what it names", CastOutWhy.UNSOUND)]
    for how, culprits, ends in ((SAME, ("p2",), []), (DIFFERENT, (), false)):
        solo = node(chain)
        (audit,) = found(states(solo, accusation(chain[-1])), ev.Audit)
        assert found(outcome(solo, audit, how), ev.CastOut) == ends, "our machine is not sound"
        assert excluded(solo) == culprits


def test_who_excludes_others_is_told_why_and_so_is_the_excluded() -> None:
    solo = node()
    (audit,) = found(states(solo, accusation()), ev.Audit)
    outcome(solo, audit, DIFFERENT)
    ours = msg.Stated(accusation(by="me"))
    assert sent(solo.hear("p1"), msg.Stated, "p1") == [ours]
    assert sent(solo.hear("p3"), msg.Stated, "p3") == [ours]
    assert CHAIN[-1].header.contributors[0].score == UNMEASURED


def test_a_statement_is_small() -> None:
    assert len(msg.encode(RUN, msg.Stated(refutation(accusation(), "p3")))) < 1200
