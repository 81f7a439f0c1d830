"""Rounds (docs/protocol/rounds.md): quorum, grace window, closing call, late work; one test a claim."""

from __future__ import annotations

import itertools

import pytest
from kit import Solo, certificate, child, config, contribution, found, reasons, sent
from scenes import due_again, one_round, syncer

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import Stamp
from p2pdiloco.core.round import RoundState


def test_quorum_of_k_starts_closing() -> None:
    solo = syncer()
    assert not reasons(solo.offer("p1", 1), "closing")
    assert solo.fragment.words(solo.now) == "waiting: 1 of 2 contributions"
    assert reasons(solo.offer("p2", 2), "closing") == ["quorum 2, 0 called"]


def test_effective_quorum_never_exceeds_the_live_learners() -> None:
    solo = syncer(quorum=3)
    solo.offer("p1", 1)
    assert solo.fragment.words(solo.now) == "waiting: 1 of 2 contributions"
    solo.hear("p2", learning=False)
    effects = solo.wait(0.1, silent=("p1", "p2"))
    assert found(effects, ef.Merge)[0].inputs[0].contributor.learner == "p1"


def test_grace_window_is_a_share_of_the_slack() -> None:
    solo = syncer(peers=("p1", "p2", "p3"))
    solo.offer("p1", 1)
    solo.now += 0.06  # time to quorum; slack = 2 x 0.1 s - 0.06 s
    closing = [r for r in found(solo.offer("p2", 2), ef.Record) if r.kind == "closing"]
    assert dict(closing[0].fields)["grace_s"] == pytest.approx(0.5 * (2 * 0.1 - 0.06))


def test_grace_window_is_capped() -> None:
    solo = syncer(peers=("p1", "p2", "p3"), grace_cap_s=0.01)
    solo.offer("p1", 1)
    call = sent(solo.offer("p2", 2), msg.Closing, to="p3")[0]
    assert call.closes_in_s == pytest.approx(0.01)


def test_no_slack_no_grace() -> None:
    solo = syncer(peers=("p1", "p2", "p3"))
    solo.offer("p1", 1)
    solo.now += 1.0
    effects = solo.offer("p2", 2)
    assert reasons(effects, "closing")[0] == "quorum 2, 1 called"
    assert len(found(effects, ef.Merge)[0].inputs) == 2, "closes when two are in, without p3"


def test_the_window_grows_to_what_answers_take() -> None:
    """Two inner steps of 10 ms are too short for any answer: the next round waits for it, within bounds."""
    solo = syncer(peers=("p1", "p2", "p3", "p4"), inner_steps=40)
    for peer in ("p1", "p2", "p3", "p4"):
        solo.hear(peer, step_time_s=0.01)
    solo.offer("p1", 1)
    closing = [r for r in found(solo.offer("p2", 2), ef.Record) if r.kind == "closing"]
    assert dict(closing[0].fields)["grace_s"] == pytest.approx(0.5 * 2 * 0.01)
    merge = found(solo.wait(0.05), ef.Merge)[0]
    solo.message("p4", msg.Pass("all", 0, 1, 1))
    solo.offer("p3", 3, due=False)  # the last answer: 50 ms after the call
    solo.merged(merge)
    solo.wait(0.2)  # the next round begins half an interval later at the earliest
    again = {"stamp": Stamp(1, 2), "after": Stamp(1, 1)}
    closing = [r for r in found(solo.offer("p1", 4, **again), ef.Record) if r.kind == "closing"]
    assert 0.05 < dict(closing[0].fields)["grace_s"] <= 0.5 * 40 * 0.01


def test_a_new_syncer_waits_as_long_as_it_may() -> None:
    """It knows nothing of how long answers take: three quarters of the sync interval, whatever the slack."""
    solo = Solo(config(inner_steps=40), ("p1", "p2", "p3"))
    solo.take_office()
    solo.offer("p1", 1)
    closing = [r for r in found(solo.offer("p2", 2), ef.Record) if r.kind == "closing"]
    assert dict(closing[0].fields)["grace_s"] == pytest.approx(0.75 * 40 * 0.1)


