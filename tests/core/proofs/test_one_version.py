"""An honest syncer never makes two versions of one parent in one term."""

from __future__ import annotations

from kit import branch, found, reasons, table
from scenes import one_round, syncer

from p2pdiloco.core.api import effects as ef


def test_who_went_back_to_a_lighter_chain_lays_the_office_down_before_it_makes_the_version_again() -> None:
    solo = syncer()
    first = branch(0)[0]
    one_round(solo, "p1", "p2")
    made = solo.fragment.chain.header
    assert made.number == 1 and solo.fragment.office.holding
    solo.fragment.chain.replace(first, table(first), yields=True)  # as where older members are there
    solo.offer("p1", 30)
    effects = solo.offer("p2", 31) + solo.wait(1.0)
    assert not found(effects, ef.Merge) and not solo.fragment.office.holding
    assert "laid down: this parent has a version of ours in this term" in reasons(effects, "office")
    solo.take_office()
    assert solo.fragment.office.term > made.term, "in another term it may"
    solo.offer("p1", 40)
    assert found(solo.offer("p2", 41) + solo.wait(1.0), ef.Merge)
