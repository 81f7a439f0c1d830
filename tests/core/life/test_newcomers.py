"""Newcomers, genesis, forks and leaving, one test per claim (docs/protocol/membership.md, section 4)."""

from __future__ import annotations

import math

import pytest
from kit import Solo, branch, certificate, child, found, genesis, offer_to, reasons, saved, sent
from scenes import FAR, serve, with_table

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.reasons import FetchFailure, Verdict, VoteRefusal
from p2pdiloco.core.api.types import NEVER, Contributor, Stamp, Watermark
from p2pdiloco.core.api.versions import Roster, SignedVersion
from p2pdiloco.core.pending import OTHER_OPINIONS

NO_STEPS = Contributor("p1", Stamp(1, 1), 1000, 0)
INVENTED = Contributor("p1", Stamp(1, 9), 40, 4)
"""No syncer may have merged that."""


def newcomer(versions: int = 2) -> Solo:
    """We have version 0; two confirmed peers hold a later one."""
    return Solo(heads=(FAR[versions].header.head(),))


# --- newcomers ------------------------------------------------------------------------------------------


def test_a_newcomer_neither_votes_nor_stands_nor_serves_until_it_holds_what_peers_hold() -> None:
    solo = newcomer()
    pulls = solo.greeting
    assert not solo.core.confirmed and not solo.core.may_serve
    refused = sent(
        solo.message("p1", msg.VoteRequest("all", 0, 1, FAR[2].header.head(), "")),
        msg.VoteRefused,
    )
    assert refused[0].reason is VoteRefusal.CATCHING_UP and refused[0].head is None
    assert not sent(solo.wait(5.0), msg.VoteRequest)
    assert not any(p.confirmed for p in sent(solo.wait(1.0), msg.Progress))
    effects = serve(solo, pulls)
    assert solo.core.confirmed and solo.core.may_serve and solo.head.number == 2
    assert reasons(effects, "join")[-2:] == [
        "full member: every fragment's version is confirmed by peers",
        "unvouched: started from what 2 of 2 members stand on",
    ]
    assert all(p.confirmed for p in sent(solo.wait(1.0), msg.Progress))


def test_one_that_is_just_as_new_confirms_nothing() -> None:
    solo = Solo(confirmed=False)
    solo.wait(60.0)
    assert not solo.core.confirmed


def test_a_few_missed_versions_are_replayed_and_many_are_copied() -> None:
    effects = serve(few := newcomer(3), few.greeting)
    assert few.head.number == 3 and not found(effects, ef.FetchState)
    assert [c.update for c in found(effects, ef.CommitVersion)] == [1, 2, 3]
    effects = serve(many := newcomer(9), many.greeting)
    assert many.head.number == 9 and not found(effects, ef.FetchUpdate)
    assert found(effects, ef.CommitVersion)[0].update is None
    assert many.fragment.chain.marks.stamp("p1") == Stamp(1, 9), "the donor's watermarks come with it"


def test_a_holder_that_does_not_deliver_is_not_the_only_one_asked() -> None:
    solo = newcomer()
    first = found(solo.greeting, ef.FetchUpdate)[0]
    effects = solo.feed(ev.FetchFailed(0, 1, first.peer, FetchFailure.UNREACHABLE)) + solo.wait(0.4)
    assert found(effects, ef.FetchUpdate)[0].peer != first.peer


def test_an_update_that_is_gone_is_copied_instead() -> None:
    solo = newcomer()
    peer = found(solo.greeting, ef.FetchUpdate)[0].peer
    effects = solo.feed(ev.FetchFailed(0, 1, peer, FetchFailure.GONE)) + solo.wait(1.0)
    assert found(effects, ef.FetchState)[0].number == 2


def test_an_outer_step_with_another_digest_is_dropped_and_the_state_copied() -> None:
    solo = newcomer()
    pull = found(solo.greeting, ef.FetchUpdate)[0]
    solo.feed(ev.UpdateFetched(0, pull.peer, FAR[1], 7))
    effects = solo.feed(ev.UpdateApplied(0, 1, 7, bytes(32)))
    assert found(effects, ef.DropSpare) and ef.Release(7) in effects and solo.head.number == 0
    assert reasons(effects, "refusal") == ["digest-differs"]
    assert found(solo.wait(1.0), ef.FetchState)


