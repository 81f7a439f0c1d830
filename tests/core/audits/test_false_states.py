"""A header that states another state than its update makes: nobody copies it, all exclude its syncer."""

from __future__ import annotations

import pytest
from kit import RUN, Solo, announce, branch, child, config, found, reasons, sent, table
from msgspec.structs import replace
from statements_kit import (
    ALL,
    CHAIN,
    PEERS,
    VERIFY,
    Effects,
    accusation,
    excluded,
    node,
    of_state,
    refutation,
    stated,
    states,
)

from p2pdiloco.core import audits
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.config import Restored, RestoredFragment
from p2pdiloco.core.api.reasons import FetchFailure, VersionFault, VoteRefusal
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.distrust import OF_OFFICE

OURS = bytes(31) + b"o"
"""Digest of the state that the update makes here."""
FALSE = child(CHAIN[-1].header, "p1", ALL)
NEXT = child(CHAIN[-1].header, "p2", ALL)
"""The version that the next syncer makes of the same parent."""
WORDS = "version 10 of fragment 0 has another state than its update makes"


@pytest.fixture(autouse=True)
def nobody_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "DRAWN", 0.0)


def applies(
    solo: Solo, *, certain: bool, version: SignedVersion = FALSE, there: tuple[str, ...] = ()
) -> Effects:
    """Its syncer tells of it, and gives its update; here that makes another state. `there`: who has it
    as well."""
    effects = solo.message(version.header.syncer, announce(version))
    (pull,) = found(effects, ev.FetchUpdate)
    for peer in there:
        solo.says[peer] = {"heads": (version.header.head(),)}
        effects += solo.hear(peer)
    effects += solo.answer(pull, ev.UpdateFetched(version, 900))
    (job,) = found(effects, ev.ApplyUpdate)
    digests = version.header.state_digest, version.header.update_digest
    assert (job.stated, job.update_digest) == digests, "it can be looked at again"
    return effects + solo.answer(job, ev.UpdateApplied(OURS, certain=certain))


def refuses() -> tuple[Solo, Effects]:
    solo = node()
    return solo, applies(solo, certain=True)


# --- who makes the step itself -----------------------------------------------------------------------------


def test_a_false_state_is_not_copied_and_its_syncer_is_excluded_and_accused_before_all() -> None:
    solo, effects = refuses()
    ours = of_state(FALSE, by="me")
    assert ours.holds(RUN, VERIFY)
    assert reasons(effects, "refusal") == [str(VersionFault.FALSE_STATE)]
    assert ev.DropSpare(0) in effects and ev.Release(900) in effects
    assert excluded(solo) == ("p1",) and reasons(effects, "excluded") == [WORDS]
    assert stated(effects) == {peer: [ours] for peer in PEERS}
    assert found(effects, ev.KeepProofs) == [ev.KeepProofs((ours,))]
    later = solo.wait(60.0)
    assert not found(effects + later, ev.FetchState) and solo.head == CHAIN[-1].header.head()


def test_the_next_syncer_makes_the_version_again() -> None:
    solo, _ = refuses()
    solo.elect("p2", term=NEXT.header.term)
    effects = solo.announce(NEXT)
    assert found(effects, ev.CommitVersion) and solo.head == NEXT.header.head()


@pytest.mark.parametrize("by", ["p1", "p3"])
def test_what_may_be_our_own_fault_is_copied_as_ever_and_accuses_nobody(by: str) -> None:
    version = child(CHAIN[-1].header, by, ALL)
    solo = node()
    effects = applies(solo, certain=False, version=version, there=("p2", "p4", by))
    assert reasons(effects, "refusal") == [str(VersionFault.DIGEST_DIFFERS)]
    assert not excluded(solo) and not stated(effects)
    assert not solo.core.shared.distrust.has(by, solo.now, *OF_OFFICE)
    assert [job.number for job in found(solo.wait(1.0), ev.FetchState)] == [10]


