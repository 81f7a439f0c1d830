"""Leaving: what a member still does for what was trained, one claim each (docs/protocol/rounds.md, section
7)."""

from __future__ import annotations

from kit import Solo, child, config, found, genesis, reasons, sent
from scenes import due_again, one_round, syncer

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.types import Head

STANDS_NOT = {"stands": False}


def test_what_came_after_a_contribution_under_way_is_asked_for_once() -> None:
    solo = Solo()
    solo.learn()
    solo.elect("p1")
    first = found(solo.ready(), ef.Offer)[0].signed.header
    assert not found(solo.feed(ev.LeaveRequested()), ef.RequestFragment), "one at a time"
    one = child(genesis(0).header, learners=("me",))
    assert len(found(solo.announce(one), ef.RequestFragment)) == 1
    second = found(solo.ready(2, due=False, steps=2), ef.Offer)[0].signed.header
    assert second.after == first.stamp and second.inner_steps == 2 and second.due
    assert not found(solo.wait(0.5), ef.Left)
    effects = solo.announce(child(one.header, learners=("me",)), 901)
    assert not found(effects, ef.RequestFragment), "a learner that goes on training does not keep us"
    assert found(effects + solo.wait(0.6), ef.Left)


def test_that_we_leave_is_told_at_once() -> None:
    solo = Solo()
    told = sent(solo.feed(ev.LeaveRequested()), msg.Progress)
    assert len(told) == 2 and not any(progress.stands for progress in told)


def test_the_last_round_waits_for_answers() -> None:
    """Who is called may be leaving too: its answer would be nobody's."""
    solo = syncer(quorum=1, peers=("p1", "p2", "p3"))
    solo.offer("p1", 1)
    effects = solo.feed(ev.LeaveRequested()) + solo.wait(1.0)
    assert not found(effects, ef.Merge)
    solo.offer("p2", 2)
    assert len(found(solo.wait(0.6), ef.Merge)[0].inputs) == 2, "but no longer than half of our time"


def test_what_came_too_late_for_a_round_begins_the_next_one() -> None:
    solo = syncer(quorum=1, peers=("p1", "p2"))
    effects = solo.offer("p1", 1) + solo.wait(1.0)
    assert due_again(solo, "p2", 2)
    effects = solo.merged(found(effects, ef.Merge)[0])
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
    merge = found(due_again(solo, "p2", 20), ef.Merge)
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
        while not found(effects, ef.Left):
            effects = solo.wait(0.25)
        gone_after.append(solo.now - since_s)
    assert gone_after == [solo.config.timing.leave_s] * 2
