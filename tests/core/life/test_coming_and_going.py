"""Newcomers, heads in heartbeats, return, return to strangers, leaving: one test per claim.

Rules: docs/protocol/belief.md, sections 3 to 5; docs/protocol/rounds.md.
"""

from __future__ import annotations

import math

import msgspec
import pytest
from kit import (
    OWNER,
    PULLS,
    Solo,
    admission,
    branch,
    certificate,
    child,
    config,
    found,
    genesis,
    progress,
    reasons,
    saved,
    sent,
    table,
    word,
)
from msgspec.structs import replace
from scenes import FAR, due_again, one_round, serve, syncer, with_table

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.config import Restored, Timing
from p2pdiloco.core.api.papers import Paper
from p2pdiloco.core.api.reasons import FetchFailure, Verdict, VoteRefusal
from p2pdiloco.core.api.types import NEVER, Contributor, Head, Seat, Stamp, Watermark
from p2pdiloco.core.api.versions import MemberList, SignedVersion
from p2pdiloco.core.members import View
from p2pdiloco.core.membership import ROUND_BEATS, SAID_BEATS, News, in_one
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
    assert few.head.number == 3 and not found(effects, ev.FetchState)
    assert [c.update for c in found(effects, ev.CommitVersion)] == [1, 2, 3]
    effects = serve(many := newcomer(9), many.greeting)
    assert many.head.number == 9 and not found(effects, ev.FetchUpdate)
    assert found(effects, ev.CommitVersion)[0].update is None
    assert many.fragment.chain.marks.stamp("p1") == Stamp(1, 9), "the donor's watermarks come with it"


def test_a_holder_that_does_not_deliver_is_not_the_only_one_asked() -> None:
    solo = newcomer()
    first = found(solo.greeting, ev.FetchUpdate)[0]
    effects = solo.answer(first, ev.FetchFailed(FetchFailure.UNREACHABLE)) + solo.wait(0.4)
    assert found(effects, ev.FetchUpdate)[0].peer != first.peer


def test_an_update_that_is_gone_is_copied_instead() -> None:
    solo = newcomer()
    effects = solo.answer(PULLS, ev.FetchFailed(FetchFailure.GONE)) + solo.wait(1.0)
    assert found(effects, ev.FetchState)[0].number == 2


def test_an_outer_step_with_another_digest_is_dropped_and_the_state_copied() -> None:
    solo = newcomer()
    pull = found(solo.greeting, ev.FetchUpdate)[0]
    solo.answer(pull, ev.UpdateFetched(FAR[1], 7))
    effects = solo.answer(ev.ApplyUpdate, ev.UpdateApplied(bytes(32)))
    assert found(effects, ev.DropSpare) and ev.Release(7) in effects and solo.head.number == 0
    assert reasons(effects, "refusal") == ["digest-differs"]
    assert found(solo.wait(1.0), ev.FetchState)


def test_an_update_that_is_not_as_stated_is_neither_taken_nor_copied() -> None:
    solo = newcomer()
    pull = found(solo.greeting, ev.FetchUpdate)[0]
    asked = found(solo.answer(pull, ev.UpdateFetched(FAR[1], 7)), ev.ApplyUpdate)[0]
    assert asked.norm == FAR[1].header.norm
    effects = solo.answer(ev.ApplyUpdate, ev.UpdateApplied(b"", unsound=True))
    assert found(effects, ev.DropSpare) and ev.Release(7) in effects and solo.head.number == 0
    assert reasons(effects, "refusal") == ["out-of-scale"]
    assert not found(effects + solo.wait(1.0), ev.FetchState)


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
    ],
)
def test_a_false_update_is_refused(reason: str, odd: dict[str, object]) -> None:
    solo = newcomer()
    pull = found(solo.greeting, ev.FetchUpdate)[0]
    effects = solo.answer(pull, ev.UpdateFetched(child(genesis(0).header, **odd), 7))
    assert reasons(effects, "refusal") == [reason]
    assert ev.Release(7) in effects and not found(effects, ev.ApplyUpdate)


