"""Membership: its degrees, incarnations, and what members say that counts (docs/protocol/membership.md)."""

from __future__ import annotations

import math

import pytest
from kit import Solo, branch, config, progress, reasons, sent

from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.config import Timing
from p2pdiloco.core.members import MAX_KNOWN, NEWCOMERS_A_BEAT, View
from p2pdiloco.core.membership import UNPROVEN_OFFICES


def heartbeat(incarnation: int = 1) -> msg.Progress:
    return progress((), incarnation=incarnation)


def test_alive_member_known() -> None:
    timing = Timing()
    view = View("me", timing)
    view.heard("p1", heartbeat(), 0.0)
    view.listed("me", 1, 0.0)

    def degrees(now: float) -> tuple[bool, bool, bool]:
        return view.alive("p1", now), "p1" in view.members(now), "p1" in view.to_greet(now)

    assert degrees(0.0) == (True, True, True)
    assert degrees(timing.suspect_s + 0.1) == (False, True, False), "just greeted: tried again later"
    assert degrees(timing.member_ttl_s - 0.1) == (False, True, True)
    assert degrees(timing.member_ttl_s + 0.1) == (False, False, False)
    view.listed("p1", 1, timing.member_ttl_s)
    assert degrees(timing.member_ttl_s + timing.redial_s) == (False, False, True), "the DHT still lists it"
    view.forget_stale(1000.0)
    assert view.progress("p1") is None


def test_failed_sends_count_as_silence_until_something_is_heard() -> None:
    view = View("me", Timing())
    view.heard("p1", heartbeat(), 0.0)
    assert not view.failed("p1") and view.alive("p1", 0.1)
    assert view.failed("p1") and not view.alive("p1", 0.1) and view.members(0.1) == ["p1"]
    view.heard_message("p1", 0.2)
    assert view.alive("p1", 0.2)
    assert not view.failed("stranger")


def test_incarnations_tell_a_restart_from_an_echo() -> None:
    view = View("me", Timing())
    assert view.heard("p1", heartbeat(5), 0.0)
    assert not view.heard("p1", heartbeat(4), 0.1), "from before its restart"
    view.said_goodbye("p1", 4, 0.15)
    assert view.alive("p1", 0.2), "a good-bye of an earlier life"
    view.said_goodbye("p1", 5, 0.2)
    assert view.has_left("p1") and view.members(0.3) == []
    assert not view.heard("p1", heartbeat(5), 0.4), "overtaken by its own good-bye"
    view.heard_message("p1", 0.4)
    view.listed("p1", 5, 0.4)
    assert view.has_left("p1") and view.to_greet(10.0) == []
    assert view.heard("p1", heartbeat(6), 0.5) and not view.has_left("p1")


@pytest.mark.parametrize("lie", [math.inf, 1e300, math.nan, -1.0, 0.0])
def test_an_absurd_step_time_counts_in_no_average(lie: float) -> None:
    solo = Solo(peers=("p1",))
    solo.learn(step_s=0.2)
    solo.hear("p1", step_time_s=lie)
    assert solo.core.shared.median_step_s(solo.now) == pytest.approx(0.2)
    assert solo.core.shared.fastest_step_s(solo.now) == pytest.approx(0.2)


def test_that_our_learner_has_begun_and_how_fast_it_is_are_told_at_once() -> None:
    """A heartbeat later the others' learners have made steps at the learning rate of a swarm without us."""
    solo = Solo(peers=("p1", "p2"))
    for step_s in (0.0, 0.2):
        status = ev.LearnerStatus(True, 1, 10, 0.0, step_s, 3.0)
        told = sent(solo.feed(status), msg.Progress)
        assert [(said.learning, said.step_time_s) for said in told] == [(True, step_s)] * 2
        assert not sent(solo.feed(status), msg.Progress), "the rest is told in time"
    solo.feed(ev.LearnerStatus(False, 1, 10, 0.0, 0.2, 3.0))
    assert solo.core.shared.training(solo.now) == 3, "it is about to say so"
    assert len(sent(solo.feed(status), msg.Progress)) == 2, "it has begun again"
    assert solo.core.shared.training(solo.now) == 3


def test_our_own_name_and_wrong_head_counts_are_refused() -> None:
    solo = Solo()
    assert reasons(solo.message("me", progress(solo.heads())), "refusal") == ["our-own-name"]
    assert solo.core.shared.voters(solo.now) == ["me", "p1", "p2"]
    assert reasons(solo.hear("p3", heads=solo.heads() * 2), "refusal") == ["wrong-heads"]
    assert "p3" not in solo.core.shared.voters(solo.now)


