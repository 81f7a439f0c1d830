"""Which versions are audited, one at a time, and what follows."""

from __future__ import annotations

import math

import pytest
from kit import Solo, child, config, found, reasons
from msgspec.structs import replace

from p2pdiloco.core import audits
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.messages import Announce
from p2pdiloco.core.api.reasons import AuditOutcome
from p2pdiloco.core.api.types import (
    NO_LIMITS,
    UNCLEAR,
    UNMEASURED,
    USUAL_SCORE,
    Contributor,
    Stamp,
)
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.audits import expected_cosine
from p2pdiloco.core.distrust import OF_OFFICE, Cause, Distrust
from p2pdiloco.util import MOST_NOTED

Effects = list[ev.Effect]

PEERS = ("p1", "p2", "p3")


@pytest.fixture(autouse=True)
def nobody_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "DRAWN", 0.0)


def node(**run: object) -> Solo:
    return Solo(config(2, audited=True, **run), PEERS)


def version(solo: Solo, fragment: int = 0, syncer: str = "p1", score: int = UNMEASURED) -> SignedVersion:
    """A version that says this of our contribution."""
    parent, learners = solo.core.fragments[fragment].chain.header, ("me", "p1", "p2", "p3")
    parts = (Contributor(p, Stamp(1, parent.number + 1), 40, 4) for p in learners)
    scored = tuple(replace(part, score=score) if part.learner == "me" else part for part in parts)
    return child(parent, syncer, learners, contributors=scored)


def applied(
    solo: Solo, cosine: float | None, fragment: int = 0, syncer: str = "p1", score: int = UNMEASURED
) -> Effects:
    """A version becomes ours whose update goes so far the way of our own contribution to it."""
    made = version(solo, fragment, syncer, score)
    effects = solo.message(syncer, Announce(fragment, made.header.head(), syncer))
    for pull in found(effects, ev.FetchUpdate):
        effects += solo.answer(pull, ev.UpdateFetched(made, 900))
    for job in found(effects, ev.ApplyUpdate):
        effects += solo.answer(job, ev.UpdateApplied(made.header.state_digest, cosine=cosine))
    return effects


def test_a_version_that_takes_away_what_we_are_trusted_with_is_audited() -> None:
    honest = node()
    assert not found(applied(honest, 0.5, score=USUAL_SCORE), ev.Audit)
    assert not found(applied(honest, 0.5, score=UNCLEAR), ev.Audit), "that says nothing of us"
    assert not found(applied(honest, 0.5, score=0), ev.Audit), "honest work goes elsewhere now and then"
    effects = applied(honest, 0.5, score=-10)
    assert [audit.version.header.number for audit in found(effects, ev.Audit)] == [4]
    assert "goes against the others" in reasons(effects, "audit")[0]
    odd = node()
    for score in (0, 0, -1):
        assert not found(applied(odd, 0.5, score=score), ev.Audit), "it never had all of its weight"
    assert odd.core.fragments[0].chain.header.number == 3


def outcome(solo: Solo, audit: ev.Audit, how: AuditOutcome, withheld: bool = False) -> Effects:
    return solo.answer(audit, ev.Audited(how, withheld=withheld))


def test_an_update_that_hardly_goes_our_way_is_audited() -> None:
    assert not found(applied(node(), 0.5), ev.Audit), "of four equal ones half is expected"
    assert not found(applied(node(), 0.3), ev.Audit)
    assert not found(applied(node(), None), ev.Audit), "nothing of ours is in it"
    effects = applied(node(), 0.1)
    assert [audit.version.header.number for audit in found(effects, ev.Audit)] == [1]
    assert "hardly goes the way" in reasons(effects, "audit")[0]


def test_nothing_is_audited_that_cannot_be() -> None:
    sparse = Solo(config(2, audited=False), PEERS)
    assert not found(applied(sparse, 0.0), ev.Audit)


def test_some_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "DRAWN", 100.0)
    assert found(applied(node(), None), ev.Audit)


