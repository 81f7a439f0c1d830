"""False versions that later ones take back: who repairs which, when, and who follows."""

from __future__ import annotations

from typing import Any

import pytest
from kit import Solo, branch, child, config, found, reasons, sign, table
from msgspec.structs import replace

from p2pdiloco.core import audits, context
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.config import Restored, RestoredFragment
from p2pdiloco.core.api.evidence import Accusation, FalseVersion, short_of
from p2pdiloco.core.api.reasons import AuditOutcome, VersionFault
from p2pdiloco.core.api.types import Stamp
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.distrust import OF_OFFICE

Effects = list[ev.Effect]
PEERS = ("p1", "p2", "p3", "p4")
ALL = ("me", *PEERS)
OTHERS = ("p2", "p3", "p4")
CHAIN = branch(5, syncer="p1", learners=ALL)
FALSE = CHAIN[-1]


@pytest.fixture(autouse=True)
def nobody_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audits, "DRAWN", 0.0)


def node() -> Solo:
    fragment = RestoredFragment(log=tuple(CHAIN), watermarks=table(FALSE))
    run = config(1, audited=True, log_versions=20)
    solo = Solo(run, PEERS, Restored(fragments=(fragment,), saved=True))
    solo.wait(2.0)
    return solo


def accused(solo: Solo, by: str = "p2") -> ev.Audit:
    subject = FalseVersion(short_of(FALSE))
    accusation = Accusation(subject, by, sign(by, "accusation", subject))
    (audit,) = found(solo.message(by, msg.Stated(accusation)), ev.Audit)
    return audit


def finds_false(solo: Solo, remade: bool = True) -> None:
    """We make the merge again: it is another one."""
    accused(solo)
    solo.answer(ev.Audit, ev.Audited(AuditOutcome.DIFFERENT, remade))
    assert solo.core.shared.excluded.peers == ("p1",)


def merges(solo: Solo) -> ev.Merge:
    """Our next round as a syncer."""
    if not solo.fragment.office.holding:
        solo.take_office()
    effects: Effects = []
    for transfer, learner in enumerate(OTHERS, 10 * solo.head.number):
        mark = solo.fragment.chain.marks.stamp(learner)
        effects += solo.offer(learner, transfer, stamp=Stamp(1, mark.sequence + 1), after=mark)
    effects += solo.wait(1.0, silent=("p1",))
    return found(effects, ev.Merge)[0]


def done(solo: Solo, merge: ev.Merge, repaired: bool) -> SignedVersion:
    state = bytes([merge.number] * 32)
    solo.answer(merge, ev.Merged(500 + merge.number, state, 100, state, repaired=repaired))
    return solo.fragment.chain.signed


# --- making it -------------------------------------------------------------------------------------------


def test_who_has_the_true_update_adds_it_to_its_next_version_once() -> None:
    solo = node()
    finds_false(solo)
    merge = merges(solo)
    assert merge.repairs == FALSE
    assert done(solo, merge, repaired=True).header.repairs == FALSE.header.digest()
    assert merges(solo).repairs is None, "once"


def test_where_the_update_is_gone_nothing_is_stated_and_it_is_tried_again() -> None:
    solo = node()
    finds_false(solo)
    assert done(solo, merges(solo), repaired=False).header.repairs is None
    assert merges(solo).repairs == FALSE


def test_nobody_repairs_what_others_may_not_have_any_more() -> None:
    solo = node()
    finds_false(solo)
    found_in = []
    for _ in range(context.WITHIN_VERSIONS + 1):
        found_in.append(solo.fragment.context.repairs.next())
        comes(solo, repairing(solo.fragment.chain.signed, repairs=None, term=solo.head.term + 1))
    assert found_in == [FALSE] * context.WITHIN_VERSIONS + [None]


def test_nobody_repairs_without_the_true_update() -> None:
    solo = node()
    finds_false(solo, remade=False)
    assert merges(solo).repairs is None


# --- following -------------------------------------------------------------------------------------------


def repairing(parent: SignedVersion = FALSE, **odd: Any) -> SignedVersion:
    return child(parent.header, "p2", ALL, **({"repairs": FALSE.header.digest()} | odd))


def comes(solo: Solo, made: SignedVersion, cosine: float | None = None) -> Effects:
    """That version is named, fetched and, if it is right, applied."""
    effects = solo.hear("p2", heads=(made.header.head(),))
    for pull in found(effects, ev.FetchUpdate):
        effects += solo.answer(pull, ev.UpdateFetched(made, 900))
    for job in found(effects, ev.ApplyUpdate):
        effects += solo.answer(job, ev.UpdateApplied(made.header.state_digest, cosine=cosine))
    return effects


def test_who_found_it_false_follows_and_always_audits_the_repair() -> None:
    solo = node()
    finds_false(solo)
    made = repairing()
    (audit,) = found(comes(solo, made, cosine=0.5), ev.Audit)
    assert (audit.version, audit.repairs) == (made, FALSE)
    solo.answer(ev.Audit, ev.Audited(AuditOutcome.DIFFERENT))
    assert solo.core.shared.excluded.peers == ("p1", "p2"), "a false repair is a false merge"


def test_it_is_repaired_once() -> None:
    solo = node()
    finds_false(solo)
    comes(solo, repairing())
    again = repairing(solo.fragment.chain.signed)
    assert reasons(comes(solo, again), "refusal") == [str(VersionFault.FALSE_REPAIR)]


def test_who_never_looked_at_it_follows_and_then_looks_at_both() -> None:
    solo, made = node(), repairing()
    (audit,) = found(comes(solo, made, cosine=0.0), ev.Audit)
    assert solo.fragment.chain.signed == made
    assert audit.version == FALSE, "first what it repairs"
    effects = solo.answer(ev.Audit, ev.Audited(AuditOutcome.DIFFERENT, True))
    effects += solo.wait(1.0)
    (second,) = found(effects, ev.Audit)
    assert (second.version, second.repairs) == (made, FALSE)


def test_who_repairs_what_was_right_is_distrusted() -> None:
    solo, made = node(), repairing()
    comes(solo, made)
    solo.answer(ev.Audit, ev.Audited(AuditOutcome.SAME))
    assert solo.core.shared.distrust.has("p2", solo.now, *OF_OFFICE)
    again = child(made.header, "p3", ALL, repairs=CHAIN[-2].header.digest())
    comes(solo, again)


def test_of_what_cannot_be_made_again_nothing_follows() -> None:
    solo, made = node(), repairing()
    comes(solo, made)
    solo.answer(ev.Audit, ev.Audited(AuditOutcome.MISSING))
    assert not found(solo.wait(1.0), ev.Audit) and not solo.core.shared.distrust.has(
        "p2", solo.now, *OF_OFFICE
    )


def test_a_version_that_the_chain_never_had_is_not_repaired() -> None:
    fragment = RestoredFragment(log=tuple(branch(12, syncer="p1", learners=ALL)))
    whole = replace(fragment, watermarks=table(fragment.log[-1]))
    for log, fault in ((whole.log, VersionFault.FALSE_REPAIR), (whole.log[-3:], None)):
        restored = Restored(fragments=(replace(whole, log=log),), saved=True)
        solo = Solo(config(1, audited=True, log_versions=20), PEERS, restored)
        made = child(log[-1].header, "p2", ALL, repairs=b"?" * 32)
        assert solo.fragment.context.repairs.fault(made.header) is fault
        old = child(log[-1].header, "p2", ALL, repairs=whole.log[1].header.digest())
        assert solo.fragment.context.repairs.fault(old.header) is fault
