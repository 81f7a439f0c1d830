"""Inputs of a merge that were damaged here since they came."""

from __future__ import annotations

from kit import found, reasons
from scenes import syncer

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import Verdict


def test_what_was_damaged_here_is_left_out_and_welcome_again_and_nobody_is_to_blame() -> None:
    solo = syncer()
    merge = found(solo.offer("p1", 1) + solo.offer("p2", 2) + solo.wait(0.5), ef.Merge)[0]
    damaged = merge.inputs[0].ticket, Verdict.DAMAGED
    effects = solo.feed(ev.MergeFailed(0, merge.term, merge.number, "damaged", (damaged,)))
    (again,) = found(effects, ef.Merge)
    assert again.inputs == merge.inputs[1:] and not reasons(effects, "refusal")
    assert found(solo.offer(merge.inputs[0].contributor.learner, 3), ef.AcceptTransfer)