@pytest.mark.parametrize(("there", "copies"), [(("p2", "p3"), False), (("p2", "p3", "p4"), True)])
def test_where_most_voters_stand_on_it_we_are_wrong(there: tuple[str, ...], copies: bool) -> None:
    """Of five voters the syncer has no say, and we are not there."""
    solo = node()
    effects = solo.message("p1", announce(FALSE))
    (pull,) = found(effects, ev.FetchUpdate)
    for peer in there:
        solo.says[peer] = {"heads": (FALSE.header.head(),)}
        solo.hear(peer)
    solo.answer(pull, ev.UpdateFetched(FALSE, 900))
    effects = solo.answer(ev.ApplyUpdate, ev.UpdateApplied(OURS, certain=True)) + solo.wait(1.0)
    assert bool(found(effects, ev.FetchState)) is copies
    assert excluded(solo) == (() if copies else ("p1",))


def test_the_only_other_voter_beside_its_syncer_does_not_make_us_copy_it() -> None:
    """Two have seats, and lie together. We have none, but have seen the state."""
    chain = branch(2, learners=("p1", "p2"), seats=("p1", "p2"))
    last = child(chain[-1].header, "p1", ALL)
    solo = node([*chain, last])
    assert solo.fragment.chain.marks.seats == {"p1", "p2"}
    false = child(last.header, "p1", ("p1", "p2"))
    (pull,) = found(solo.message("p1", announce(false)), ev.FetchUpdate)
    solo.says["p2"] = {"heads": (false.header.head(),)}
    solo.hear("p2")
    solo.answer(pull, ev.UpdateFetched(false, 900))
    effects = solo.answer(ev.ApplyUpdate, ev.UpdateApplied(OURS, certain=True)) + solo.wait(1.0)
    assert not found(effects, ev.FetchState) and excluded(solo) == ("p1",)


def misled_by(solo: Solo, above: SignedVersion) -> ev.FetchState:
    """Three others stand on a version above the false one, of which nobody gives us the update."""
    solo.says = {peer: {"heads": (above.header.head(),)} for peer in ("p2", "p3", "p4")}
    (pull,) = found(solo.hear("p3"), ev.FetchUpdate)
    solo.hear("p2")
    solo.hear("p4")
    effects = solo.answer(pull, ev.FetchFailed(FetchFailure.GONE)) + solo.wait(1.0)
    (copy,) = found(effects, ev.FetchState)
    return copy


def test_who_was_misled_gives_us_neither_that_version_nor_what_its_syncer_made_of_it() -> None:
    solo, _ = refuses()
    assert not found(solo.hear("p3", heads=(FALSE.header.head(),)) + solo.wait(5.0), ev.FetchUpdate)
    above = child(FALSE.header, "p1", ALL)
    copy = misled_by(solo, above)
    effects = solo.answer(copy, ev.StateFetched(above, table(above)))
    assert reasons(effects, "catchup")[0] == f"not taken: {VersionFault.FALSE_STATE}"
    assert solo.head == CHAIN[-1].header.head() and ev.DropSpare(0) in effects


def test_after_a_restart_it_is_not_copied_from_who_was_misled_either() -> None:
    fragment = RestoredFragment(log=tuple(CHAIN), watermarks=table(CHAIN[-1]))
    known = Restored(fragments=(fragment,), proofs=(of_state(FALSE, by="me"),), saved=True)
    solo = Solo(config(1, audited=True, log_versions=20), PEERS, known)
    solo.wait(2.0)
    assert excluded(solo) == ("p1",)
    effects = solo.hear("p3", heads=(FALSE.header.head(),)) + solo.wait(5.0)
    assert not found(effects, ev.FetchUpdate) and not found(effects, ev.FetchState)
    above = child(FALSE.header, "p2", ALL)
    copy = misled_by(solo, above)
    effects = solo.answer(copy, ev.StateFetched(FALSE, table(FALSE)))
    assert reasons(effects, "catchup")[0] == f"not taken: {VersionFault.FALSE_STATE}"