def test_an_update_that_another_signed_is_refused() -> None:
    solo = newcomer()
    pull = found(solo.greeting, ev.FetchUpdate)[0]
    forged = type(FAR[1])(FAR[1].header, child(genesis(0).header, "p2").signature)
    assert reasons(solo.answer(pull, ev.UpdateFetched(forged, 7)), "refusal") == ["version-signature"]


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
    solo.feed(ev.PresenceSeen(MemberList((("ghost", 1),)), unreached=1))
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
    assert not found(solo.hear("p1", heads=(lighter,)), ev.FetchState)
    effects = serve(solo, solo.hear("p1", heads=(FAR[5].header.head(),)))
    assert reasons(effects, "fork") == ["parent-differs"], "the updates do not fit: this is another branch"
    effects = serve(solo, solo.wait(1.0, silent=("p1", "p2")))
    assert not found(effects, ev.FetchState), "one of three is no support"
    effects = serve(solo, solo.hear("p2", heads=(FAR[5].header.head(),)))
    effects += serve(solo, solo.wait(5.0, silent=("p1", "p2")))
    assert found(effects, ev.FetchState) and solo.head == FAR[5].header.head()


def test_heads_of_the_unconfirmed_are_not_believed() -> None:
    solo = Solo()
    heavy = FAR[5].header.head()
    assert not found(solo.hear("p1", confirmed=False, heads=(heavy,)), ev.FetchUpdate)
    stranger = msg.VoteRefused("all", 0, 1, 1, heavy, VoteRefusal.VOTE_GIVEN)
    for sender in ("stranger", "p1"):
        assert not found(solo.message(sender, stranger), ev.FetchUpdate)


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
    copy = found(solo.greeting, ev.FetchState)[0]
    effects = solo.answer(copy, ev.StateFetched(forged, ()))
    assert found(effects, ev.DropSpare) and not found(effects, ev.CommitVersion) and solo.head.number == 0
    assert reasons(effects, "catchup")[0] == f"not taken: {reason}"


# --- contributions of a learner that crashes ------------------------------------------------------------


def test_work_that_was_copied_out_survives_the_learners_crash() -> None:
    solo = Solo()
    solo.learn()
    solo.ready(ticket=1)
    solo.feed(ev.LearnerLost())
    solo.learn()
    solo.ready(ticket=2)
    first = found(solo.elect("p1"), ev.Offer)
    assert [o.ticket for o in first] == [1], "in order, one at a time"
    effects = solo.announce(child(genesis(0).header, learners=("me",)))
    assert found(effects, ev.CommitVersion)[0].merged_ticket is None, "the new learner never moved that far"
    second = found(effects, ev.Offer)[0].signed.header
    assert (second.stamp, second.after) == (Stamp(1, 2), Stamp(1, 1))


def offered(effects: list[ev.Effect]) -> list[int]:
    return [offer.ticket for offer in found(effects, ev.Offer)]


def answer(solo: Solo, peer: str, verdict: Verdict, sequence: int = 1) -> list[ev.Effect]:
    asked = found([ask.effect for ask in solo.unanswered], ev.Offer)
    (offer,) = [o for o in asked if (o.peer, o.signed.header.stamp) == (peer, Stamp(1, sequence))]
    return solo.answer(offer, ev.OfferAnswered(verdict, None))


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
        assert not found(effects, ev.RetireSlot) and offered(solo.wait(10.0)) == [1]
    assert found(answer(solo, "p2", Verdict.NON_FINITE), ev.RetireSlot)


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
            assert not found(effects, ev.DiscardContribution)
            solo.wait(10.0)
        after = Stamp(1, number - 1) if number > 1 else NEVER
        part = (Contributor("p1", Stamp(1, number), 40, 4, after=after),)
        parent = child(parent.header, "p1", contributors=part, tokens=40 * number)
        solo.announce(parent)
        solo.wait(10.0)
    assert found(answer(solo, "p1", Verdict.COPY), ev.DiscardContribution), (
        "it stands in nobody's way for ever"
    )


