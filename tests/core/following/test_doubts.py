"""Holders that failed: left alone, but not where only they have what is wanted."""

from __future__ import annotations

from p2pdiloco.core.following.doubts import DISTRUST_S, LONELY_S, LONELY_TIMES, Doubts


def test_others_are_asked_instead_for_a_while() -> None:
    doubts = Doubts()
    doubts.add("a", True, 0.5, now=0.0)
    assert doubts.open(["a", "b"], 1.0) == {"b"}
    assert doubts.open(["a", "b"], LONELY_S + 1.0) == {"b"}, "as long as somebody else has it"
    assert doubts.open(["a", "b"], 4 * DISTRUST_S) == {"a", "b"}


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