def test_an_update_that_is_not_as_stated_is_neither_taken_nor_copied() -> None:
    solo = newcomer()
    pull = found(solo.greeting, ef.FetchUpdate)[0]
    asked = found(solo.feed(ev.UpdateFetched(0, pull.peer, FAR[1], 7)), ef.ApplyUpdate)[0]
    assert asked.norm == FAR[1].header.norm
    effects = solo.feed(ev.UpdateApplied(0, 1, 7, b"", unsound=True))
    assert found(effects, ef.DropSpare) and ef.Release(7) in effects and solo.head.number == 0
    assert reasons(effects, "refusal") == ["out-of-scale"]
    assert not found(effects + solo.wait(1.0), ef.FetchState)


@pytest.mark.parametrize(
    ("reason", "odd"),
    [
        ("false-scale", {"unit": 60}),
        ("false-scale", {"reach": 1e-3}),
        ("out-of-scale", {"norm": math.inf}),
        ("out-of-scale", {"norm": math.nan}),
        ("out-of-scale", {"norm": -1.0}),
        ("false-stamp", {"contributors": (Contributor("p1", Stamp(1, 1 << 62), 40, 4),)}),
        ("false-stamp", {"contributors": (Contributor("p1", Stamp(1 << 62, 1), 40, 4),)}),
        ("wrong-fragment", {"run": "other"}),
        ("wrong-fragment", {"codec": "fp8"}),
        ("false-tokens", {"tokens": 4000}),
        ("false-tokens", {"contributors": (), "tokens": 0}),
        ("implausible-tokens", {"contributors": (NO_STEPS,)}),
        ("implausible-tokens", {"contributors": (Contributor("p1", Stamp(1, 1), 10**12, 1),)}),
        ("false-plan", {"groups": 3}),
        ("false-plan", {"epoch": 2, "groups": 3}),
        ("false-term", {"term": 1 << 40}),
    ],
)
def test_a_false_update_is_refused(reason: str, odd: dict[str, object]) -> None:
    solo = newcomer()
    pull = found(solo.greeting, ef.FetchUpdate)[0]
    effects = solo.feed(ev.UpdateFetched(0, pull.peer, child(genesis(0).header, **odd), 7))
    assert reasons(effects, "refusal") == [reason]
    assert ef.Release(7) in effects and not found(effects, ef.ApplyUpdate)


def test_an_update_that_another_signed_is_refused() -> None:
    solo = newcomer()
    pull = found(solo.greeting, ef.FetchUpdate)[0]
    forged = type(FAR[1])(FAR[1].header, child(genesis(0).header, "p2").signature)
    assert reasons(solo.feed(ev.UpdateFetched(0, pull.peer, forged, 7)), "refusal") == ["version-signature"]


def test_a_term_that_a_newcomer_cannot_judge_does_not_stay_with_it() -> None:
    solo = Solo(confirmed=False)
    solo.message("p9", msg.Elected(certificate("p9", ("p9",), term=1 << 47)))
    solo.heard["confirmed"] = True
    terms = [request.term for request in sent(solo.wait(20.0), msg.VoteRequest)]
    assert solo.core.confirmed and terms and max(terms) < 100


# --- genesis and restart --------------------------------------------------------------------------------


def test_without_genesis_or_saved_state_nobody_starts_alone() -> None:
    solo = Solo(peers=())
    solo.wait(300.0)
    assert not solo.core.confirmed


def test_genesis_starts_the_run_when_nobody_is_listed() -> None:
    solo = Solo(peers=(), genesis=True)
    assert solo.core.confirmed and reasons(solo.greeting, "join") == ["full member: starts the run"]


def test_genesis_listens_first_when_somebody_is_listed() -> None:
    solo = Solo(peers=("ghost",), genesis=True, confirmed=False)
    assert not solo.core.confirmed
    solo.wait(solo.config.timing.genesis_wait_s - 0.5)
    assert not solo.core.confirmed
    solo.wait(1.0)
    assert solo.core.confirmed


def test_genesis_waits_long_for_somebody_listed_who_cannot_be_reached() -> None:
    solo = Solo(peers=("ghost",), genesis=True, confirmed=False)
    solo.feed(ev.PresenceSeen(Roster((("ghost", 1),)), unreached=1))
    solo.wait(solo.config.timing.resume_alone_s - 2)
    assert not solo.core.confirmed, "the one that was not reached may hold the run's history"
    solo.wait(3.0)
    assert solo.core.confirmed