def test_what_contains_work_that_was_given_up_and_merged_all_the_same_is_not_sent() -> None:
    solo = Solo()
    solo.learn()
    solo.elect("p1")
    solo.ready(1)
    assert found(answer(solo, "p1", Verdict.NON_FINITE), ev.RetireSlot)
    assert offered(solo.ready(2)) == [2]
    effects = solo.announce(child(genesis(0).header, learners=("me",)))
    assert found(effects, ev.CommitVersion)[0].overwrite
    assert [slot.ticket for slot in found(effects, ev.RetireSlot)] == [2]
    assert not offered(solo.wait(30.0)) and solo.fragment.own.idle


def test_waiting_contributions_are_bounded_and_never_the_one_under_way_goes() -> None:
    solo = Solo()
    solo.elect("p1")
    gone = []
    for ticket in range(1, 9):
        solo.learn()
        gone += found(solo.ready(ticket=ticket), ev.DiscardContribution)
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
    assert found(effects, ev.RequestFragment) and not found(effects, ev.Left)
    offer = found(solo.ready(due=False, steps=2), ev.Offer)[0]
    assert offer.signed.header.due, "it may start a round: there is no later one for us"
    assert not found(solo.wait(0.5), ev.Left)
    effects = solo.announce(child(genesis(0).header, learners=("me",))) + solo.wait(0.6)
    good_bye = msg.Leaving(1, solo.heads())
    assert [s.peer for s in found(effects, ev.Send) if s.message == good_bye] == ["p1", "p2"]
    assert found(effects, ev.Left) and solo.core.departed


def test_leaving_waits_no_longer_than_it_may() -> None:
    solo = Solo()
    solo.learn()
    solo.feed(ev.LeaveRequested())
    solo.ready()
    assert not found(solo.wait(solo.config.timing.leave_s - 0.1), ev.Left)
    assert found(solo.wait(0.2), ev.Left)


def test_a_syncer_that_says_good_bye_is_replaced_at_once() -> None:
    solo = Solo()
    solo.elect("p1")
    solo.message("p1", msg.Leaving(1))
    assert solo.fragment.office.why_open(solo.now) == "the syncer left"
    assert sent(solo.wait(1.0, silent=("p1",)), msg.VoteRequest, to="p2")


# Which heads a heartbeat carries, and what its receivers make of it.

MANY = 40
SOME = 10
"""Fragments of a whole node, which takes its time for each."""


class Chain:
    """As much of one as its head."""

    def __init__(self, index: int) -> None:
        self.head = Head(0, bytes([index]) * 32, 0, 0)


def chains() -> list[Chain]:
    return [Chain(index) for index in range(MANY)]


def quiet(made: list[Chain]) -> News:
    """Of nodes whose heads have all been said."""
    news = News(made)  # type: ignore[arg-type]
    for _ in range(SAID_BEATS):
        assert len(news.beat()) == MANY
    return news


