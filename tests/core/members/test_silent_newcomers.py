"""Newcomers whom all have left go on, though names that answer to nothing stand beside them."""

from __future__ import annotations

from kit import Solo, branch, found, saved, sent, table, vote

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import messages as msg
from p2pdiloco.core.api.reasons import VoteRefusal
from p2pdiloco.core.members import IN_VAIN

OTHERS = ("old1", "old2")
STRANGERS = ("s1", "s2", "s3")


def left_alone(*beside: str) -> Solo:
    """The chain is of two that are gone. We have its newest version, and never worked; nor have those."""
    chain = branch(3, learners=OTHERS)
    assert all(mark.voter for mark in table(chain[-1]))
    solo = Solo(peers=beside, restored=saved(chain))
    for _ in range(2000):
        if solo.core.confirmed:
            return solo
        solo.wait(0.6)
    raise AssertionError("waits for ever for those who are gone")


def voters(solo: Solo) -> list[str]:
    return solo.fragment.seats.leaf.electorate.voters(solo.now)


def asked(solo: Solo, times: int) -> list[msg.VoteRequest]:
    """Let it stand so often."""
    requests: dict[int, msg.VoteRequest] = {}
    for _ in range(200):
        effects = solo.wait(0.6)
        requests |= {r.term: r for r in sent(effects, msg.VoteRequest)}
        if len(requests) >= times:
            return list(requests.values())
    raise AssertionError(f"stood {len(requests)} times")


def test_names_that_answer_to_nothing_keep_no_newcomer_from_the_office() -> None:
    solo = left_alone(*STRANGERS)
    assert voters(solo) == ["me", *STRANGERS]
    asked(solo, IN_VAIN)
    solo.wait(1.8)
    assert voters(solo) == ["me"]
    for _ in range(20):
        solo.wait(0.6)
    assert solo.fragment.office.holding


def test_who_answers_counts_again() -> None:
    solo = left_alone(*STRANGERS)
    asked(solo, IN_VAIN)
    solo.wait(1.8)
    assert voters(solo) == ["me"]
    refused = msg.VoteRefused("all", 0, 1, 1, solo.head, VoteRefusal.CATCHING_UP)
    solo.message("s1", refused)
    assert voters(solo) == ["me", "s1"]


def test_who_answers_now_and_then_is_not_left_out() -> None:
    solo = left_alone("s1")
    for _ in range(2 * IN_VAIN):
        request = asked(solo, 1)[0]
        refused = msg.VoteRefused("all", 0, request.term, 1, solo.head, VoteRefusal.CATCHING_UP)
        solo.message("s1", refused)
    assert voters(solo) == ["me", "s1"] and not solo.fragment.office.holding


def test_who_is_left_out_is_still_asked() -> None:
    solo = left_alone("s1", "s2")
    asked(solo, IN_VAIN)
    solo.wait(1.8)
    solo.message("s1", msg.VoteGranted(vote("s1", "me", 1)))
    assert voters(solo) == ["me", "s1"]
    effects: list[ef.Effect] = []
    while not sent(effects, msg.VoteRequest):
        effects = solo.wait(0.6)
    asked_now = {s.peer for s in found(effects, ef.Send) if isinstance(s.message, msg.VoteRequest)}
    assert asked_now == {"s1", "s2"}


def test_who_has_worked_counts_however_silent_it_is() -> None:
    """Else two sides of a split, which hear each other's heartbeats alone, would have a majority each."""
    solo = Solo(peers=("p1", "p2"), restored=saved(branch(3, learners=("me", "p1", "p2"))))
    asked(solo, 2 * IN_VAIN)
    assert voters(solo) == ["me", "p1", "p2"] and not solo.fragment.office.holding


def test_a_quorum_counts_no_newcomer_beside_newcomers() -> None:
    solo = left_alone(*STRANGERS)
    for peer in STRANGERS:
        solo.hear(peer, learning=True)
    solo.learn()
    while not solo.fragment.office.holding:
        solo.wait(0.6)
    assert solo.config.quorum == 2
    effects = solo.ready() + solo.wait(30.0)
    assert [merge.number for merge in found(effects, ef.Merge)] == [4]