def test_genesis_does_not_start_a_run_that_has_history() -> None:
    solo = Solo(genesis=True, heads=(FAR[2].header.head(),))
    solo.wait(5.0)
    assert not solo.core.confirmed, "it catches up first, like everybody"


def test_a_saved_state_that_is_ahead_is_confirmed_by_its_ancestor() -> None:
    assert Solo(restored=saved(FAR[:3]), heads=(FAR[1].header.head(),)).core.confirmed


# --- forks ----------------------------------------------------------------------------------------------


def test_a_heavier_head_replaces_ours_and_a_lighter_one_does_not() -> None:
    ours = branch(2, syncer="p2")
    solo = Solo(restored=saved(ours))
    solo.feed(ev.Tick())
    lighter = branch(1, syncer="p1")[1].header.head()
    assert not found(solo.hear("p1", heads=(lighter,)), ef.FetchState)
    effects = serve(solo, solo.hear("p1", heads=(FAR[5].header.head(),)))
    assert reasons(effects, "fork") == ["parent-differs"], "the updates do not fit: this is another branch"
    effects = serve(solo, solo.wait(1.0, silent=("p1", "p2")))
    assert found(effects, ef.FetchState) and solo.head == FAR[5].header.head()


def test_heads_of_the_unconfirmed_are_not_believed() -> None:
    solo = Solo()
    heavy = FAR[5].header.head()
    assert not found(solo.hear("p1", confirmed=False, heads=(heavy,)), ef.FetchUpdate)
    stranger = msg.VoteRefused("all", 0, 1, 1, heavy, VoteRefusal.VOTE_GIVEN)
    for sender in ("stranger", "p1"):
        assert not found(solo.message(sender, stranger), ef.FetchUpdate)


@pytest.mark.parametrize(
    ("forged", "reason"),
    [
        (SignedVersion(FAR[9].header, FAR[8].signature), "version-signature"),
        (child(FAR[8].header, contributors=(NO_STEPS,)), "implausible-tokens"),
        (with_table(FAR[9], (Watermark("p1", Stamp(1, 9), 9),)), "false-table"),
        (with_table(child(FAR[8].header, contributors=(INVENTED,), by="p2"), ()), "false-label"),
    ],
)
def test_a_copied_state_whose_version_would_be_refused_is_thrown_away(
    forged: SignedVersion, reason: str
) -> None:
    solo = newcomer(9)
    copy = found(solo.greeting, ef.FetchState)[0]
    effects = solo.feed(ev.StateFetched(0, copy.peer, forged, ()))
    assert found(effects, ef.DropSpare) and not found(effects, ef.CommitVersion) and solo.head.number == 0
    assert reasons(effects, "catchup")[0] == f"not taken: {reason}"


# --- contributions of a learner that crashes ------------------------------------------------------------


def test_work_that_was_copied_out_survives_the_learners_crash() -> None:
    solo = Solo()
    solo.learn()
    solo.ready(ticket=1)
    solo.feed(ev.LearnerLost())
    solo.learn()
    solo.ready(ticket=2)
    first = found(solo.elect("p1"), ef.Offer)
    assert [o.ticket for o in first] == [1], "in order, one at a time"
    effects = solo.announce(child(genesis(0).header, learners=("me",)))
    assert found(effects, ef.CommitVersion)[0].merged_ticket is None, "the new learner never moved that far"
    second = found(effects, ef.Offer)[0].signed.header
    assert (second.stamp, second.after) == (Stamp(1, 2), Stamp(1, 1))


def offered(effects: list[ef.Effect]) -> list[int]:
    return [offer.ticket for offer in found(effects, ef.Offer)]


def answer(solo: Solo, peer: str, verdict: Verdict, sequence: int = 1) -> list[ef.Effect]:
    return solo.feed(ev.OfferAnswered(offer_to(peer, Stamp(1, sequence)), verdict, None))


