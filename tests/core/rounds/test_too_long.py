"""Work that is too long to count in full: its own node says it first, then whoever cuts it."""

from __future__ import annotations

import pytest
from kit import found, reasons
from scenes import syncer

from p2pdiloco.core.api import effects as ef


def test_whose_work_was_too_long_is_said_by_the_syncer() -> None:
    solo = syncer()
    effects = solo.offer("p1", 1) + solo.offer("p2", 2)
    said = [
        r for r in found(solo.merged(found(effects, ef.Merge)[0], ("p2", "me")), ef.Record) if r.kind == "cut"
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
