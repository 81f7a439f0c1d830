"""False versions that later ones take back: who repairs which, when, and who follows."""

from __future__ import annotations

from typing import Any

import pytest
from kit import Solo, branch, child, config, found, reasons, sign, table
from msgspec.structs import replace

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.config import Restored, RestoredFragment
from p2pdiloco.core.api.proofs import TwoVotes, short_of
from p2pdiloco.core.api.reasons import AuditOutcome, VersionFault
from p2pdiloco.core.api.statements import Accusation, FalseVersion
from p2pdiloco.core.api.types import MergeLimits, Stamp, Vote, VoteBody
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.audits import auditor
from p2pdiloco.core.chain import scale

Effects = list[ef.Effect]
PEERS = ("p1", "p2", "p3", "p4")
ALL = ("me", *PEERS)
OTHERS = ("p2", "p3", "p4")
CHAIN = branch(5, syncer="p1", learners=ALL)
FALSE = CHAIN[-1]


@pytest.fixture(autouse=True)
def nobody_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditor, "DRAWN", 0.0)


def node() -> Solo:
    fragment = RestoredFragment(log=tuple(CHAIN), watermarks=table(FALSE))
    run = config(1, audited=True, log_versions=20)
    solo = Solo(run, PEERS, Restored(fragments=(fragment,), saved=True))
    solo.wait(2.0)
    return solo


def accused(solo: Solo, by: str = "p2") -> ef.Audit:
    subject = FalseVersion(short_of(FALSE))
    accusation = Accusation(subject, by, sign(by, "accusation", subject))
    (audit,) = found(solo.message(by, msg.Stated(accusation)), ef.Audit)
    return audit


def finds_false(solo: Solo, remade: bool = True) -> None:
    """We make the merge again: it is another one."""
    accused(solo)
    header = FALSE.header
    solo.feed(ev.Audited(0, header.number, header.digest(), AuditOutcome.DIFFERENT, remade))
    assert solo.core.shared.excluded.peers == ("p1",)


def others_know(solo: Solo, *peers: str) -> None:
    for peer in peers:
        solo.says[peer] = {"proofs": solo.core.shared.excluded.mark}
        solo.hear(peer)


def merges(solo: Solo) -> ef.Merge:
    """Our next round as a syncer."""
    if not solo.fragment.office.holding:
        solo.take_office()
    effects: Effects = []
    for transfer, learner in enumerate(OTHERS, 10 * solo.head.number):
        mark = solo.fragment.chain.watermark(learner)
        effects += solo.offer(learner, transfer, stamp=Stamp(1, mark.sequence + 1), after=mark)
    effects += solo.wait(1.0, silent=("p1",))
    return found(effects, ef.Merge)[0]


def done(solo: Solo, merge: ef.Merge, repaired: bool) -> SignedVersion:
    state = bytes([merge.number] * 32)
    key = merge.fragment, merge.term, merge.number, 500 + merge.number
    solo.feed(ev.Merged(*key, state, 100, state, repaired=repaired))
    return solo.fragment.chain.signed


# --- making it -------------------------------------------------------------------------------------------


def test_who_has_the_true_update_adds_it_to_its_next_version_once() -> None:
    solo = node()
    finds_false(solo)
    others_know(solo, *OTHERS)
    merge = merges(solo)
    assert merge.repairs == FALSE
    assert done(solo, merge, repaired=True).header.repairs == FALSE.header.digest()
    assert merges(solo).repairs is None, "once"


def test_where_the_update_is_gone_nothing_is_stated_and_it_is_tried_again() -> None:
    solo = node()
    finds_false(solo)
    others_know(solo, *OTHERS)
    assert done(solo, merges(solo), repaired=False).header.repairs is None
    assert merges(solo).repairs == FALSE


def test_nobody_repairs_what_others_do_not_know_to_be_false() -> None:
    solo = node()
    finds_false(solo)
    others_know(solo, "p3")
    merge = merges(solo)
    assert merge.repairs is None, "two of four"
    done(solo, merge, repaired=False)
    others_know(solo, "p4")
    assert merges(solo).repairs == FALSE, "three; whoever never says so does not keep us from it"