def test_the_update_of_a_known_false_version_is_not_even_applied_again() -> None:
    solo, _ = refuses()
    above = child(FALSE.header, "p1", ALL)
    (pull,) = found(solo.hear("p3", heads=(above.header.head(),)), ev.FetchUpdate)
    effects = solo.answer(pull, ev.UpdateFetched(FALSE, 901))
    assert reasons(effects, "refusal") == [str(VersionFault.FALSE_STATE)]
    assert not found(effects, ev.ApplyUpdate) and ev.Release(901) in effects


def test_who_stands_on_a_false_state_gets_no_vote() -> None:
    solo, _ = refuses()
    solo.hear("p3", heads=(FALSE.header.head(),))
    effects = solo.message(
        "p3", msg.VoteRequest("all", 0, FALSE.header.term + 2, FALSE.header.head(), "open")
    )
    assert [refused.reason for refused in sent(effects, msg.VoteRefused, "p3")] == [VoteRefusal.LIGHTER]


# --- who hears of it ---------------------------------------------------------------------------------------


def test_who_made_the_step_with_the_stated_state_refutes_an_accusation_at_once() -> None:
    solo, made = node(), of_state(CHAIN[-1])
    effects = states(solo, made)
    assert not found(effects, ev.Audit) and excluded(solo) == ("p2",)
    ours = refutation(made, "me")
    assert stated(effects)["p3"] == [made, ours] and ours.holds(RUN, VERIFY)
    right = "version 9 of fragment 0, which has the state that its update makes"
    assert reasons(effects, "excluded") == [f"it accused {right}"]


@pytest.mark.parametrize("certain", [True, False])
def test_an_accusation_waits_for_the_version_to_come_here(certain: bool) -> None:
    solo, made = node(), of_state(FALSE)
    effects = states(solo, made)
    assert stated(effects) == {peer: [made] for peer in PEERS if peer != "p2"}, "it is passed on"
    assert not excluded(solo)
    if certain:
        applies(solo, certain=True)
        assert not solo.core.shared.accusations.of(made.subject.digest()), "it is settled"
    else:
        solo.announce(FALSE)
        solo.wait(1.0)
    assert excluded(solo) == (("p1",) if certain else ("p2",))


def test_who_copied_the_state_says_nothing_and_believes_most_who_vote() -> None:
    fragment = RestoredFragment(log=(FALSE,), watermarks=table(FALSE))
    solo = Solo(config(1, audited=True), PEERS, Restored(fragments=(fragment,), saved=True))
    solo.wait(2.0)
    for by in ("p2", "p3"):
        effects = states(solo, of_state(FALSE, by))
        assert not excluded(solo) and not found(effects, ev.Audit)
    states(solo, of_state(FALSE, "p4"))
    assert excluded(solo) == ("p1",)


def test_of_our_own_version_our_word_says_nothing_and_most_who_state_it_end_this_node() -> None:
    mine = child(CHAIN[-1].header, "me", ALL)
    solo = node([*CHAIN, mine])
    effects: Effects = []
    for by in ("p2", "p3", "p4"):
        effects += states(solo, of_state(mine, by))
    assert not excluded(solo) or excluded(solo) == ("me",)
    assert [end.words for end in found(effects, ev.CastOut)] == [WORDS]


def test_runs_without_audits_hear_of_false_states_too() -> None:
    fragment = RestoredFragment(log=tuple(CHAIN), watermarks=table(CHAIN[-1]))
    sparse = Solo(config(1, audited=False), PEERS, Restored(fragments=(fragment,), saved=True))
    sparse.wait(2.0)
    assert stated(states(sparse, of_state(CHAIN[-1]))) and excluded(sparse) == ("p2",)


def test_nobody_passes_an_accusation_of_a_merge_off_as_one_of_a_state() -> None:
    made = replace(of_state(FALSE), signature=accusation(FALSE).signature)
    assert not made.holds(RUN, VERIFY) and accusation(FALSE).holds(RUN, VERIFY)
    assert made.subject.digest() != accusation(FALSE).subject.digest()
