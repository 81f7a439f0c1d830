"""One fragment's chain: forwards only, a bounded log, watermarks that everybody computes alike."""

from __future__ import annotations

from weakref import ref

import msgspec
import pytest
from kit import branch, child, genesis

from p2pdiloco.core.api import versions
from p2pdiloco.core.api.types import (
    NEVER,
    UNMEASURED,
    Contributor,
    Head,
    Stamp,
    Watermark,
)
from p2pdiloco.core.api.versions import Mean
from p2pdiloco.core.chain import REMEMBERED, WATERMARK_VERSIONS, Chain, marks_of
from p2pdiloco.errors import InvariantViolation


def grown(length: int, keep: int = 3) -> Chain:
    chain = Chain((genesis(0),), (), keep)
    for version in branch(length)[1:]:
        chain.extend(version)
    return chain


def test_extends_by_its_child_only() -> None:
    chain = grown(2)
    assert chain.head.number == 2 and chain.head.tokens == 80
    for stranger in (branch(2)[-1], branch(4)[-1], branch(3, syncer="p2")[-1], genesis(0)):
        assert not chain.is_child(stranger.header)
        with pytest.raises(InvariantViolation):
            chain.extend(stranger)


def test_a_header_says_how_long_its_longest_contribution_is() -> None:
    header = branch(2)[-1].header
    parts = tuple(Contributor(f"p{i}", Stamp(1, i), 10, steps) for i, steps in enumerate((3, 24, 7)))
    assert msgspec.structs.replace(header, contributors=parts).longest_steps() == 24
    assert genesis(0).header.longest_steps() == 0


@pytest.mark.parametrize("others", [0, 100])
def test_a_header_is_plausible_if_all_its_contributors_are(others: int) -> None:
    header = branch(2)[-1].header
    usual = tuple(Contributor(f"q{i}", Stamp(1, i), 80, 8) for i in range(others))
    wide = Contributor("p1", Stamp(1, 1), 300, 10)
    long = msgspec.structs.replace(header, contributors=(*usual, wide))
    assert long.longest_steps() == 10
    assert [long.plausible(per_step, 8) for per_step in (30, 29, 30)] == [True, False, True]
    empty = Contributor("p1", Stamp(1, 1), 0, 10)
    assert not msgspec.structs.replace(header, contributors=(*usual, empty)).plausible(30, 8)


