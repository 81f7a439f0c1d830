"""Rounds (docs/protocol/rounds.md): quorum, grace window, closing call, late work; one test a claim."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from kit import OWNER, Solo, certificate, child, config, contribution, found, reasons, sent, word
from scenes import called, due_again, header, here, one_round, syncer

from p2pdiloco.core import chain as scale
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import NEVER, Contributor, Stamp
from p2pdiloco.core.api.versions import PartialHeader, SignedPartial
from p2pdiloco.core.base import WAITED_SHARE
from p2pdiloco.core.distrust import Cause
from p2pdiloco.core.inbox import GroupInbox
from p2pdiloco.core.round import Job, RoundState


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
    assert found(effects, ev.Merge)[0].inputs[0].contributor.learner == "p1"


def test_grace_window_is_a_share_of_the_slack() -> None:
    solo = syncer(peers=("p1", "p2", "p3"))
    solo.offer("p1", 1)
    solo.now += 0.06  # time to quorum; slack = 2 x 0.1 s - 0.06 s
    closing = [r for r in found(solo.offer("p2", 2), ev.Record) if r.kind == "closing"]
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
    assert len(found(effects, ev.Merge)[0].inputs) == 2, "closes when two are in, without p3"


def test_the_window_grows_to_what_answers_take() -> None:
    """Two inner steps of 10 ms are too short for any answer: the next round waits for it, within bounds."""
    solo = syncer(peers=("p1", "p2", "p3", "p4"), inner_steps=40)
    for peer in ("p1", "p2", "p3", "p4"):
        solo.hear(peer, step_time_s=0.01)
    solo.offer("p1", 1)
    closing = [r for r in found(solo.offer("p2", 2), ev.Record) if r.kind == "closing"]
    assert dict(closing[0].fields)["grace_s"] == pytest.approx(0.5 * 2 * 0.01)
    merge = found(solo.wait(0.05), ev.Merge)[0]
    solo.message("p4", msg.Pass("all", 0, 1, 1))
    solo.offer("p3", 3, due=False)  # the last answer: 50 ms after the call
    solo.merged(merge)
    solo.wait(0.2)  # the next round begins half an interval later at the earliest
    again = {"stamp": Stamp(1, 2), "after": Stamp(1, 1)}
    closing = [r for r in found(solo.offer("p1", 4, **again), ev.Record) if r.kind == "closing"]
    assert 0.05 < dict(closing[0].fields)["grace_s"] <= 0.5 * 40 * 0.01


def test_a_new_syncer_waits_as_long_as_it_may() -> None:
    """It knows nothing of how long answers take: three quarters of the sync interval, whatever the slack."""
    solo = Solo(config(inner_steps=40), ("p1", "p2", "p3"))
    solo.take_office()
    solo.offer("p1", 1)
    closing = [r for r in found(solo.offer("p2", 2), ev.Record) if r.kind == "closing"]
    assert dict(closing[0].fields)["grace_s"] == pytest.approx(0.75 * 40 * 0.1)


def test_first_versions_wait_for_everybody_though_nobody_has_told_how_long_steps_take() -> None:
    """Else a run's first versions are each of whoever came first."""
    solo = Solo(config(quorum=1, timing={"answer_floor_s": 5.0}), ("p1", "p2", "p3"), step_time_s=0.0)
    solo.take_office()
    assert solo.core.shared.median_step_s(solo.now) == 0.0
    assert not found(solo.offer("p1", 1) + solo.offer("p2", 2, due=False) + solo.wait(0.05), ev.Merge)
    (merge,) = found(solo.offer("p3", 3, due=False), ev.Merge)
    solo.merged(merge)
    solo.offer("p1", 4, stamp=Stamp(1, 2), after=Stamp(1, 1))
    effects = solo.offer("p2", 5, stamp=Stamp(1, 2), after=Stamp(1, 1), due=False)
    assert not found(effects + solo.wait(0.1), ev.Merge), "an answer takes as long as last time"
    assert len(found(solo.wait(0.3), ev.Merge)[0].inputs) == 2, "and not much longer"


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
    assert len(found(effects, ev.Merge)[0].inputs) == 3


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
    assert len(found(due_again(solo, "p2", 21), ev.Merge)[0].inputs) == 2


def test_who_passed_last_time_is_not_in_this_time() -> None:
    solo = syncer(quorum=1, peers=("p1", "p2"), inner_steps=40, delay_steps=20)
    solo.offer("p1", 1)
    (merge,) = found(solo.message("p2", msg.Pass("all", 0, 1, 1)), ev.Merge)
    solo.merged(merge)
    effects = due_again(solo, "p1", 20)
    assert [told.verdict for told in found(effects, ev.AnswerTransfer)] == [Verdict.HELD]
    assert not reasons(effects, "closing")