def test_what_waits_for_others_costs_no_ticks() -> None:
    solo = Solo(config(quorum=3), peers=("p1", "p2"))
    solo.take_office()
    solo.learn()
    solo.offer("p1", 1)  # one of three: the round waits, and its hold time passes
    ticks = 0
    end = solo.now + 10.0
    for peer in solo.peers:
        solo.hear(peer)
    while solo.now < end:
        solo.now = max(solo.now, solo.core.next_deadline())
        solo.feed(ev.Tick())
        ticks += 1
    assert ticks < 2.5 * 10.0 / solo.config.timing.heartbeat_s


def test_who_was_heard_long_ago_is_waited_for_like_who_never_was() -> None:
    timing = Timing()
    view = View("me", timing)
    assert view.may_come("p", 0.0), "listed at most"
    heads = ()
    view.heard("p", progress(heads, confirmed=False), 0.0)
    assert not view.may_come("p", 0.1), "known as a newcomer"
    assert view.may_come("p", 60.0), "it may be a member by now"
    view.heard("p", progress(heads), 60.0)
    assert not view.may_come("p", 61.0), "it counts as a member"
    assert view.may_come("p", 60.0 + timing.member_ttl_s), "it does not any more, though it may be here"
    view.said_goodbye("p", 1, 80.0)
    assert not view.may_come("p", 200.0)


def test_of_names_that_were_never_heard_a_few_are_tried_at_a_time() -> None:
    """Every one costs a dial: an attacker lists thousands. All get their turn."""
    timing = Timing()
    view = View("me", timing, lambda peer: peer == "p1")
    names = [f"g{i:02}" for i in range(9)]
    for peer in ("p1", *names):
        view.listed(peer, 1, 0.0)
    tried: list[str] = []
    now = 1.0
    for _ in range(9):
        greeted = view.to_greet(now)
        assert len([peer for peer in greeted if peer != "p1"]) == 1
        tried += greeted
        now += timing.heartbeat_s
    assert "p1" in tried and set(names) <= set(tried)


def crowded() -> View:
    """So many strangers as there is room for, the first of them silent for longest; p1 and p2 have worked."""
    view = View("me", Timing(), lambda peer: peer in ("p1", "p2"))
    for number in range(MAX_KNOWN - 1):
        view.heard(f"s{number:05}", progress(()), number / MAX_KNOWN)
    view.heard("p1", progress(()), 0.0)
    return view


def test_a_crowd_shuts_out_nobody_who_has_worked() -> None:
    view = crowded()
    assert not view.heard("s9999", progress(()), 1.0), "there is no more room"
    assert view.heard("p2", progress(()), 1.0) and view.progress("p2") is not None
    assert view.progress("s00000") is None and view.progress("p1") is not None, "the longest silent gives way"
    assert view.forget_stale(1.0) == ["s00000"] and not view.forget_stale(1.0)


def test_who_has_worked_gives_way_to_nobody() -> None:
    view = View("me", Timing(), lambda peer: True)
    for number in range(MAX_KNOWN):
        view.heard(f"p{number:05}", progress(()), 0.0)
    assert not view.heard("another", progress(()), 1.0)


def test_a_crowd_gets_our_heartbeats_in_turns() -> None:
    view, told, now = crowded(), set[str](), 1.0
    for _ in range(MAX_KNOWN // NEWCOMERS_A_BEAT + 1):
        view.heard("p1", progress(()), now)
        greeted = view.to_greet(now)
        assert "p1" in greeted and len(greeted) <= NEWCOMERS_A_BEAT + 1
        told |= {*greeted}
        now += Timing().heartbeat_s
    assert len(told) == MAX_KNOWN


def test_of_a_strangers_offices_a_few_are_kept_and_none_that_there_cannot_be() -> None:
    solo = Solo(peers=("p1", "p2"))
    for version in branch(2, learners=("me", "p1", "p2"))[1:]:
        solo.announce(version)
    many = tuple((f"1/0/{number}", 0, 9) for number in range(2000))
    false = (("x" * 60, 0, 9), ("1/0/0", 7, 9))
    for peer in ("s1", "p1"):
        solo.hear(peer, offices=(*false, *many))
    kept = {peer: solo.core.shared.view.progress(peer) for peer in ("s1", "p1")}
    assert kept["s1"] is not None and kept["s1"].offices == many[: UNPROVEN_OFFICES - len(false)]
    assert kept["p1"] is not None and kept["p1"].offices == many
    claims = solo.core.shared.claims
    assert not claims.of(0, "x" * 60) and not claims.of(0, "1/0/1000").keys() & {"s1"}