def test_first_versions_wait_for_everybody_though_nobody_has_told_how_long_steps_take() -> None:
    """Else a run's first versions are each of whoever came first."""
    solo = Solo(config(quorum=1, timing={"answer_floor_s": 5.0}), ("p1", "p2", "p3"), step_time_s=0.0)
    solo.take_office()
    assert solo.core.shared.median_step_s(solo.now) == 0.0
    assert not found(solo.offer("p1", 1) + solo.offer("p2", 2, due=False) + solo.wait(0.05), ef.Merge)
    (merge,) = found(solo.offer("p3", 3, due=False), ef.Merge)
    solo.merged(merge)
    solo.offer("p1", 4, stamp=Stamp(1, 2), after=Stamp(1, 1))
    effects = solo.offer("p2", 5, stamp=Stamp(1, 2), after=Stamp(1, 1), due=False)
    assert not found(effects + solo.wait(0.1), ef.Merge), "an answer takes as long as last time"
    assert len(found(solo.wait(0.3), ef.Merge)[0].inputs) == 2, "and not much longer"


def test_a_round_begins_half_an_interval_after_a_version_at_the_earliest() -> None:
    """Work of one learner and a step or two of the others would move all by a whole outer step."""
    solo = syncer(quorum=1, peers=("p1", "p2", "p3"), inner_steps=40, delay_steps=20)
    one_round(solo, "p1", "p2", "p3")
    solo.wait(0.2)
    assert not reasons(due_again(solo, "p1", 20), "closing")
    assert not reasons(solo.wait(0.5 * 40 * 0.1 - 0.4), "closing")
    effects = solo.wait(0.3)
    assert reasons(effects, "closing") == ["quorum 1, 2 called"]
    for number, learner in enumerate(("p2", "p3"), 21):
        effects += solo.offer(learner, number, stamp=Stamp(1, 2), after=Stamp(1, 1), due=False)
    assert len(found(effects, ef.Merge)[0].inputs) == 3


def test_the_interval_is_that_of_the_fastest() -> None:
    """Many slow learners do not make the rounds of the fast ones rarer."""
    solo = syncer(quorum=1, peers=("p1", "p2", "p3", "p4"), inner_steps=40)
    solo.says = {peer: {"step_time_s": 1.0} for peer in ("p2", "p3", "p4")}
    one_round(solo, "p1", "p2", "p3", "p4")
    solo.wait(0.5 * 40 * 0.1 + 0.6)
    assert reasons(due_again(solo, "p1", 20), "closing")[0] == "quorum 1, 3 called"


def test_a_round_with_everybody_begins_at_once() -> None:
    solo = syncer(quorum=1, peers=("p1", "p2"), inner_steps=40)
    one_round(solo, "p1", "p2")
    due_again(solo, "p1", 20)
    assert len(found(due_again(solo, "p2", 21), ef.Merge)[0].inputs) == 2


def test_who_passed_last_time_is_not_in_this_time() -> None:
    solo = syncer(quorum=1, peers=("p1", "p2"), inner_steps=40, delay_steps=20)
    solo.offer("p1", 1)
    (merge,) = found(solo.message("p2", msg.Pass("all", 0, 1, 1)), ef.Merge)
    solo.merged(merge)
    effects = due_again(solo, "p1", 20)
    assert [told.verdict for told in found(effects, ef.AnswerTransfer)] == [Verdict.HELD]
    assert not reasons(effects, "closing")


def test_who_is_kept_waiting_is_told_so() -> None:
    """It would else suspect a syncer that waits on purpose."""
    solo = syncer(quorum=1, peers=("p1", "p2"), inner_steps=40)
    one_round(solo, "p1", "p2")
    assert [told.verdict for told in found(due_again(solo, "p1", 20), ef.AnswerTransfer)] == [Verdict.HELD]
    solo = syncer(quorum=1, peers=("p1", "p2"), inner_steps=40)
    one_round(solo, "p1", "p2")
    solo.wait(0.5 * 40 * 0.1 + 0.6)
    assert [told.verdict for told in found(due_again(solo, "p1", 20), ef.AnswerTransfer)] == [
        Verdict.IN_ROUND
    ]


def test_a_syncer_that_leaves_keeps_no_distance() -> None:
    solo = syncer(quorum=1, peers=("p1", "p2"), inner_steps=40)
    one_round(solo, "p1", "p2")
    due_again(solo, "p1", 20)
    assert "quorum 1, 1 called" in reasons(solo.feed(ev.LeaveRequested()), "closing")


def test_the_round_closes_when_the_grace_window_ends() -> None:
    solo = syncer(peers=("p1", "p2", "p3"))
    solo.offer("p1", 1)
    solo.offer("p2", 2)
    assert not found(solo.wait(0.09), ef.Merge)
    assert found(solo.wait(0.02), ef.Merge)