def test_contributors_of_a_long_header_are_judged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand simulated nodes ask it of one header that names ten thousand."""
    judged: list[int] = []
    monkeypatch.setattr(versions, "plausible_work", lambda *work: judged.append(1) is None)
    parts = tuple(Contributor(f"q{i}", Stamp(1, i), 80, 8) for i in range(40))
    header = msgspec.structs.replace(branch(2)[-1].header, contributors=parts)
    assert all(header.plausible(10, 8) for _ in range(3))
    assert len(judged) == 40


def test_many_long_headers_are_told_apart() -> None:
    header = branch(2)[-1].header
    parts = tuple(Contributor(f"q{i}", Stamp(1, i), 80, 8) for i in range(40))
    headers = [msgspec.structs.replace(header, contributors=parts, number=n) for n in range(2, 202)]
    first = [one.digest() for one in headers]
    assert len(set(first)) == 200 and [one.digest() for one in headers] == first


def test_needs_a_version_to_start_with() -> None:
    with pytest.raises(InvariantViolation):
        Chain((), (), 3)


def test_keeps_the_log_that_was_asked_for() -> None:
    chain = grown(6, keep=3)
    assert [v.header.number for v in chain.logged_all()] == [3, 4, 5, 6]
    kept = branch(6)
    assert chain.knows(3, kept[3].header.digest()) and chain.logged(3) == kept[3]
    assert not chain.knows(2, kept[2].header.digest()) and chain.logged(2) is None
    assert not chain.knows(5, kept[4].header.digest())


def test_restored_from_its_log_it_is_the_same() -> None:
    chain = grown(5)
    again = Chain(chain.logged_all(), chain.marks.table, 3)
    assert (again.head, again.marks.table, again.logged_all()) == (
        chain.head,
        chain.marks.table,
        chain.logged_all(),
    )


def test_replaced_by_a_heavier_chain_only() -> None:
    chain = grown(3)
    with pytest.raises(InvariantViolation):
        chain.replace(branch(3)[-1], ())
    with pytest.raises(InvariantViolation):
        chain.replace(branch(2, syncer="p2")[-1], ())
    other = branch(2, learners=("p1", "p2", "p3"))[-1]
    marks = (Watermark("p3", Stamp(1, 2), 2),)
    chain.replace(other, marks)
    assert chain.head == other.header.head() and chain.head.number == 2
    assert chain.logged_all() == (other,), "the ancestors of another chain are unknown"
    assert chain.marks.stamp("p3") == Stamp(1, 2) and chain.marks.stamp("p1") == NEVER


def test_weight_is_tokens_then_term_then_digest() -> None:
    low, high = bytes(32), b"\1" + bytes(31)
    rising = [Head(9, high, 1, 9), Head(1, high, 2, 1), Head(1, low, 2, 2), Head(1, high, 2, 2)]
    assert sorted(rising, key=lambda h: h.weight) == rising


def test_watermarks_follow_the_contributors() -> None:
    chain = grown(1)
    header = child(chain.header, learners=("p1", "p2")).header
    marks, once = chain.marks_after(header).table, Mean().after(UNMEASURED)
    first = Watermark("p1", Stamp(1, 2), 2, 1, 2, 2, once + 8, earned=2)
    assert marks == (first, Watermark("p2", Stamp(1, 2), 2, 2, 1, 0, once))
    assert chain.marks.stamp("p1") == Stamp(1, 1) and chain.marks.stamp("p2") == NEVER
    chain.extend(child(chain.header, learners=("p1", "p2")))
    assert chain.marks.table == marks


def test_work_weighs_beside_that_of_a_usual_member() -> None:
    means = {"odd": 20, "usual": 90, "young": 80, "liar": -900}
    marks = marks_of(Watermark(name, Stamp(1, 1), 1, agreement=mean) for name, mean in means.items())
    assert marks.weighs("usual") == 1.0 and marks.weighs("stranger") is None
    shares = [marks.weighs(name) for name in ("young", "odd", "liar")]
    assert shares == pytest.approx([1.0, 8 / 30, 1 / 30])


def test_tables_that_nobody_needs_any_more_are_gone() -> None:
    """A node that runs for months holds the tables of its log, not every one since the empty one."""
    marks, made = marks_of(()), []
    for number in range(1, 2 * REMEMBERED):
        marks = marks.after(number, (Contributor("a", Stamp(1, number), 40, 4),))
        made.append(ref(marks))
    assert sum(each() is not None for each in made) <= REMEMBERED + 1
    again = (Contributor("a", Stamp(1, 1), 40, 4),)
    assert marks_of(()).after(1, again) is marks_of(()).after(1, again), "worked out once"
    other = marks_of((Watermark("b", Stamp(1, 1), 1),))
    assert {mark.learner for mark in other.after(1, again).table} == {"a", "b"}, "of each parent"


def test_long_absent_learners_are_forgotten_by_all_at_once() -> None:
    start = genesis(0).header
    old = Watermark("old", Stamp(1, 1), 1)
    chain = Chain((genesis(0),), (old,), 3)
    part = (Contributor("p1", Stamp(1, 1), 40, 4),)
    kept = msgspec.structs.replace(start, number=1 + WATERMARK_VERSIONS, contributors=part)
    dropped = msgspec.structs.replace(kept, number=kept.number + 1)
    assert old in chain.marks_after(kept).table
    assert old not in chain.marks_after(dropped).table