def test_who_is_kept_waiting_is_told_so() -> None:
    """It would else suspect a syncer that waits on purpose."""
    solo = syncer(quorum=1, peers=("p1", "p2"), inner_steps=40)
    one_round(solo, "p1", "p2")
    assert [told.verdict for told in found(due_again(solo, "p1", 20), ev.AnswerTransfer)] == [Verdict.HELD]
    solo = syncer(quorum=1, peers=("p1", "p2"), inner_steps=40)
    one_round(solo, "p1", "p2")
    solo.wait(0.5 * 40 * 0.1 + 0.6)
    assert [told.verdict for told in found(due_again(solo, "p1", 20), ev.AnswerTransfer)] == [
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
    assert not found(solo.wait(0.09), ev.Merge)
    assert found(solo.wait(0.02), ev.Merge)


def test_a_round_does_not_wait_for_a_learner_whose_heartbeats_stopped() -> None:
    solo = syncer(peers=("p1", "p2", "p3"), inner_steps=400, delay_steps=200)  # a window of seconds
    solo.offer("p1", 1)
    solo.offer("p2", 2)
    assert solo.fragment.words(solo.now).startswith("closing: 2 of 3")
    assert not found(solo.wait(2.0, silent=("p3",)), ev.Merge), "some heartbeats may be late"
    effects = solo.wait(solo.config.timing.suspect_s, silent=("p3",))
    assert len(found(effects, ev.Merge)) == 1


def test_a_round_waits_for_a_learner_that_is_heard() -> None:
    solo = syncer(peers=("p1", "p2", "p3"), inner_steps=400, delay_steps=200)
    solo.offer("p1", 1)
    solo.offer("p2", 2)
    assert not found(solo.wait(3.0), ev.Merge)
    assert len(found(solo.offer("p3", 3, due=False), ev.Merge)[0].inputs) == 3


def test_the_closing_call_goes_to_those_who_have_not_contributed() -> None:
    solo = syncer(peers=("p1", "p2", "p3", "p4"))
    solo.learn()
    solo.offer("p1", 1)
    # p3's payload is on its way, which is enough for a quorum of two: nobody needs to call it.
    effects = solo.feed(ev.Offered(3, "p3", contribution("p3", solo.head)))
    calls = [send.peer for send in found(effects, ev.Send) if isinstance(send.message, msg.Closing)]
    assert calls == ["p2", "p4"]
    assert found(effects, ev.RequestFragment) == [ev.RequestFragment(0)], "our own learner is asked too"
    assert reasons(effects, "closing") == ["quorum 2, 3 called"]


def test_whoever_answers_the_call_is_in_and_nobody_is_waited_for_after_that() -> None:
    solo = syncer(peers=("p1", "p2", "p3", "p4"))
    solo.offer("p1", 1)
    solo.offer("p2", 2)
    assert not found(solo.message("p4", msg.Pass("all", 0, 1, 1)), ev.Merge)
    merge = found(solo.offer("p3", 3, due=False, tokens=10, inner_steps=1), ev.Merge)[0]
    assert [part.contributor.learner for part in merge.inputs] == ["p1", "p2", "p3"]


def test_a_called_learner_sends_what_it_has_or_passes() -> None:
    solo = Solo()
    solo.learn()
    solo.elect("p1")
    call = msg.Closing("all", 0, 1, 1, 0.1)
    assert found(solo.message("p1", call), ev.RequestFragment)
    assert sent(solo.feed(ev.NothingToContribute(0)), msg.Pass, to="p1")[0].number == 1
    assert found(solo.message("p1", call), ev.RequestFragment)
    offer = found(solo.ready(due=False, steps=2), ev.Offer)[0]
    assert (offer.peer, offer.signed.header.due, offer.signed.header.tokens) == ("p1", False, 20)
    assert sent(solo.message("p2", call), msg.Pass, to="p2"), "only the syncer may call"


def test_a_late_closing_call_is_ignored() -> None:
    solo = Solo()
    solo.learn()
    solo.elect("p1")
    solo.announce(child(solo.fragment.chain.header))
    assert not found(solo.message("p1", msg.Closing("all", 0, 1, 1, 0.1)), ev.RequestFragment)


def test_late_work_is_held_for_the_next_round_and_starts_none_by_itself() -> None:
    solo = syncer(peers=("p1", "p2", "p3"), quorum=1)
    merge = found(solo.offer("p1", 1) + solo.wait(1.0), ev.Merge)[0]
    late = solo.offer("p2", 2)
    assert [a.verdict for a in found(late, ev.AnswerTransfer)] == [Verdict.HELD]
    effects = solo.merged(merge) + solo.wait(1.0)
    assert solo.head.number == 1 and not reasons(effects, "closing"), "p2 alone starts nothing"
    effects = solo.offer("p1", 3, stamp=Stamp(1, 2), after=Stamp(1, 1)) + solo.wait(0.5)
    assert [p.contributor.learner for p in found(effects, ev.Merge)[0].inputs] == ["p1", "p2"]


def test_late_work_does_not_wait_for_ever() -> None:
    solo = syncer(peers=("p1", "p2", "p3"), quorum=1)
    merge = found(solo.offer("p1", 1) + solo.wait(1.0), ev.Merge)[0]
    solo.offer("p2", 2)
    solo.merged(merge)
    assert found(solo.wait(solo.config.timing.hold_floor_s + 0.5), ev.Merge)


def test_a_slow_stream_that_misses_its_round_starts_none() -> None:
    solo = syncer(peers=("p1", "p2", "p3"), quorum=1)
    solo.feed(ev.Offered(9, "p2", contribution("p2", solo.head)))
    one_round(solo, "p1", "p3")
    effects = solo.feed(ev.PayloadReceived(9, 109))
    assert [a.verdict for a in found(effects, ev.AnswerTransfer)] == [Verdict.HELD] and not reasons(
        effects, "closing"
    )


def test_a_payload_that_another_version_merged_meanwhile_is_refused() -> None:
    solo = syncer(peers=("p1", "p2", "p3"), quorum=3)
    solo.feed(ev.Offered(9, "p2", contribution("p2", solo.head)))
    solo.announce(child(solo.fragment.chain.header, "p3", ("p2",), term=2))
    assert solo.head.number == 1 and solo.fragment.office.holding
    effects = solo.feed(ev.PayloadReceived(9, 109))
    assert [a.verdict for a in found(effects, ev.AnswerTransfer)] == [Verdict.CHAIN_MOVED]
    assert ev.Release(109) in effects


def test_contributions_are_merged_in_one_order_whatever_order_they_came_in() -> None:
    solo = syncer(peers=("p1", "p2", "p3"))
    effects = [e for i, learner in enumerate(("p3", "p1", "p2")) for e in solo.offer(learner, i)]
    assert [p.contributor.learner for p in found(effects, ev.Merge)[0].inputs] == ["p1", "p2", "p3"]


def test_a_version_is_durable_before_anybody_hears_of_it() -> None:
    solo = syncer()
    merge = found(solo.offer("p1", 1) + solo.offer("p2", 2) + solo.wait(0.5), ev.Merge)[0]
    solo.slow_disk = True
    effects = solo.merged(merge) + solo.wait(1.0)
    assert isinstance(found(effects, ev.Persist)[0].record, ev.UpdateRecord)
    assert not found(effects, ev.CommitVersion) and not sent(effects, msg.Announce)
    assert all(h.number == 0 for p in sent(effects, msg.Progress) for _, h in p.heads), "nor by heartbeat"
    effects = solo.write()
    told = sent(effects, msg.Announce, to="p1")[0]
    assert found(effects, ev.CommitVersion)[0].version.header.head() == told.head and told.syncer == "me"
    assert solo.head.number == 1 and solo.head.tokens == 80


def test_a_full_disk_costs_the_office_and_no_contribution() -> None:
    solo = syncer()
    merge = found(solo.offer("p1", 1) + solo.offer("p2", 2) + solo.wait(0.5), ev.Merge)[0]
    solo.slow_disk = True
    solo.merged(merge)
    effects = solo.answer(solo.writing.pop(), ev.Undone("disk full"))
    assert not solo.fragment.office.holding and solo.head.number == 0
    released = {e.ticket for e in found(effects, ev.Release)}
    assert released == {101, 102, 501} and found(effects, ev.DropSpare)


def test_a_failed_merge_opens_the_office() -> None:
    solo = syncer()
    merge = found(solo.offer("p1", 1) + solo.offer("p2", 2) + solo.wait(0.5), ev.Merge)[0]
    solo.answer(merge, ev.Undone("out of memory"))
    assert not solo.fragment.office.holding and solo.fragment.round.state is RoundState.IDLE


def test_a_contribution_that_fails_a_merge_is_refused_and_the_others_are_merged() -> None:
    solo = syncer()
    merge = found(solo.offer("p1", 1) + solo.offer("p2", 2) + solo.wait(0.5), ev.Merge)[0]
    at_fault = (merge.inputs[0].ticket, Verdict.IMPLAUSIBLE_TOKENS)
    effects = solo.answer(merge, ev.Undone("one cannot be weighed", (at_fault,)))
    refusals = [e for e in found(effects, ev.Record) if e.kind == "refusal"]
    assert [(e.reason, dict(e.fields)["peer"]) for e in refusals] == [("implausible-tokens", "p1")]
    assert [e.ticket for e in found(effects, ev.Release)] == [at_fault[0]]
    again = found(effects, ev.Merge)[0]
    assert again.inputs == merge.inputs[1:] and solo.fragment.office.holding
    kinds = [type(e) for e in effects if isinstance(e, ev.Merge | ev.DropSpare)]
    assert kinds == [ev.DropSpare, ev.Merge], "the spare is empty before the next is made in it"
    solo.merged(again)
    assert [part.learner for part in solo.fragment.chain.header.contributors] == ["p2"]


def test_a_merge_whose_only_seat_drops_out_is_not_made_and_the_strangers_work_waits() -> None:
    """Of the syncer's version all others would say that it is seatless, and it would stand on it alone."""
    solo = syncer()
    solo.hear("s1")
    merge = found(solo.offer("p1", 1) + solo.offer("s1", 2) + solo.wait(0.5), ev.Merge)[0]
    at_fault = (merge.inputs[0].ticket, Verdict.NON_FINITE)
    effects = solo.answer(merge, ev.Undone("one is not finite", (at_fault,)))
    assert not found(effects + solo.wait(60.0), ev.Merge) and solo.head.number == 0
    effects = solo.offer("p2", 3) + solo.wait(0.5)
    assert [part.contributor.learner for part in found(effects, ev.Merge)[0].inputs] == ["p2", "s1"]


def test_where_all_are_at_fault_the_office_is_kept_and_the_same_is_not_admitted_again() -> None:
    solo = syncer()
    merge = found(solo.offer("p1", 1) + solo.offer("p2", 2) + solo.wait(0.5), ev.Merge)[0]
    unusable = tuple((part.ticket, Verdict.NON_FINITE) for part in merge.inputs)
    effects = solo.answer(merge, ev.Undone("none is usable", unusable))
    assert not found(effects, ev.Merge) and len(reasons(effects, "refusal")) == 2
    assert solo.fragment.office.holding and solo.fragment.round.state is RoundState.IDLE
    answer = found(solo.offer("p1", 3), ev.AnswerTransfer)[0]
    assert answer.verdict is Verdict.NON_FINITE and answer.verdict.counted


def failing(solo: Solo, effects: list[ev.Effect], seconds: float) -> list[float]:
    """Let every merge fail at once, beginning with those of `effects`; when they were tried."""
    tried: list[float] = []
    end = solo.now + seconds
    while solo.now < end and len(tried) < 1000:
        for merge in found(effects, ev.Merge):
            tried.append(solo.now)
            effects = solo.answer(merge, ev.Undone("a bug of ours"))
        if not found(effects, ev.Merge):
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
    (merge,) = found(solo.wait(longest_s + 1.0), ev.Merge)
    solo.merged(merge)
    assert solo.head.number == 1
    tried = failing(solo, solo.ready(2), 2.0)
    assert len(tried) > 2, "after a version the pauses begin anew"


def test_a_merge_that_the_world_moved_past_is_dropped() -> None:
    solo = syncer()
    merge = found(solo.offer("p1", 1) + solo.offer("p2", 2) + solo.wait(0.5), ev.Merge)[0]
    solo.message("p1", msg.Elected(certificate("p1", ("p1", "p2"), term=9)))
    effects = solo.merged(merge)
    assert found(effects, ev.DropSpare) and ev.Release(501) in effects
    assert not found(effects, ev.Persist) and solo.head.number == 0


def test_a_quorum_counts_and_rounds_wait_for_who_has_worked() -> None:
    """Five seats say that they learn; one of them ever sends anything."""
    idle = tuple(f"s{i}" for i in range(4))
    solo = syncer(quorum=3, peers=("p1", *idle), founders=("me", "p1"), idle=idle, term_versions=9)
    called = []
    for number in range(1, 6):
        mark = solo.fragment.chain.marks.stamp("p1")
        effects = solo.offer("p1", number, stamp=Stamp(1, number), after=mark) + solo.wait(30.0)
        called.append(
            {send.peer for send in found(effects, ev.Send) if isinstance(send.message, msg.Closing)}
        )
        solo.merged(found(effects, ev.Merge)[0])
    assert called[:3] == [set(idle)] * 3, "one of one is a quorum, and newcomers are called"
    assert called[3:] == [set(), set()], "three calls in vain are enough"


def test_strangers_who_say_that_they_learn_are_called_and_delay_no_round() -> None:
    """Of slow ones nothing would come uncalled; and identities are free."""
    solo = syncer(peers=("p1", "s1", "s2"), founders=("me", "p1"), term_versions=9)
    called = []
    for number in range(1, 6):
        after = solo.fragment.chain.marks.stamp("p1")
        effects = header(solo, "s2", 80 + number) if number == 1 else []
        effects += solo.offer("p1", number, stamp=Stamp(1, number), after=after) + solo.wait(0.1)
        called.append(
            [send.peer for send in found(effects, ev.Send) if isinstance(send.message, msg.Closing)]
        )
        (merge,) = found(effects, ev.Merge)
        assert [given.contributor.learner for given in merge.inputs] == ["p1"], "at once"
        solo.merged(merge)
        solo.wait(5.0)
    assert called == [["s1"]] * 3 + [[], []], "three times; what is on its way is not"
    solo.feed(ev.PayloadReceived(81, 900))
    effects = solo.offer("p1", 9, stamp=Stamp(1, 6), after=Stamp(1, 5)) + solo.wait(0.1)
    assert [given.contributor.learner for given in found(effects, ev.Merge)[0].inputs] == ["p1", "s2"]


def test_a_newcomer_that_passes_now_and_then_is_no_learner_for_that() -> None:
    solo = syncer(quorum=3, peers=("p1", "s1"), founders=("me", "p1"), idle=("s1",), term_versions=9)
    called = []
    for number in range(1, 8):
        mark = solo.fragment.chain.marks.stamp("p1")
        effects = solo.offer("p1", number, stamp=Stamp(1, number), after=mark)
        while not found(effects, ev.Merge):
            if number == 2 and (calls := sent(effects, msg.Closing, to="s1")):
                effects += solo.message("s1", msg.Pass("all", 0, calls[0].term, calls[0].number))
            effects += solo.wait(0.05)
        called.append(bool(sent(effects, msg.Closing, to="s1")))
        solo.merged(found(effects, ev.Merge)[0])
    assert called == [True] * 4 + [False] * 3, "three of them in vain"


# What a syncer takes in, and what it refuses on sight.


def test_an_old_base_starts_no_round_but_is_merged() -> None:
    solo = syncer(peers=("p1", "p2", "p3"), quorum=1)
    old = solo.head
    one_round(solo, "p1")
    signed = contribution("p2", old)
    solo.feed(ev.Offered(9, "p2", signed))
    assert not reasons(solo.feed(ev.PayloadReceived(9, 109)), "closing")
    effects = solo.offer("p3", 10) + solo.wait(0.5)
    assert [p.contributor.learner for p in found(effects, ev.Merge)[0].inputs] == ["p2", "p3"]


@pytest.mark.parametrize(
    ("reason", "odd"),
    [
        ("bad-signature", {"tokens": 30}),
        ("wrong-codec", {"codec": "fp8"}),
        ("wrong-size", {"payload_bytes": 1001}),
        ("wrong-size", {"payload_bytes": 0}),
        ("implausible-tokens", {"tokens": 41}),
        ("implausible-tokens", {"tokens": 0}),
        ("implausible-tokens", {"tokens": 1 << 60, "inner_steps": 1 << 58}),
        ("implausible-tokens", {"inner_steps": 1 << 40}),
        ("implausible-tokens", {"inner_steps": 1, "tokens": 1 << 32, "tokens_per_step": 1 << 32}),
        ("implausible-tokens", {"inner_steps": 1 << 32, "tokens": 1 << 48, "tokens_per_step": 1 << 16}),
        ("other-run", {"run": "other"}),
        ("unknown-fragment", {"fragment": 7}),
        ("unknown-fragment", {"group": "half"}),
        ("behind", {"base_number": 1}),
        ("unknown-base", {"base_digest": bytes(32)}),
        ("behind", {"after": Stamp(1, 1), "stamp": Stamp(1, 2)}),
        ("already-merged", {"stamp": NEVER}),
    ],
)
def test_what_is_refused_on_sight_of_the_header(reason: str, odd: dict[str, Any]) -> None:
    odd = dict(odd)
    run = {"tokens_per_step": odd.pop("tokens_per_step")} if "tokens_per_step" in odd else {}
    solo = syncer(**run)
    signed = contribution("p1", solo.head, **odd)
    if reason == "bad-signature":
        signed = type(signed)(signed.header, contribution("p1", solo.head).signature)
    effects = solo.feed(ev.Offered(1, "p1", signed))
    refusal = found(effects, ev.AnswerTransfer)[0]
    assert refusal.verdict.value == reason and not found(effects, ev.AcceptTransfer)
    fault = reason not in ("behind", "unknown-base", "already-merged")
    assert refusal.verdict.counted == fault and (reasons(effects, "refusal") == [reason]) == fault


def test_nobody_contributes_in_anothers_name() -> None:
    solo = syncer()
    effects = solo.feed(ev.Offered(1, "p1", contribution("p2", solo.head)))
    assert [r.verdict for r in found(effects, ev.AnswerTransfer)] == [Verdict.FALSE_LEARNER]


def test_a_contribution_is_admitted_once() -> None:
    solo = syncer()
    first = contribution("p1", solo.head)
    assert found(solo.feed(ev.Offered(1, "p1", first)), ev.AcceptTransfer)
    again = found(solo.feed(ev.Offered(2, "p1", first)), ev.AnswerTransfer)[0]
    assert again.verdict is Verdict.IN_TRANSFER
    solo.feed(ev.PayloadReceived(1, 101))
    again = found(solo.feed(ev.Offered(3, "p1", first)), ev.AnswerTransfer)[0]
    assert again.verdict is Verdict.ALREADY_HELD
    solo.merged(found(solo.offer("p2", 4), ev.Merge)[0])
    again = found(solo.feed(ev.Offered(5, "p1", first)), ev.AnswerTransfer)[0]
    assert again.verdict is Verdict.ALREADY_MERGED


def test_a_base_too_old_is_refused_and_the_learner_labels_it_anew() -> None:
    solo = syncer(quorum=1, max_base_age_versions=0)
    old = solo.head
    one_round(solo, "p1", "p2", number=1)
    assert solo.head.number == 1
    stamp, after = Stamp(1, 2), solo.fragment.chain.marks.stamp("p1")
    signed = contribution("p1", old, stamp, after=after)
    refusal = found(solo.feed(ev.Offered(90, "p1", signed)), ev.AnswerTransfer)[0]
    assert refusal.verdict is Verdict.STALE_BASE


def test_the_learners_side_of_a_refused_base() -> None:
    solo = Solo()
    solo.learn()
    solo.elect("p1")
    offer = found(solo.ready(), ev.Offer)[0]
    signed = offer.signed
    solo.announce(child(solo.fragment.chain.header))
    assert solo.head.number == 1 and signed.header.base_number == 0
    solo.answer(offer, ev.OfferAnswered(Verdict.STALE_BASE, solo.head))
    again = found(solo.wait(1.0), ev.Offer)[0].signed
    assert (again.header.base_number, again.header.base_digest) == (1, solo.head.digest)
    assert (again.header.stamp, again.header.payload_digest) == (
        signed.header.stamp,
        signed.header.payload_digest,
    )


@pytest.mark.parametrize("order", [("p1", "p2", "p3"), ("p3", "p2", "p1"), ("p2", "p3", "p1")])
def test_contributions_are_merged_in_the_order_of_the_header(order: tuple[str, ...]) -> None:
    """Sums depend on it, and whoever audits the version knows no other order."""
    solo = syncer(peers=("p1", "p2", "p3"))
    effects = [effect for n, peer in enumerate(order, 1) for effect in solo.offer(peer, n)]
    merge = found([*effects, *solo.ready(ticket=7)], ev.Merge)[0]
    version = found(solo.merged(merge), ev.Persist)[0].record
    assert isinstance(version, ev.UpdateRecord)
    named = [part.learner for part in version.version.header.contributors]
    assert [given.contributor.learner for given in merge.inputs] == named == sorted(named)


# A round begins on sight of headers: what that gains, and what headers alone cannot do.

LONG = {"inner_steps": 400, "delay_steps": 200}
"""A window of seconds."""


def cut(solo: Solo, transfer: int) -> list[ev.Effect]:
    """Its payload will not come."""
    return solo.feed(ev.PayloadBroken(transfer, Verdict.CUT))


def test_others_are_called_while_the_first_payload_is_on_its_way() -> None:
    """On thin links the round would else take two transfers, one after the other."""
    solo = syncer(quorum=1, peers=("p1", "p2", "p3"), inner_steps=400, delay_steps=200)
    late = contribution("p1", solo.head, due=False)
    assert not sent(solo.feed(ev.Offered(1, "p1", late)), msg.Closing), "nothing to start with"
    effects = solo.feed(ev.Offered(2, "p2", contribution("p2", solo.head)))
    assert [send.peer for send in found(effects, ev.Send) if isinstance(send.message, msg.Closing)] == ["p3"]
    assert solo.fragment.words(solo.now).startswith("closing: 0 of 3")
    assert not found(solo.offer("p3", 3, due=False), ev.Merge)
    assert not found(solo.feed(ev.PayloadReceived(1, 101)), ev.Merge)
    assert len(found(solo.feed(ev.PayloadReceived(2, 102)), ev.Merge)[0].inputs) == 3


def test_a_round_outlives_the_payload_that_it_was_begun_for() -> None:
    solo = syncer(quorum=1, peers=("p1", "p2"))
    solo.feed(ev.Offered(1, "p1", contribution("p1", solo.head)))
    solo.feed(ev.PayloadBroken(1, Verdict.CUT))
    assert solo.fragment.words(solo.now).startswith("closing: 0 of 2")
    solo.offer("p2", 2, due=False)
    merge = found(solo.wait(1.0), ev.Merge)[0]
    assert [part.contributor.learner for part in merge.inputs] == ["p2"]
    solo.merged(merge)
    # And where nothing comes at all, the next header begins another one.
    mark = solo.fragment.chain.marks.stamp("p1")
    first = contribution("p1", solo.head, stamp=Stamp(1, 1), after=mark)
    solo.feed(ev.Offered(3, "p1", first))
    solo.feed(ev.PayloadBroken(3, Verdict.CUT))
    solo.message("p2", msg.Pass("all", 0, 1, 2))
    assert not found(solo.wait(60.0), ev.Merge)
    assert solo.fragment.words(solo.now) == ""
    assert len(found(solo.offer("p1", 4, stamp=Stamp(1, 1), after=mark) + solo.wait(1.0), ev.Merge)) == 1


def test_the_quorum_is_what_is_in_when_the_round_closes() -> None:
    solo = syncer(quorum=3, peers=("p1", "p2", "p3", "p4"))
    for number, learner in enumerate(("p1", "p2", "p3"), 1):
        effects = header(solo, learner, number)
    assert called(effects) == ["p4"]
    here(solo, 1)
    cut(solo, 2)
    cut(solo, 3)
    assert not found(solo.wait(60.0), ev.Merge), "one of three is no quorum"
    assert solo.fragment.words(solo.now) == "waiting: 1 of 3 contributions"
    solo.offer("p2", 4)
    assert len(found(solo.offer("p4", 5) + solo.wait(1.0), ev.Merge)[0].inputs) == 3


def test_a_header_that_is_too_late_for_a_version_begins_no_round_after_it() -> None:
    solo = syncer(quorum=2, peers=("p1", "p2", "p3"), **LONG)
    header(solo, "p1", 1)
    header(solo, "p2", 2)
    here(solo, 2)
    solo.merged(found(solo.offer("p3", 3, due=False) + solo.wait(60.0), ev.Merge)[0])
    assert solo.head.number == 1
    mark = solo.fragment.chain.marks.stamp("p2")
    assert not called(solo.offer("p2", 4, stamp=Stamp(1, 2), after=mark)), "p1's is of the version before"


def test_the_one_whose_header_began_the_round_is_waited_for_also_when_it_is_not_heard() -> None:
    """Its upload may keep its own heartbeats back."""
    solo = syncer(quorum=1, peers=("p1", "p2", "p3"), **LONG)
    solo.wait(30.0, silent=("p1",))
    assert not solo.core.shared.view.alive("p1", solo.now)
    assert called(header(solo, "p1", 1)) == ["p2", "p3"]
    solo.offer("p2", 2, due=False)
    assert not found(solo.offer("p3", 3, due=False), ev.Merge)
    assert len(found(here(solo, 1), ev.Merge)[0].inputs) == 3


def test_time_to_quorum_begins_with_what_counts_for_it() -> None:
    solo = syncer(quorum=2, peers=("p1", "p2", "p3"))
    header(solo, "p1", 1)
    cut(solo, 1)
    assert solo.fragment.words(solo.now) == ""
    solo.now += 100.0
    for peer in ("p1", "p2", "p3"):
        solo.hear(peer)
    solo.offer("p2", 2)
    solo.now += 0.06
    closing = [r for r in found(header(solo, "p3", 3), ev.Record) if r.kind == "closing"]
    assert reasons(closing, "closing") == ["quorum 2, 1 called"]
    assert dict(closing[0].fields)["grace_s"] > 0, "the slack is 2 x 0.1 s - 0.06 s"


def test_what_arrives_while_the_round_closes_is_in_it() -> None:
    solo = syncer(quorum=1, peers=("p1", "p2", "p3"), **LONG)
    header(solo, "p1", 1)
    header(solo, "p2", 2)
    assert [a.verdict for a in found(here(solo, 2), ev.AnswerTransfer)] == [Verdict.IN_ROUND]
    assert [a.verdict for a in found(here(solo, 1), ev.AnswerTransfer)] == [Verdict.IN_ROUND]
    late = solo.merged(found(solo.offer("p3", 3, due=False), ev.Merge)[0])
    assert not sent(late, msg.Closing)


def test_a_round_that_began_with_what_is_due_is_due_although_that_did_not_come(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solo = syncer(quorum=1, peers=("p1", "p2"), **LONG)
    jobs: list[Job] = []
    monkeypatch.setattr(solo.fragment.round._merger, "begin", lambda job, *_: jobs.append(job))
    header(solo, "p1", 1)
    cut(solo, 1)
    solo.offer("p2", 2, due=False)
    solo.message("p1", msg.Pass("all", 0, 1, 1))
    assert [(job.due, len(job.held)) for job in jobs] == [(True, 1)]


def test_a_header_from_before_a_version_that_is_not_ours_begins_nothing() -> None:
    solo = syncer(quorum=2, peers=("p1", "p2", "p3"), **LONG)
    header(solo, "p1", 1)
    parts = (Contributor("p3", Stamp(1, 1), 40, 4, votes=True),)
    chain, run = solo.fragment.chain, solo.core.shared.config
    usual = {"unit": scale.scale_after(chain, parts, run).unit, "limits": scale.limits_after(chain, run)}
    solo.announce(child(chain.header, "p3", ("p3",), term=2, **usual))
    assert solo.head.number == 1 and solo.fragment.office.holding
    assert not called(solo.offer("p2", 2)), "one is in for the new version"


def test_groups_above_the_leaves_begin_with_payloads_only() -> None:
    solo = Solo(config(), ("p1", "p2"))
    inbox = GroupInbox(solo.fragment.context, solo.fragment.round._electorate)
    signed = contribution("p1", solo.head)
    done = signed.header
    header = PartialHeader(
        run=done.run,
        group="leaf",
        fragment=0,
        syncer="p1",
        number=solo.head.number,
        digest=solo.head.digest,
        parts=(signed.contributor(),),
        due=True,
        payload_digest=done.payload_digest,
        payload_bytes=100,
    )
    held = inbox.add(SignedPartial(header, b""), 1, in_time=True, now=solo.now)
    assert held.starts_round and not inbox.starting()


# Who says that it learns and answers no call: three rounds wait for it, and nobody loses patience for it.

PEERS = ("p1", "p2", "p3", "p4")


def test_a_learner_that_answers_no_call_is_waited_for_three_times_and_called_for_ever() -> None:
    """Else one member makes every round as long as may be, or a slow one is due never again."""
    solo = syncer(quorum=1, founders=("me", "p1", "p2"), term_versions=30)
    called, waited_s = [], []
    for number in range(1, 11):
        effects, begun_s = list[ev.Effect](), solo.now
        for place, learner in enumerate(("p2", "p1") if number == 6 else ("p1",)):
            mark = solo.fragment.chain.marks.stamp(learner)
            effects += solo.offer(learner, 2 * number + place, stamp=Stamp(1, number), after=mark)
        while not found(effects, ev.Merge):
            effects += solo.wait(0.1)
        called.append(bool(sent(effects, msg.Closing, to="p2")))
        waited_s.append(round(solo.now - begun_s, 1))
        solo.merged(found(effects, ev.Merge)[0])
    assert called == [True] * 5 + [False] + [True] * 4
    waited = [waits_s > 0.0 for waits_s in waited_s]
    assert waited[:5] == [True] * Cause.ABSENT.value[0] + [False] * 2
    assert waited[6:] == [True] * Cause.ABSENT.value[0] + [False], "it came once again"


def test_a_learner_is_patient_for_as_long_as_a_round_may_be_open() -> None:
    """Else all lose patience with every syncer, one after the other, and no version is made any more."""
    solo = Solo(config(quorum=1), PEERS)
    step_s, steps = 1.0, solo.config.inner_steps
    solo.learn(step_s)
    for peer in PEERS:
        solo.says[peer] = {"step_time_s": step_s}
    solo.wait(1.0)
    solo.elect("p1")
    solo.answer(found(solo.ready(), ev.Offer)[0], ev.OfferAnswered(Verdict.IN_ROUND, None))
    patient_s = max(solo.config.timing.answer_floor_s, 4 * solo.config.delay_steps * step_s)
    open_s = min(solo.config.grace_cap_s, WAITED_SHARE * steps * step_s)
    assert open_s > 1.0
    assert not sent(solo.wait(patient_s + open_s - 0.5), msg.VoteRequest)
    assert sent(solo.wait(10.0), msg.VoteRequest)


# Inputs of a merge that were damaged here since they came.


def test_what_was_damaged_here_is_left_out_and_welcome_again_and_nobody_is_to_blame() -> None:
    solo = syncer()
    merge = found(solo.offer("p1", 1) + solo.offer("p2", 2) + solo.wait(0.5), ev.Merge)[0]
    damaged = merge.inputs[0].ticket, Verdict.DAMAGED
    effects = solo.answer(merge, ev.Undone("damaged", (damaged,)))
    (again,) = found(effects, ev.Merge)
    assert again.inputs == merge.inputs[1:] and not reasons(effects, "refusal")
    assert found(solo.offer(merge.inputs[0].contributor.learner, 3), ev.AcceptTransfer)


# Work that is too long to count in full: its own node says it first, then whoever cuts it.


def test_whose_work_was_too_long_is_said_by_the_syncer() -> None:
    solo = syncer()
    effects = solo.offer("p1", 1) + solo.offer("p2", 2)
    said = [
        r for r in found(solo.merged(found(effects, ev.Merge)[0], ("p2", "me")), ev.Record) if r.kind == "cut"
    ]
    assert [dict(record.fields) for record in said] == [{"peer": "p2"}]  # of ourselves it is said before


def test_our_own_work_that_is_too_long_is_said_at_once_and_then_ever_more_rarely(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    solo, longest = syncer(), 2.0
    assert not reasons(solo.ready(1, length=1e4), "cut")  # nobody knows what is usual yet
    monkeypatch.setattr("p2pdiloco.core.fragment.strange_after", lambda _: longest)
    assert not reasons(solo.ready(1, length=longest), "cut")
    times = [bool(reasons(solo.ready(ticket, length=1e4 * longest), "cut")) for ticket in range(2, 10)]
    assert [number for number, said in enumerate(times, 1) if said] == [1, 2, 4, 8]
    assert not reasons(solo.ready(10, length=0.1 * longest), "cut")
    (words,) = reasons(solo.ready(11, length=1e4 * longest), "cut")
    assert "1e+04 times as long" in words and "diverged" in words


def test_a_syncer_without_a_seats_work_begins_a_new_term_for_those_that_are_to_be_seated() -> None:
    """Only a term's first version carries papers: without it, this one would last for ever."""
    solo = syncer(quorum=1, peers=("p1",), founders=("me",), owner=OWNER)
    solo.learn()
    solo.merged(found(solo.ready(1) + solo.wait(9.0), ev.Merge)[0])
    term = solo.fragment.office.term
    assert solo.head.term == term and not found(solo.offer("p1", 1) + solo.wait(9.0), ev.Merge)
    effects = solo.feed(ev.Guided(papers=(word("p1"),))) + solo.wait(1.0)
    assert reasons(effects, "office")[0].startswith("laid down: those who are to have a seat")
    solo.take_office()
    assert found(solo.offer("p1", 2) + solo.wait(9.0), ev.Merge) and solo.fragment.office.term > term