def test_a_round_does_not_wait_for_a_learner_whose_heartbeats_stopped() -> None:
    solo = syncer(peers=("p1", "p2", "p3"), inner_steps=400, delay_steps=200)  # a window of seconds
    solo.offer("p1", 1)
    solo.offer("p2", 2)
    assert solo.fragment.words(solo.now).startswith("closing: 2 of 3")
    assert not found(solo.wait(2.0, silent=("p3",)), ef.Merge), "some heartbeats may be late"
    effects = solo.wait(solo.config.timing.suspect_s, silent=("p3",))
    assert len(found(effects, ef.Merge)) == 1


def test_a_round_waits_for_a_learner_that_is_heard() -> None:
    solo = syncer(peers=("p1", "p2", "p3"), inner_steps=400, delay_steps=200)
    solo.offer("p1", 1)
    solo.offer("p2", 2)
    assert not found(solo.wait(3.0), ef.Merge)
    assert len(found(solo.offer("p3", 3, due=False), ef.Merge)[0].inputs) == 3


def test_the_closing_call_goes_to_those_who_have_not_contributed() -> None:
    solo = syncer(peers=("p1", "p2", "p3", "p4"))
    solo.learn()
    solo.offer("p1", 1)
    # p3's payload is on its way, which is enough for a quorum of two: nobody needs to call it.
    effects = solo.feed(ev.Offered(3, "p3", contribution("p3", solo.head)))
    calls = [send.peer for send in found(effects, ef.Send) if isinstance(send.message, msg.Closing)]
    assert calls == ["p2", "p4"]
    assert found(effects, ef.RequestFragment) == [ef.RequestFragment(0)], "our own learner is asked too"
    assert reasons(effects, "closing") == ["quorum 2, 3 called"]


def test_whoever_answers_the_call_is_in_and_nobody_is_waited_for_after_that() -> None:
    solo = syncer(peers=("p1", "p2", "p3", "p4"))
    solo.offer("p1", 1)
    solo.offer("p2", 2)
    assert not found(solo.message("p4", msg.Pass("all", 0, 1, 1)), ef.Merge)
    merge = found(solo.offer("p3", 3, due=False, tokens=10, inner_steps=1), ef.Merge)[0]
    assert [part.contributor.learner for part in merge.inputs] == ["p1", "p2", "p3"]


def test_a_called_learner_sends_what_it_has_or_passes() -> None:
    solo = Solo()
    solo.learn()
    solo.elect("p1")
    call = msg.Closing("all", 0, 1, 1, 0.1)
    assert found(solo.message("p1", call), ef.RequestFragment)
    assert sent(solo.feed(ev.NothingToContribute(0)), msg.Pass, to="p1")[0].number == 1
    assert found(solo.message("p1", call), ef.RequestFragment)
    offer = found(solo.ready(due=False, steps=2), ef.Offer)[0]
    assert (offer.peer, offer.signed.header.due, offer.signed.header.tokens) == ("p1", False, 20)
    assert sent(solo.message("p2", call), msg.Pass, to="p2"), "only the syncer may call"


def test_a_late_closing_call_is_ignored() -> None:
    solo = Solo()
    solo.learn()
    solo.elect("p1")
    solo.announce(child(solo.fragment.chain.header))
    assert not found(solo.message("p1", msg.Closing("all", 0, 1, 1, 0.1)), ef.RequestFragment)


def test_late_work_is_held_for_the_next_round_and_starts_none_by_itself() -> None:
    solo = syncer(peers=("p1", "p2", "p3"), quorum=1)
    merge = found(solo.offer("p1", 1) + solo.wait(1.0), ef.Merge)[0]
    late = solo.offer("p2", 2)
    assert [a.verdict for a in found(late, ef.AnswerTransfer)] == [Verdict.HELD]
    effects = solo.merged(merge) + solo.wait(1.0)
    assert solo.head.number == 1 and not reasons(effects, "closing"), "p2 alone starts nothing"
    effects = solo.offer("p1", 3, stamp=Stamp(1, 2), after=Stamp(1, 1)) + solo.wait(0.5)
    assert [p.contributor.learner for p in found(effects, ef.Merge)[0].inputs] == ["p1", "p2"]


def test_late_work_does_not_wait_for_ever() -> None:
    solo = syncer(peers=("p1", "p2", "p3"), quorum=1)
    merge = found(solo.offer("p1", 1) + solo.wait(1.0), ef.Merge)[0]
    solo.offer("p2", 2)
    solo.merged(merge)
    assert found(solo.wait(solo.config.timing.hold_floor_s + 0.5), ef.Merge)