def test_what_somebody_took_is_not_given_up_because_another_calls_it_unusable() -> None:
    """It may be in a merge that is under way: given up, its work would be in the next contribution too."""
    solo = Solo()
    solo.learn()
    solo.elect("p1")
    assert offered(solo.ready(1)) == [1]
    answer(solo, "p1", Verdict.IN_ROUND)
    assert offered(solo.elect("p2", term=2)) == [1]
    for _ in range(OTHER_OPINIONS):
        effects = answer(solo, "p2", Verdict.NON_FINITE)
        assert not found(effects, ef.RetireSlot) and offered(solo.wait(10.0)) == [1]
    assert found(answer(solo, "p2", Verdict.NON_FINITE), ef.RetireSlot)


def test_detached_work_that_somebody_copied_waits_until_the_thief_has_newer_work() -> None:
    solo = Solo()
    solo.learn()
    solo.ready(ticket=1)
    solo.feed(ev.LearnerLost())
    assert offered(solo.elect("p1")) == [1]
    parent = genesis(0)
    for number in range(1, OTHER_OPINIONS + 1):
        for _ in range(3):  # of the same version's syncer, as often as it is asked
            effects = answer(solo, "p1", Verdict.COPY)
            assert not found(effects, ef.DiscardContribution)
            solo.wait(10.0)
        after = Stamp(1, number - 1) if number > 1 else NEVER
        part = (Contributor("p1", Stamp(1, number), 40, 4, after=after),)
        parent = child(parent.header, "p1", contributors=part, tokens=40 * number)
        solo.announce(parent)
        solo.wait(10.0)
    assert found(answer(solo, "p1", Verdict.COPY), ef.DiscardContribution), (
        "it stands in nobody's way for ever"
    )


def test_what_contains_work_that_was_given_up_and_merged_all_the_same_is_not_sent() -> None:
    solo = Solo()
    solo.learn()
    solo.elect("p1")
    solo.ready(1)
    assert found(answer(solo, "p1", Verdict.NON_FINITE), ef.RetireSlot)
    assert offered(solo.ready(2)) == [2]
    effects = solo.announce(child(genesis(0).header, learners=("me",)))
    assert found(effects, ef.CommitVersion)[0].overwrite
    assert [slot.ticket for slot in found(effects, ef.RetireSlot)] == [2]
    assert not offered(solo.wait(30.0)) and solo.fragment.own.idle


def test_waiting_contributions_are_bounded_and_never_the_one_under_way_goes() -> None:
    solo = Solo()
    solo.elect("p1")
    gone = []
    for ticket in range(1, 9):
        solo.learn()
        gone += found(solo.ready(ticket=ticket), ef.DiscardContribution)
        solo.feed(ev.LearnerLost())
    assert [e.ticket for e in gone] == [2, 3, 4, 5]
    afters = [(p.after.sequence, p.stamp.sequence) for p in solo.fragment.own._queue]
    assert afters == [(0, 1), (1, 6), (6, 7), (7, 8)], "each names the one before it"


# --- leaving --------------------------------------------------------------------------------------------


def test_leaving_flushes_and_says_good_bye() -> None:
    solo = Solo()
    solo.learn()
    solo.elect("p1")
    effects = solo.feed(ev.LeaveRequested())
    assert found(effects, ef.RequestFragment) and not found(effects, ef.Left)
    offer = found(solo.ready(due=False, steps=2), ef.Offer)[0]
    assert offer.signed.header.due, "it may start a round: there is no later one for us"
    assert not found(solo.wait(0.5), ef.Left)
    effects = solo.announce(child(genesis(0).header, learners=("me",))) + solo.wait(0.6)
    good_bye = msg.Leaving(1, solo.heads())
    assert [s.peer for s in found(effects, ef.Send) if s.message == good_bye] == ["p1", "p2"]
    assert found(effects, ef.Left) and solo.core.departed


def test_leaving_waits_no_longer_than_it_may() -> None:
    solo = Solo()
    solo.learn()
    solo.feed(ev.LeaveRequested())
    solo.ready()
    assert not found(solo.wait(solo.config.timing.leave_s - 0.1), ef.Left)
    assert found(solo.wait(0.2), ef.Left)


def test_a_syncer_that_says_good_bye_is_replaced_at_once() -> None:
    solo = Solo()
    solo.elect("p1")
    solo.message("p1", msg.Leaving(1))
    assert solo.fragment.office.why_open(solo.now) == "the syncer left"
    assert sent(solo.wait(1.0, silent=("p1",)), msg.VoteRequest, to="p2")