def test_nobody_repairs_without_the_true_update() -> None:
    solo = node()
    finds_false(solo, remade=False)
    others_know(solo, *OTHERS)
    assert merges(solo).repairs is None


# --- following -------------------------------------------------------------------------------------------


def repairing(parent: SignedVersion = FALSE, **odd: Any) -> SignedVersion:
    return child(parent.header, "p2", ALL, **({"repairs": FALSE.header.digest()} | odd))


def comes(solo: Solo, made: SignedVersion, cosine: float | None = None) -> Effects:
    """That version is named, fetched and, if it is right, applied."""
    effects = solo.hear("p2", heads=(made.header.head(),))
    for pull in found(effects, ef.FetchUpdate):
        effects += solo.feed(ev.UpdateFetched(0, pull.peer, made, 900))
    for job in found(effects, ef.ApplyUpdate):
        effects += solo.feed(ev.UpdateApplied(0, job.number, 900, made.header.state_digest, cosine=cosine))
    return effects


def test_who_found_it_false_follows_and_always_audits_the_repair() -> None:
    solo = node()
    finds_false(solo)
    made = repairing()
    (audit,) = found(comes(solo, made, cosine=0.5), ef.Audit)
    assert (audit.version, audit.repairs) == (made, FALSE)
    header = made.header
    solo.feed(ev.Audited(0, header.number, header.digest(), AuditOutcome.DIFFERENT))
    assert solo.core.shared.excluded.peers == ("p1", "p2"), "a false repair is a false merge"


def test_it_is_repaired_once() -> None:
    solo = node()
    finds_false(solo)
    comes(solo, repairing())
    again = repairing(solo.fragment.chain.signed)
    assert reasons(comes(solo, again), "refusal") == [str(VersionFault.FALSE_REPAIR)]


def test_who_does_not_exclude_its_syncer_waits_until_it_hears_why() -> None:
    solo, made = node(), repairing()
    assert not found(comes(solo, made), ef.FetchState)
    accused(solo, "p3")
    header = FALSE.header
    solo.feed(ev.Audited(0, header.number, header.digest(), AuditOutcome.DIFFERENT))
    again = found(solo.wait(3.0, silent=("p1",)), ef.FetchUpdate)
    assert again, "it asks again"
    assert found(solo.feed(ev.UpdateFetched(0, again[0].peer, made, 900)), ef.ApplyUpdate)


def test_who_is_left_behind_by_it_or_not_confirmed_yet_copies_the_state() -> None:
    solo, made = node(), repairing()
    comes(solo, made)
    after = child(child(made.header, "p2", ALL).header, "p2", ALL)
    repairs = solo.fragment.context.repairs
    assert repairs.fault(made.header, "p2") is VersionFault.NOT_KNOWN_FALSE
    solo.hear("p2", heads=(after.header.head(),))
    assert repairs.fault(made.header, "p2") is VersionFault.UNKNOWN_REPAIR
    assert repairs.fault(made.header, "p3") is VersionFault.NOT_KNOWN_FALSE
    solo.core.shared.confirmed = False
    assert repairs.fault(made.header, "p3") is VersionFault.UNKNOWN_REPAIR


def test_whoever_is_excluded_for_another_lie_made_no_false_merge() -> None:
    solo, made = node(), repairing()
    bodies = [VoteBody(made.header.run, "all", 0, 70, candidate, "p1") for candidate in ("p2", "p3")]
    first, second = (Vote(body, sign("p1", "vote", body)) for body in bodies)
    solo.message("p2", msg.Proven(TwoVotes(first, second)))
    assert solo.core.shared.excluded.peers == ("p1",)
    assert solo.fragment.context.repairs.fault(made.header, "p3") is VersionFault.NOT_KNOWN_FALSE


def test_a_repair_may_be_longer_by_both_updates() -> None:
    solo = node()
    limits = MergeLimits(most_tokens=9, longest=1.5)
    log = solo.fragment.chain._log
    log[FALSE.header.number] = SignedVersion(replace(FALSE.header, limits=limits), b"")
    assert scale.longest_repair(solo.fragment.chain, repairing().header) == 2 * limits.longest_update
    assert not scale.longest_repair(solo.fragment.chain, repairing(repairs=None).header)