def test_a_slow_stream_that_misses_its_round_starts_none() -> None:
    solo = syncer(peers=("p1", "p2", "p3"), quorum=1)
    solo.feed(ev.Offered(9, "p2", contribution("p2", solo.head)))
    one_round(solo, "p1", "p3")
    effects = solo.feed(ev.PayloadReceived(9, 109))
    assert [a.verdict for a in found(effects, ef.AnswerTransfer)] == [Verdict.HELD] and not reasons(
        effects, "closing"
    )


def test_a_payload_that_another_version_merged_meanwhile_is_refused() -> None:
    solo = syncer(peers=("p1", "p2", "p3"), quorum=3)
    solo.feed(ev.Offered(9, "p2", contribution("p2", solo.head)))
    solo.announce(child(solo.fragment.chain.header, "p3", ("p2",), term=2))
    assert solo.head.number == 1 and solo.fragment.office.holding
    effects = solo.feed(ev.PayloadReceived(9, 109))
    assert [a.verdict for a in found(effects, ef.AnswerTransfer)] == [Verdict.CHAIN_MOVED]
    assert ef.Release(109) in effects


def test_contributions_are_merged_in_one_order_whatever_order_they_came_in() -> None:
    solo = syncer(peers=("p1", "p2", "p3"))
    effects = [e for i, learner in enumerate(("p3", "p1", "p2")) for e in solo.offer(learner, i)]
    assert [p.contributor.learner for p in found(effects, ef.Merge)[0].inputs] == ["p1", "p2", "p3"]


def test_a_version_is_durable_before_anybody_hears_of_it() -> None:
    solo = syncer()
    merge = found(solo.offer("p1", 1) + solo.offer("p2", 2) + solo.wait(0.5), ef.Merge)[0]
    solo.slow_disk = True
    effects = solo.merged(merge) + solo.wait(1.0)
    assert isinstance(found(effects, ef.Persist)[0].record, ef.UpdateRecord)
    assert not found(effects, ef.CommitVersion) and not sent(effects, msg.Announce)
    assert all(h.number == 0 for p in sent(effects, msg.Progress) for _, h in p.heads), "nor by heartbeat"
    effects = solo.write()
    told = sent(effects, msg.Announce, to="p1")[0]
    assert found(effects, ef.CommitVersion)[0].version.header.head() == told.head and told.syncer == "me"
    assert solo.head.number == 1 and solo.head.tokens == 80


def test_a_full_disk_costs_the_office_and_no_contribution() -> None:
    solo = syncer()
    merge = found(solo.offer("p1", 1) + solo.offer("p2", 2) + solo.wait(0.5), ef.Merge)[0]
    solo.slow_disk = True
    solo.merged(merge)
    effects = solo.feed(ev.PersistFailed(solo.writing.pop().token, "disk full"))
    assert not solo.fragment.office.holding and solo.head.number == 0
    released = {e.ticket for e in found(effects, ef.Release)}
    assert released == {101, 102, 501} and found(effects, ef.DropSpare)


def test_a_failed_merge_opens_the_office() -> None:
    solo = syncer()
    merge = found(solo.offer("p1", 1) + solo.offer("p2", 2) + solo.wait(0.5), ef.Merge)[0]
    solo.feed(ev.MergeFailed(0, merge.term, merge.number, "out of memory"))
    assert not solo.fragment.office.holding and solo.fragment.round.state is RoundState.IDLE


def test_a_contribution_that_fails_a_merge_is_refused_and_the_others_are_merged() -> None:
    solo = syncer()
    merge = found(solo.offer("p1", 1) + solo.offer("p2", 2) + solo.wait(0.5), ef.Merge)[0]
    at_fault = (merge.inputs[0].ticket, Verdict.IMPLAUSIBLE_TOKENS)
    effects = solo.feed(ev.MergeFailed(0, merge.term, merge.number, "one cannot be weighed", (at_fault,)))
    refusals = [e for e in found(effects, ef.Record) if e.kind == "refusal"]
    assert [(e.reason, dict(e.fields)["peer"]) for e in refusals] == [("implausible-tokens", "p1")]
    assert [e.ticket for e in found(effects, ef.Release)] == [at_fault[0]]
    again = found(effects, ef.Merge)[0]
    assert again.inputs == merge.inputs[1:] and solo.fragment.office.holding
    kinds = [type(e) for e in effects if isinstance(e, ef.Merge | ef.DropSpare)]
    assert kinds == [ef.DropSpare, ef.Merge], "the spare is empty before the next is made in it"
    solo.merged(again)
    assert [part.learner for part in solo.fragment.chain.header.contributors] == ["p2"]


