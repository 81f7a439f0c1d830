"""Learners that lie about their work, in worlds that run production's cores, rounds and merges."""

from __future__ import annotations

from typing import Any

import pytest
from sim_kit import in_another_process

from p2pdiloco.core.inbox import Held, Inbox
from p2pdiloco.core.round import Attendance
from p2pdiloco_lab.simulation.sim_world import World
from worlds.cells import ALONE, CALM, Cell, CellResult, cell_plan, play, row_of
from worlds.hours import play_hours
from worlds.kinds import Lie
from worlds.lying import LyingVectors

pytestmark = pytest.mark.long

UNTIL_S = 40.0
LITTLE = 0.03
"""Share of the loss of the honest alone."""


def cell(attack: str, liars: int = 1, of: int = 5, **more: str) -> Cell:
    return Cell(attack=attack, liars=liars, of=of, until_s=UNTIL_S, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def alone() -> CellResult:
    return play(cell(ALONE))


@pytest.mark.parametrize("lie", [Lie.FLIP_X10, Lie.X1000_SMALLEST, Lie.DRIFT, Lie.TOKENS_X10_FLIP])
def test_a_liar_costs_next_to_nothing_and_no_honest_learner_is_doubted(lie: Lie, alone: CellResult) -> None:
    row = row_of(cell(lie.value), play(cell(lie.value)), alone)
    assert not row.violation and row.honest_excluded == 0
    assert row.loss_ratio < 1 + LITTLE, row
    assert row.honest_doubted == 0.0
    assert alone.loss < alone.start_loss - 0.5, "something is learned at all"


def test_lies_would_cost_much_if_nothing_was_held_against_them(
    alone: CellResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2pdiloco.core.api.versions.Mean.trust", lambda mean, score: 64)
    row = row_of(cell("flip-x10"), play(cell("flip-x10")), alone)
    assert row.loss_ratio > 1 + LITTLE and row.liars_trust == 1.0


def test_who_sends_the_reverse_weighs_nothing_after_a_few_versions() -> None:
    found = play(cell("flip", liars=2, of=10, speeds="spread", data="different"))
    assert not found.violation
    assert found.distrusted_after is not None and found.distrusted_after <= 10
    assert found.liars_trust is not None and found.liars_trust < 0.05


@pytest.mark.parametrize("of_few", [True, False])
def test_a_syncer_that_merges_its_reversed_work_alone_moves_the_model_by_little(
    of_few: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends honest work up to version 10. `of_few`: a version of few is held to be of few."""
    turning = Cell(attack="turning", liars=1, of=10)
    ready, missing, quorum = Inbox.ready, Attendance.missing, Attendance.quorum

    def lies(part: Any) -> bool:
        return part._shared.me in turning.lying

    def own(inbox: Inbox) -> list[Held]:
        return [held for held in ready(inbox) if held.own or not lies(inbox)]

    monkeypatch.setattr(Inbox, "ready", own)
    monkeypatch.setattr(
        Attendance, "missing", lambda a, *asked, **how: [] if lies(a) else missing(a, *asked, **how)
    )
    monkeypatch.setattr(Attendance, "quorum", lambda a, now: 1 if lies(a) else quorum(a, now))
    if not of_few:
        monkeypatch.setattr("p2pdiloco.core.chain._company", lambda _chain, _learners: 1.0)
    row = row_of(turning, play(turning), play(turning.alone))
    assert not row.violation and row.honest_excluded == 0
    assert (row.loss_ratio < 1 + LITTLE) is of_few, row


def test_liars_lie_in_different_ways_and_read_what_is_theirs() -> None:
    plan = cell_plan(cell(CALM, data="different"))
    vectors = LyingVectors(plan, Lie.LABELS, frozenset({"n2"}), parted=True)
    shares = {name: vectors.share_of(name) for name in ("n1", "n2")}
    assert shares["n2"].targets is not None and shares["n1"].targets is None
    contexts = [share.contexts for share in shares.values() if share.contexts is not None]
    assert len(contexts) == 2 and contexts[0].tolist() != contexts[1].tolist()


def test_copies_are_refused_and_earn_nothing() -> None:
    """Copies have the same digest as what they are copies of, as in a node."""
    plan = cell_plan(cell("copycat"))
    world = World(plan, substance=LyingVectors(plan, Lie.COPYCAT, frozenset({"n2"})))
    world.clock.run_until(UNTIL_S)
    merged = [
        part.learner for version in world.watch.headers.values() for part in version.header.contributors
    ]
    assert merged.count("n2") < 0.3 * merged.count("n1")


def test_honest_learners_are_not_doubted_for_long_whatever_happens_to_them() -> None:
    row = play_hours(3, 0.6)
    assert not row.violation and row.faults and row.contributions > 50 and row.measured > 0.3
    assert row.excluded == row.doubted_in_the_end == 0 and row.longest_doubt < 3


def test_a_cell_is_the_same_in_every_process() -> None:
    code = (
        "from worlds.cells import Cell, play\nprint(play(Cell(attack='alie', liars=1, of=5, until_s=25.0)))\n"
    )
    assert in_another_process(code).strip() == str(play(Cell(attack="alie", liars=1, of=5, until_s=25.0)))