def test_a_change_is_said_several_times_and_the_rest_in_turn() -> None:
    made = chains()
    news = quiet(made)
    made[7].head = Head(1, bytes(32), 10, 1)
    beats = [news.beat() for _ in range(ROUND_BEATS)]
    assert [(7, made[7].head) in beat for beat in beats[:SAID_BEATS]] == [True] * SAID_BEATS
    assert {index for beat in beats for index, _ in beat} == set(range(MANY))
    assert max(len(beat) for beat in beats) <= 1 + -(-MANY // ROUND_BEATS)
    assert all(list(beat) == sorted(beat, key=lambda said: said[0]) for beat in beats)


@pytest.mark.parametrize("every", [2, 3, 4, 6, 8, 16])
def test_what_changed_in_beats_that_reached_nobody_is_said_again_though_some_are_missing(every: int) -> None:
    for missing in range(every):
        made = chains()
        news = quiet(made)
        for beat in range(3 * ROUND_BEATS):
            said = news.beat()
            if beat % every != missing:
                made = [chain for chain in made if (chain.head.digest[0], chain.head) not in said]
        assert not made, f"every {every}. beat, from {missing} on, is missing"


def test_whoever_is_new_is_told_everything() -> None:
    made = chains()
    news = quiet(made)
    news.all_anew()
    assert len(news.beat()) == MANY


def solo_of_many() -> Solo:
    solo = Solo(config(fragments=SOME))
    solo.wait(ROUND_BEATS * 0.5)
    return solo


def test_heartbeats_to_members_are_short_and_to_whoever_was_silent_whole() -> None:
    solo = solo_of_many()
    assert solo.core.confirmed
    beats = sent(solo.wait(4.0), msg.Progress, "p1")
    assert beats and all(len(beat.heads) <= 2 + SOME // ROUND_BEATS for beat in beats)
    solo.wait(Timing().member_ttl_s, silent=("p2",))
    again = sent(solo.wait(2 * Timing().redial_s, silent=("p2",)), msg.Progress, "p2")
    assert again and all(len(beat.heads) == SOME for beat in again), "it may have forgotten us"


def test_a_newcomer_and_one_that_was_restarted_are_answered_with_all_heads() -> None:
    solo = solo_of_many()
    for peer, incarnation in (("p9", 1), ("p1", 2)):
        effects = solo.message(peer, progress(solo.heads(), incarnation=incarnation, confirmed=False))
        assert [len(said.heads) for said in sent(effects, msg.Progress, peer)] == [SOME], peer


def test_what_a_short_heartbeat_does_not_say_is_as_last_heard() -> None:
    view, heads = View("me", Timing()), tuple(genesis(index).header.head() for index in range(3))
    view.heard("p1", progress(heads), 0.0)
    newer = Head(1, bytes(32), 10, 1)
    assert view.heard("p1", msg_of(((1, newer),)), 0.5)
    assert view.heads("p1") == [(0, heads[0]), (1, newer), (2, heads[2])]
    assert view.head("p1", 1) == newer and view.head("p2", 1) is None
    assert view.heard("p1", msg_of((), incarnation=2), 1.0)
    assert view.heads("p1") == [], "it may have come back with an older state"


def msg_of(heads: tuple[tuple[int, Head], ...], incarnation: int = 1) -> msg.Progress:
    return replace(progress((), incarnation=incarnation), heads=heads)


def test_a_heavier_head_said_once_is_followed_though_the_next_heartbeats_are_silent_about_it() -> None:
    solo = Solo(config(fragments=2))
    ahead = Head(3, b"\x07" * 32, 300, 2)
    solo.message("p1", msg_of(((1, ahead),)))
    solo.message("p1", msg_of(()))
    assert solo.core.fragments[1].follower.behind(solo.now)
    assert not solo.core.fragments[0].follower.behind(solo.now)


def test_heads_out_of_order_twice_or_of_no_fragment_are_refused() -> None:
    solo = Solo(config(fragments=2))
    head = solo.heads()[0]
    for said in (((1, head), (0, head)), ((1, head), (1, head)), ((2, head),)):
        assert reasons(solo.message("p1", msg_of(said)), "refusal") == ["wrong-heads"], said


def test_a_heartbeat_that_was_not_sent_goes_out_in_the_next() -> None:
    old, new = Head(1, bytes(32), 10, 1), Head(2, bytes(32), 20, 1)
    joined = in_one(msg_of(((1, old), (3, old))), msg_of(((0, new), (1, new))))
    assert joined.heads == ((0, new), (1, new), (3, old))
    assert in_one(msg_of(((1, old),)), msg_of((), incarnation=2)).heads == (), "of an earlier life"


# Return of nodes when all had died: they agree on the heaviest saved state (docs/protocol/belief.md,
# section 5).


def took_part(restored: Restored, *learners: str) -> Restored:
    """The saved chain has contributions of these too."""
    found = restored.fragments[0]
    number, known = found.log[-1].header.number, {mark.learner: mark for mark in found.watermarks}
    mine = {learner: Watermark(learner, Stamp(1, 1), number) for learner in learners}
    marks = tuple(mark for _, mark in sorted((mine | known).items()))
    return msgspec.structs.replace(
        restored, fragments=(msgspec.structs.replace(restored.fragments[0], watermarks=marks),)
    )


def returning(versions: int, theirs: int, **odd: object) -> Solo:
    """We and two others return, with saved chains of different lengths."""
    restored = took_part(saved(FAR[: versions + 1]), "p1", "p2")
    heads = (FAR[theirs].header.head(),)
    return Solo(restored=restored, confirmed=False, saved=True, heads=heads, **odd)  # type: ignore[arg-type]


def test_one_that_took_part_alone_goes_on_at_once() -> None:
    solo = Solo(peers=(), restored=saved(branch(2, syncer="me", learners=("me",))))
    solo.wait(1.0)
    assert solo.core.confirmed and solo.head.number == 2


def test_who_took_part_lately_is_waited_for_a_while() -> None:
    solo = Solo(peers=(), restored=saved(branch(2)))
    solo.wait(solo.config.timing.resume_alone_s - 1)
    assert not solo.core.confirmed and solo.core.waits_for(solo.now) == "1 that took part before"
    solo.wait(2.0)
    assert solo.core.confirmed and solo.core.waits_for(solo.now) == ""


def test_the_heaviest_goes_on_as_soon_as_all_are_back() -> None:
    solo = returning(5, theirs=3)
    assert not solo.core.confirmed and solo.core.may_serve, "the others may take it"
    assert all(p.saved and not p.confirmed for p in sent(solo.greeting, msg.Progress))
    effects = solo.wait(4.0)
    assert solo.core.confirmed and solo.head.number == 5
    assert reasons(effects, "join") == [
        "full member: goes on from the saved state, the heaviest of 3 that return"
    ]


def test_who_is_confirmed_says_nothing_else_in_the_same_moment() -> None:
    """Messages overtake each other: others would count it out, and elect a syncer without it."""
    head = FAR[2].header.head()
    back = {"confirmed": False, "saved": True, "heads": (head,)}
    solo = Solo(peers=("p1",), restored=took_part(saved(FAR[:3]), "p1", "p9"), **back)
    said: list[msg.Progress] = []
    while not solo.core.confirmed:
        solo.now = solo.core.next_deadline()
        said = sent(solo.feed(ev.Tick()), msg.Progress, "p1")
        solo.hear("p1")
    assert said and all(p.confirmed for p in said)


def test_a_lighter_one_takes_the_heavier_state_first() -> None:
    solo = returning(2, theirs=4)
    assert solo.core.waits_for(solo.now) == "a heavier saved state of others that return"
    effects = serve(solo, solo.greeting)
    assert found(effects, ev.CommitVersion) and solo.head.number == 4 and not solo.core.confirmed
    solo.wait(4.0)
    assert solo.core.confirmed


def test_each_fragment_comes_from_whoever_has_the_heaviest() -> None:
    """It is one state of fragments that differ: p1 has more of fragment 1, we of fragment 0."""
    from kit import config

    logs = (tuple(branch(3)), tuple(branch(1, fragment=1)))
    seated = Watermark("p1", Stamp(1, 1), 1, seat=Seat(1))
    fragments = tuple(
        msgspec.structs.replace(saved(list(log)).fragments[0], watermarks=(seated,)) for log in logs
    )
    restored = Restored(fragments=fragments, saved=True)
    heads = (branch(2)[2].header.head(), branch(4, fragment=1)[4].header.head())
    solo = Solo(config(2), ("p1",), restored, confirmed=False, saved=True, heads=heads)
    assert {pull.fragment for pull in found(solo.greeting, ev.FetchUpdate)} == {1}


def test_nobody_confirms_while_a_holder_of_more_is_asked() -> None:
    solo = returning(2, theirs=4)
    solo.wait(40.0)
    assert not solo.core.confirmed
    solo.answer(PULLS, ev.FetchFailed(FetchFailure.FALSE))
    solo.answer(PULLS, ev.FetchFailed(FetchFailure.FALSE))
    solo.wait(1.0)
    assert solo.core.confirmed, "they cannot give what they boast of"


def test_a_node_with_nothing_saved_waits_for_those_that_return() -> None:
    solo = Solo(genesis=True, confirmed=False, saved=True, heads=(FAR[3].header.head(),))
    assert not found(solo.wait(60.0), ev.FetchUpdate), "an unconfirmed state is for those that return"
    assert not solo.core.confirmed and not solo.core.may_serve
    assert solo.core.waits_for(solo.now) == "2 members that return with saved state"
    effects = serve(solo, solo.hear("p1", confirmed=True, saved=False))
    assert found(effects, ev.CommitVersion) and solo.core.confirmed and solo.head.number == 3


def test_where_somebody_is_confirmed_saved_heads_count_for_nothing() -> None:
    solo = Solo(restored=took_part(saved(FAR[:3]), "p1", "p2"), peers=("p1",), heads=(FAR[3].header.head(),))
    heavier = FAR[6].header.head()
    solo.hear("p2", confirmed=False, saved=True, heads=(heavier,))
    assert solo.core.waits_for(solo.now) == "the state of the members"
    assert not solo.core.may_serve
    serve(solo, solo.greeting)
    assert solo.core.confirmed and solo.head.number == 3


def test_who_returns_with_a_heavier_chain_than_all_members_is_one_of_them() -> None:
    """They have gone on from an older version; the fork is settled as any other."""
    other = branch(2, syncer="p2", learners=("p2",))
    lighter = child(genesis(0).header, "p1", learners=("p9",)).header.head()
    solo = Solo(restored=took_part(saved(other), "p1"), heads=(lighter,))
    assert solo.core.confirmed and solo.head.number == 2


# Return to those who have no seat by our chain: they are anybody (docs/protocol/belief.md, section 3).

WORKERS = ("me", "p1", "p2")
LOG = branch(2, learners=WORKERS)
ALONE_S = config().timing.resume_alone_s
TERM = 1 << 40


def far(maker: str, learners: tuple[str, ...] = WORKERS) -> list[ev.SignedVersion]:
    """More versions above ours than the update log keeps: only a whole state leads there."""
    made = [LOG[2]]
    for _ in range(9):
        made.append(child(made[-1].header, maker, learners=learners))
    return made[1:]


def meets(*peers: str, maker: str = "s1", mine: tuple[str, ...] = WORKERS) -> Solo:
    """We return, and these say that they hold a heavier chain of that maker's."""
    heads = (far(maker)[-1].header.head(),)
    restored = saved(branch(2, learners=mine))
    solo = Solo(config(owner=OWNER), peers=peers, restored=restored, heads=heads)
    gone(solo, solo.greeting)
    return solo


def gone(solo: Solo, effects: list[ev.Effect]) -> None:
    """Nobody has the updates that would lead there any more."""
    for pull in found(effects, ev.FetchUpdate):
        solo.answer(pull, ev.FetchFailed(FetchFailure.GONE))


def wait(solo: Solo, seconds: float) -> list[ev.Effect]:
    """Let time pass."""
    effects, until_s = list[ev.Effect](), solo.now + seconds
    while solo.now < until_s:
        new = solo.wait(min(1.0, until_s - solo.now))
        gone(solo, new)
        effects += new
    return effects


def asked(effects: list[ev.Effect]) -> list[str]:
    return [copy.peer for copy in found(effects, ev.FetchState)]


@pytest.mark.parametrize(
    ("syncer", "voters"), [("s1", ("s1",)), ("s1", ("p1", "s1")), ("p1", ("s1",)), ("p1", ("s1", "s2"))]
)
def test_no_certificate_of_a_strangers_making_counts(syncer: str, voters: tuple[str, ...]) -> None:
    """Who is not confirmed yet cannot tell a majority."""
    solo = meets("s1")
    effects = solo.message("s1", msg.Elected(certificate(syncer, voters, TERM)))
    assert reasons(effects, "refusal") == ["certificate-minority"]
    assert solo.fragment.office.certificate is None and not asked(solo.wait(1.0))


def test_who_has_a_seat_may_be_in_office() -> None:
    solo = meets("p1", maker="p1")
    solo.message("p1", msg.Elected(certificate("p1", ("p1", "p2", "x9"))))
    assert solo.fragment.office.syncer == "p1"


@pytest.mark.parametrize("mine", [WORKERS, ("p1", "p2"), ("me",)])
def test_who_returns_to_strangers_goes_on_from_its_own_state(mine: tuple[str, ...]) -> None:
    """Whoever worked, and however long it is alone with them: nobody without a seat moves it."""
    solo = meets("s1", mine=mine)
    here = solo.head
    assert not asked(solo.greeting + wait(solo, ALONE_S + 900.0))
    assert solo.core.confirmed and solo.head == here


def test_a_member_that_comes_in_time_is_believed_and_no_stranger() -> None:
    solo = meets("s1")
    wait(solo, ALONE_S / 2)
    assert not solo.core.confirmed
    solo.peers = ("s1", "p1")
    solo.says["p1"] = {"heads": (LOG[2].header.head(),)}
    solo.wait(1.0)
    assert solo.core.confirmed and solo.head == LOG[2].header.head()
    assert not asked(wait(solo, 600.0)), "and that for good"


@pytest.mark.parametrize("paper", [word("s1"), admission("s1")])
def test_who_returns_believes_those_whom_papers_name(paper: Paper) -> None:
    """All that it knew have handed the run on to others, by the owner's word or an invite."""
    solo = meets("s1")
    solo.feed(ev.Guided(papers=(paper,)))
    wait(solo, 5.0)
    version = far("s1")[-1]
    effects = solo.answer(ev.FetchState, ev.StateFetched(version, table(version)))
    assert found(effects, ev.CommitVersion) and solo.head == version.header.head() and solo.core.confirmed


def test_forged_papers_name_nobody() -> None:
    solo = meets("s1")
    forged = word("s1", by="s1"), admission("s1", by="s1"), admission("s1", key="link", signer="s1")
    solo.feed(ev.Guided(papers=forged))
    assert not asked(wait(solo, ALONE_S)) and not solo.core.shared.papers.words


def sides(*seats: str) -> tuple[Solo, list[ev.SignedVersion]]:
    """We began alone and made two versions; s1 did, too, and made more. Then we meet."""
    other = branch(9, syncer="s1", learners=("s1",), seats=("me", "s1"))
    mine = saved(branch(2, syncer="me", learners=("me",), seats=seats))
    solo = Solo(config(seats=seats), peers=(), restored=mine, incarnation=2)
    solo.wait(2.0)
    assert solo.core.confirmed
    solo.peers, solo.heard = ("s1",), {"heads": (other[-1].header.head(),)}
    return solo, other


def test_two_sides_that_began_alone_join_by_weight_where_both_have_seats() -> None:
    solo, other = sides("me", "s1")
    solo.hear("s1")
    effects = solo.answer(ev.FetchState, ev.StateFetched(other[-1], table(other[-1])))
    assert found(effects, ev.CommitVersion) and solo.head == other[-1].header.head()


def test_the_heavier_side_of_one_without_a_seat_may_be_anybodys() -> None:
    solo, _ = sides("me")
    assert not asked(solo.hear("s1") + wait(solo, 30.0))


# Leaving: what a member still does for what was trained, one claim each (docs/protocol/rounds.md, section
# 7).

STANDS_NOT = {"stands": False}


def test_what_came_after_a_contribution_under_way_is_asked_for_once() -> None:
    solo = Solo()
    solo.learn()
    solo.elect("p1")
    first = found(solo.ready(), ev.Offer)[0].signed.header
    assert not found(solo.feed(ev.LeaveRequested()), ev.RequestFragment), "one at a time"
    one = child(genesis(0).header, learners=("me",))
    assert len(found(solo.announce(one), ev.RequestFragment)) == 1
    second = found(solo.ready(2, due=False, steps=2), ev.Offer)[0].signed.header
    assert second.after == first.stamp and second.inner_steps == 2 and second.due
    assert not found(solo.wait(0.5), ev.Left)
    effects = solo.announce(child(one.header, learners=("me",)), 901)
    assert not found(effects, ev.RequestFragment), "a learner that goes on training does not keep us"
    assert found(effects + solo.wait(0.6), ev.Left)


def test_that_we_leave_is_told_at_once() -> None:
    solo = Solo()
    told = sent(solo.feed(ev.LeaveRequested()), msg.Progress)
    assert len(told) == 2 and not any(progress.stands for progress in told)


def test_the_last_round_waits_for_answers() -> None:
    """Who is called may be leaving too: its answer would be nobody's."""
    solo = syncer(quorum=1, peers=("p1", "p2", "p3"))
    solo.offer("p1", 1)
    effects = solo.feed(ev.LeaveRequested()) + solo.wait(1.0)
    assert not found(effects, ev.Merge)
    solo.offer("p2", 2)
    assert len(found(solo.wait(1.3), ev.Merge)[0].inputs) == 2, "but no longer than our time"


def test_what_came_too_late_for_a_round_begins_the_next_one() -> None:
    solo = syncer(quorum=1, peers=("p1", "p2"))
    effects = solo.offer("p1", 1) + solo.wait(1.0)
    assert due_again(solo, "p2", 2)
    effects = solo.merged(found(effects, ev.Merge)[0])
    assert not reasons(effects, "closing"), "it waits for company"
    assert reasons(solo.feed(ev.LeaveRequested()), "closing") == ["quorum 1, 1 called"]


def test_a_syncer_after_whom_nobody_stands_asks_everybody_once() -> None:
    solo = syncer(quorum=1, peers=("p1", "p2"))
    one_round(solo, "p1", "p2")
    for peer in solo.peers:
        solo.hear(peer, **STANDS_NOT)
    effects = solo.feed(ev.LeaveRequested())
    assert reasons(effects, "closing") == ["we leave, nobody else stands, 2 called"]
    assert len(sent(effects, msg.Closing)) == 2 and solo.fragment.office.holding
    call = sent(effects, msg.Closing)[0]
    solo.message("p1", msg.Pass("all", 0, call.term, call.number))
    merge = found(due_again(solo, "p2", 20), ev.Merge)
    assert len(merge[0].inputs) == 1
    effects = solo.merged(merge[0])
    assert not reasons(effects, "closing") and not solo.fragment.office.holding


def test_a_syncer_leaves_its_office_to_whoever_stands() -> None:
    solo = syncer(quorum=1, peers=("p1", "p2"))
    one_round(solo, "p1", "p2")
    solo.hear("p1", **STANDS_NOT)
    effects = solo.feed(ev.LeaveRequested())
    assert not reasons(effects, "closing") and not solo.fragment.office.holding


def test_who_leaves_stands_where_nobody_else_does_and_only_for_work_of_its_own() -> None:
    for trained, others_stand in ((True, False), (True, True), (False, False)):
        solo = Solo(config())
        if trained:
            solo.learn()
            solo.ready()
        for peer in solo.peers:
            solo.hear(peer, stands=others_stand)
        effects = solo.feed(ev.LeaveRequested())
        for _ in range(10):
            for peer in solo.peers:
                effects += solo.hear(peer, stands=others_stand)
            effects += solo.wait(0.1, silent=solo.peers)
        assert bool(sent(effects, msg.VoteRequest)) == (trained and not others_stand)


def test_a_strangers_word_that_it_has_our_version_lets_nobody_go() -> None:
    """Nobody else can give it once we are gone: whom the chain knows is waited for, for as long as may be."""
    gone_after = []
    for far in (False, True):
        solo = syncer(quorum=1, peers=("p1", "p2", "s1"), founders=("me", "p1", "p2"))
        old = solo.head
        solo.says = {peer: {"heads": (old,)} for peer in solo.peers}
        one_round(solo, "p1", "p2")
        if far:
            solo.says["s1"] = {"heads": (Head(1 << 40, old.digest, 1 << 50, 1),)}
        for peer in solo.peers:
            solo.hear(peer)
        since_s, effects = solo.now, solo.feed(ev.LeaveRequested())
        while not found(effects, ev.Left):
            effects = solo.wait(0.25)
        gone_after.append(solo.now - since_s)
    assert gone_after == [solo.config.timing.leave_s] * 2