def test_who_begins_draws_nothing_until_something_of_its_own_was_merged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others may not know it as a member yet, and give it nothing: it would take that for withholding."""
    monkeypatch.setattr(audits, "DRAWN", 100.0)
    solo = node()
    made = child(solo.fragment.chain.header, "p1", PEERS)
    solo.fragment.chain.extend(made)
    solo.fragment.auditor.applied(made, None, solo.now)
    assert not found(solo.core.shared.out.take(), ev.Audit)
    assert found(applied(solo, None), ev.Audit)


def test_one_is_under_way_and_the_newest_waits() -> None:
    solo = node()
    (first,) = found(applied(solo, 0.0), ev.Audit)
    assert not found(applied(solo, 0.0, fragment=1), ev.Audit)
    assert not found(applied(solo, 0.0, fragment=1), ev.Audit)
    effects = outcome(solo, first, AuditOutcome.SAME) + solo.feed(ev.Tick()) + solo.wait(1.0)
    assert [(a.fragment, a.version.header.number) for a in found(effects, ev.Audit)] == [(1, 2)]


@pytest.mark.parametrize("how", list(AuditOutcome))
def test_only_who_made_a_false_merge_is_excluded(how: AuditOutcome) -> None:
    solo = node()
    (audit,) = found(applied(solo, 0.0), ev.Audit)
    assert str(how) in reasons(outcome(solo, audit, how), "audit")[0]
    assert ("p1" in solo.core.shared.excluded) == (how is AuditOutcome.DIFFERENT)


def test_who_does_not_give_what_it_merged_is_distrusted_at_once_if_that_looks_wrong() -> None:
    for withheld in (False, True):
        solo = node()
        (audit,) = found(applied(solo, 0.0), ev.Audit)
        effects = outcome(solo, audit, AuditOutcome.MISSING, withheld)
        assert solo.core.shared.distrust.has("p1", solo.now, *OF_OFFICE) is withheld
        assert ("does not give what it merged" in reasons(effects, "audit")[-2:][0]) is withheld


def test_who_gives_nothing_twice_in_a_row_is_distrusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "DRAWN", 100.0)
    solo, missing, same = node(), AuditOutcome.MISSING, AuditOutcome.SAME
    for how, is_distrusted in ((missing, False), (same, False), (missing, False), (missing, True)):
        (audit,) = found(applied(solo, None), ev.Audit)
        outcome(solo, audit, how, withheld=how is missing)
        assert solo.core.shared.distrust.has("p1", solo.now, *OF_OFFICE) is is_distrusted


@pytest.mark.parametrize("cause", list(Cause))
def test_distrust_begins_with_so_many_times_and_lasts_ever_longer(cause: Cause) -> None:
    distrust, now, (times, pause_s) = Distrust(), 5.0, cause.value
    for count in range(1, times + 6):
        assert distrust.add("p1", cause, now) == (count >= times) == distrust.has("p1", now, cause)
        if count >= times and pause_s < math.inf:
            end_s = now + pause_s * min(16, 2 ** (count - times))
            assert distrust.has("p1", end_s - 0.1, cause) and not distrust.has("p1", end_s, cause)
    assert distrust.has("p1", now, *OF_OFFICE) == (cause in OF_OFFICE)
    assert not distrust.has("p2", now, *Cause)


def test_forgiveness_ends_a_count_and_no_pause_that_has_an_end() -> None:
    for cause, goes_on in ((Cause.WITHHELD, True), (Cause.ABSENT, False)):
        distrust = Distrust()
        counts = [False] * (cause.value[0] - 1)
        assert [distrust.add("p1", cause, 0.0) for _ in counts] == counts
        distrust.forgive("p1", cause, 0.0)
        assert [distrust.add("p1", cause, 0.0) for _ in (*counts, True)] == [*counts, True]
        distrust.forgive("p1", cause, 0.0)
        assert distrust.has("p1", 0.0, cause) is goes_on


def test_what_costs_a_peer_nothing_pushes_nobody_out() -> None:
    distrust = Distrust()
    distrust.add("liar", Cause.FALSE, 0.0)
    for index in range(2 * MOST_NOTED):
        distrust.add(f"crowd {index}", Cause.ABSENT, 0.0)
    assert distrust.has("liar", 0.0, *OF_OFFICE) and len(distrust.noted[Cause.ABSENT]) == MOST_NOTED


def test_the_expected_cosine_follows_from_weights() -> None:
    def part(who: str, tokens: int = 40, **fields: int) -> Contributor:
        return Contributor(who, Stamp(1, 1), tokens, 4, **fields)

    assert expected_cosine((part("me"),), "me", NO_LIMITS) == 1.0
    assert expected_cosine(tuple(part(f"p{i}") for i in range(4)), "p0", NO_LIMITS) == 0.5
    assert expected_cosine((part("me", trust=1), part("p1")), "me", NO_LIMITS) < 0.02
    assert expected_cosine((part("p1"),), "me", NO_LIMITS) == 0.0
