"""Holders that failed: left alone, but not where only they have what is wanted."""

from __future__ import annotations

from p2pdiloco.core.follower import BUSY_S, DISTRUST_S, LONELY_S, LONELY_TIMES, NOW_S, WASTED_S, Doubts


def test_others_are_asked_instead_for_a_while() -> None:
    doubts = Doubts()
    doubts.add("a", True, 0.5, now=0.0)
    assert doubts.open(["a", "b"], 1.0) == {"b"}
    assert doubts.open(["a", "b"], LONELY_S + 1.0) == {"b"}, "as long as somebody else has it"
    assert doubts.open(["a"], 4 * DISTRUST_S) == {"a"}


def test_one_damaged_payload_of_the_only_holder_costs_seconds() -> None:
    """Storm seed 13360: nobody else had it, and it was not asked for half a minute."""
    doubts = Doubts()
    doubts.add("a", True, 0.5, now=0.0)
    first_s = doubts.first_s(["a"])
    assert first_s is not None and first_s < DISTRUST_S / 4
    assert doubts.open(["a"], first_s - 0.1) == set()
    assert doubts.open(["a"], first_s) == {"a"}


def test_who_goes_on_failing_is_left_alone_by_all() -> None:
    doubts, now = Doubts(), 0.0
    for _ in range(LONELY_TIMES + 1):
        doubts.add("a", True, 0.5, now)
        now = doubts.first_s(["a"]) or 0.0
    assert doubts.open(["a"], now - 1.0) == set()
    assert now > 8 * DISTRUST_S, "a liar's heavy head does not keep our copy busy"


def test_the_networks_reasons_are_soon_forgiven() -> None:
    doubts = Doubts()
    doubts.add("a", False, 0.5, now=0.0)
    assert doubts.open(["a"], LONELY_S) == {"a"}
    doubts.drop("a")
    assert doubts.open(["a"], 0.0) == {"a"}


def test_who_is_always_busy_is_asked_ever_more_rarely() -> None:
    doubts, now, asked = Doubts(), 0.0, 0
    while now < 600.0:
        doubts.add("a", False, 0.3, now)
        asked += 1
        now = doubts.first_s(["a"]) or 0.0
    assert asked < 30 and now - BUSY_S < 600.0, "and yet again and again"
    assert doubts.open(["a"], now) == {"a"}


def test_who_let_us_wait_for_nothing_waits_in_turn() -> None:
    doubts, now = Doubts(), 0.0
    for _ in range(LONELY_TIMES + 1):
        doubts.add("a", False, 0.3, now, waited_s=15.0)
        now = doubts.first_s(["a"]) or 0.0
    assert doubts.open(["a"], now - 1.0) == set()
    doubts.add("a", False, 0.3, 0.0, waited_s=1e6)
    assert doubts.open(["a"], WASTED_S) == {"a"}, "but not for ever"


def test_a_doubted_holder_comes_after_those_that_did_not_fail() -> None:
    """Its pause was as long as the one before anybody was asked, so it was asked every time."""
    doubts = Doubts()
    doubts.add("a", False, 0.3, now=0.0)
    assert doubts.open(["a", "b"], 1e6) == {"b"}
    assert doubts.first_s(["a", "b"]) == NOW_S, "and those do not wait for it"


def test_many_that_fail_are_not_asked_one_after_the_other() -> None:
    doubts = Doubts()
    for i in range(20):
        doubts.add(f"liar {i}", False, 0.3, now=100.0)
    assert doubts.open(["liar 0"], 101.0) == set(), "its own pause is over"
    assert doubts.first_s(["liar 0"]) == doubts.again_s > 101.0
    doubts.drop("honest")
    assert doubts.open(["liar 0"], 101.0) == {"liar 0"}
