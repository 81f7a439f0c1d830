"""The simulator's own parts: lineages, the learner's counters, the disk's memory."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco.core.api.types import Stamp
from p2pdiloco.core.pending import Unmerged
from p2pdiloco_lab.simulation.lineage import (
    Clock,
    Displacement,
    MergedPart,
    OuterUpdate,
    add_span,
    genesis_state,
    missing_spans,
)
from p2pdiloco_lab.simulation.sim_disk import ResumeNote
from p2pdiloco_lab.simulation.sim_worker import Callbacks, CommittedVersion, LearnerModel

SPANS = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted).map(tuple), max_size=8)


@given(SPANS, st.tuples(st.integers(0, 40), st.integers(0, 40)).map(sorted).map(tuple))
def test_spans_are_sets_of_steps(parts: list[tuple[int, int]], window: tuple[int, int]) -> None:
    spans: tuple[tuple[int, int], ...] = ()
    for first, end in parts:
        spans = add_span(spans, first, end)
    steps = {step for first, end in parts for step in range(first, end)}
    assert {step for first, end in spans for step in range(first, end)} == steps
    assert all(a[1] < b[0] for a, b in pairwise(spans)), "sorted, disjoint, not adjacent"
    gaps = {step for first, end in missing_spans(spans, *window) for step in range(first, end)}
    assert gaps == set(range(*window)) - steps


def test_a_state_is_its_history_and_a_repeated_step_shows() -> None:
    def update(number: int, first: int, end: int) -> OuterUpdate:
        return OuterUpdate.of(0, number, (MergedPart("a", Stamp(1, number), first, end),))

    one, other = genesis_state(0).apply(update(1, 0, 5)), genesis_state(0).apply(update(1, 0, 6))
    assert one.digest != other.digest
    assert one.apply(update(2, 5, 9)).repeated == ()
    assert one.apply(update(2, 4, 9)).repeated[0].first == 4


class Harness:
    """A learner with H = 10, one fragment, one step a second."""

    def __init__(self, at_once: bool = True) -> None:
        self.clock = Clock()
        self.copies: list[tuple[Displacement, bool]] = []
        self.passes = 0
        self.applied: list[int] = []
        tell = Callbacks(self._wake_at, self._copied, self._nothing, self._applied, lambda *_: None)
        self.learner = LearnerModel("a", 10, 1.0, [(b"zero", 0)], tell, at_once=at_once)
        self.learner.start(0.0, 0)

    def _wake_at(self, time_s: float) -> None:
        self.clock.at(time_s, lambda: self.learner.wake(self.clock.now))

    def _copied(self, copied: Displacement, due: bool) -> None:
        self.copies.append((copied, due))
        self.learner.encoded(0, self.clock.now)

    def _nothing(self, _fragment: int) -> None:
        self.passes += 1

    def _applied(self, _fragment: int, number: int, _step: int) -> None:
        self.applied.append(number)

    def install(self, number: int, merged: Displacement | None) -> None:
        digest = b"%d" % number
        self.learner.install(CommittedVersion(0, number, digest, merged, False), self.clock.now)


@pytest.mark.parametrize(("at_once", "end"), [(True, 6), (False, 7)])
def test_a_rebase_keeps_the_counters_and_a_closing_call_gets_them(at_once: bool, end: int) -> None:
    world = Harness(at_once)
    world.clock.run_until(4.5)
    world.install(1, None)
    world.clock.run_until(6.5)
    world.learner.request(0, world.clock.now)
    assert len(world.copies) == at_once
    world.clock.run_until(7.5)
    copied, due = world.copies[0]
    assert (copied.first, copied.end, copied.base, due) == (0, end, b"1", False)
    assert world.applied == [1]


def test_one_slot_and_nothing_twice_in_it() -> None:
    world = Harness()
    world.clock.run_until(40.0)
    assert len(world.copies) == 1, "the slot is taken until the copy is merged or retired"
    world.learner.request(0, world.clock.now)
    world.clock.run_until(41.5)
    assert world.passes == 1
    world.learner.retire(0, world.clock.now)
    world.clock.run_until(43.5)
    assert [(c.first, c.end) for c, _ in world.copies] == [(0, 10), (0, 20)], (
        "a long displacement goes out in shares"
    )


def test_what_may_be_resumed() -> None:
    slot = Unmerged((Stamp(1, 3),), Stamp(1, 4))
    whole, rest = (7, b"whole"), (9, b"rest")
    assert ResumeNote(slot, 7, 9, b"whole", b"rest").resumed("all") == whole
    assert ResumeNote(slot, 7, 9, b"whole", b"rest").resumed("rest") == rest
    assert ResumeNote(slot, 7, 9, b"whole", b"rest").resumed("none") is None


def test_at_rest_no_share_is_like_the_one_before_as_in_a_learner() -> None:
    world = Harness()
    world.clock.run_until(400.5)
    world.learner.rest(True, world.clock.now)
    for number in range(1, 6):
        world.install(number, world.copies[-1][0])
        world.clock.run_until(world.clock.now + 0.1)
    sizes = [copied.end - copied.first for copied, _ in world.copies]
    assert len(sizes) == 6 and all(one != other for one, other in pairwise(sizes))
    for _ in range(3):
        world.learner.retire(0, world.clock.now)
        world.clock.run_until(world.clock.now + 0.1)
    assert len(world.copies) == 7, "of the same displacement two copies are given up, and no more"