def test_where_all_are_at_fault_the_office_is_kept_and_the_same_is_not_admitted_again() -> None:
    solo = syncer()
    merge = found(solo.offer("p1", 1) + solo.offer("p2", 2) + solo.wait(0.5), ef.Merge)[0]
    unusable = tuple((part.ticket, Verdict.NON_FINITE) for part in merge.inputs)
    effects = solo.feed(ev.MergeFailed(0, merge.term, merge.number, "none is usable", unusable))
    assert not found(effects, ef.Merge) and len(reasons(effects, "refusal")) == 2
    assert solo.fragment.office.holding and solo.fragment.round.state is RoundState.IDLE
    answer = found(solo.offer("p1", 3), ef.AnswerTransfer)[0]
    assert answer.verdict is Verdict.NON_FINITE and answer.verdict.counted


def failing(solo: Solo, effects: list[ef.Effect], seconds: float) -> list[float]:
    """Let every merge fail at once, beginning with those of `effects`; when they were tried."""
    tried: list[float] = []
    end = solo.now + seconds
    while solo.now < end and len(tried) < 1000:
        for merge in found(effects, ef.Merge):
            tried.append(solo.now)
            effects = solo.feed(ev.MergeFailed(merge.fragment, merge.term, merge.number, "a bug of ours"))
        if not found(effects, ef.Merge):
            solo.now = max(solo.now, min(solo.core.next_deadline(), end))
            effects = solo.feed(ev.Tick())
    return tried


def test_a_merge_that_always_fails_is_tried_again_after_pauses_that_grow_up_to_a_bound() -> None:
    """A group of one elected itself again in the same moment, and merged as fast as its disk took votes."""
    solo = Solo(peers=(), genesis=True)
    solo.learn()
    solo.wait(1.0)
    tried = failing(solo, solo.ready(), 60.0)
    pauses = [later - earlier for earlier, later in itertools.pairwise(tried)]
    longest_s = 16 * solo.config.timing.retry_s
    assert 10 <= len(tried) <= 20 and pauses == sorted(pauses)
    assert longest_s <= pauses[-1] < longest_s + 1.0
    (merge,) = found(solo.wait(longest_s + 1.0), ef.Merge)
    solo.merged(merge)
    assert solo.head.number == 1
    tried = failing(solo, solo.ready(2), 2.0)
    assert len(tried) > 2, "after a version the pauses begin anew"


def test_a_merge_that_the_world_moved_past_is_dropped() -> None:
    solo = syncer()
    merge = found(solo.offer("p1", 1) + solo.offer("p2", 2) + solo.wait(0.5), ef.Merge)[0]
    solo.message("p1", msg.Elected(certificate("p1", ("p1", "p2"), term=9)))
    effects = solo.merged(merge)
    assert found(effects, ef.DropSpare) and ef.Release(501) in effects
    assert not found(effects, ef.Persist) and solo.head.number == 0


def test_a_quorum_counts_and_rounds_wait_for_who_has_worked() -> None:
    """Five say that they learn; one of them ever sends anything."""
    strangers = tuple(f"s{i}" for i in range(4))
    solo = syncer(quorum=3, peers=("p1", *strangers), founders=("me", "p1"), term_versions=9)
    called = []
    for number in range(1, 6):
        mark = solo.fragment.chain.marks.stamp("p1")
        effects = solo.offer("p1", number, stamp=Stamp(1, number), after=mark) + solo.wait(30.0)
        called.append(
            {send.peer for send in found(effects, ef.Send) if isinstance(send.message, msg.Closing)}
        )
        solo.merged(found(effects, ef.Merge)[0])
    assert called[:3] == [set(strangers)] * 3, "one of one is a quorum, and newcomers are called"
    assert called[3:] == [set(), set()], "three calls in vain are enough"


def test_a_newcomer_that_passes_now_and_then_is_no_learner_for_that() -> None:
    solo = syncer(quorum=3, peers=("p1", "s1"), founders=("me", "p1"), term_versions=9)
    called = []
    for number in range(1, 8):
        mark = solo.fragment.chain.marks.stamp("p1")
        effects = solo.offer("p1", number, stamp=Stamp(1, number), after=mark)
        while not found(effects, ef.Merge):
            if number == 2 and (calls := sent(effects, msg.Closing, to="s1")):
                effects += solo.message("s1", msg.Pass("all", 0, calls[0].term, calls[0].number))
            effects += solo.wait(0.05)
        called.append(bool(sent(effects, msg.Closing, to="s1")))
        solo.merged(found(effects, ef.Merge)[0])
    assert called == [True] * 4 + [False] * 3, "three of them in vain"
