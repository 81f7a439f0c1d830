"""The known answer of merges, which every machine must make before it accuses anybody."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

from p2pdiloco.tensors import codecs, merge, outer_update
from p2pdiloco.tensors.codecs import CODECS


def test_this_machine_makes_it() -> None:
    """If it was changed on purpose, merges have other bits: raise WIRE_VERSION, and then ANSWER."""
    assert outer_update.merge_answer() == outer_update.MERGE_ANSWER


def test_another_order_of_additions_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "norm", lambda values: float(values.double().square().sum().sqrt()))
    assert outer_update.merge_answer() != outer_update.MERGE_ANSWER


def test_a_fused_product_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused(total: torch.Tensor, values: torch.Tensor, factor: float, _work: torch.Tensor) -> None:
        total.copy_((total.double() + values.double() * codecs._rounded(factor)).float())

    monkeypatch.setattr(merge, "add_scaled", fused)
    assert outer_update.merge_answer() != outer_update.MERGE_ANSWER


def test_this_machine_makes_the_known_outer_steps() -> None:
    """If it was changed on purpose, states have other bits: raise WIRE_VERSION, and then STEP_ANSWER."""
    assert outer_update.step_answer() == outer_update.STEP_ANSWER


def test_another_outer_step_has_another_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    step = outer_update.outer_step

    def rounded(*job: torch.Tensor | float) -> None:
        step(*job)  # type: ignore[arg-type]
        theta = job[5]
        assert isinstance(theta, torch.Tensor)
        theta.mul_(1 + 2.0**-22)

    monkeypatch.setattr(outer_update, "outer_step", rounded)
    assert outer_update.step_answer() != outer_update.STEP_ANSWER


FLUSHES = """
import torch
from p2pdiloco.tensors import outer_update as known_answer
assert known_answer.step_answer() == known_answer.STEP_ANSWER
assert known_answer.merge_answer() == known_answer.MERGE_ANSWER
if not torch.set_flush_denormal(True):
    print("this processor cannot")
else:
    assert known_answer.step_answer() != known_answer.STEP_ANSWER, "the outer step"
    assert known_answer.merge_answer() != known_answer.MERGE_ANSWER, "the merge"
    assert not known_answer.merges_as_everywhere() and not known_answer.steps_as_everywhere()
    print("noticed")
"""


@pytest.mark.process
def test_a_machine_that_makes_the_smallest_numbers_zero_is_noticed() -> None:
    """It would find false what all others find right: states, once some momentum is next to nothing, and
    merges of what has such numbers. So it audits and accuses nobody."""
    done = subprocess.run([sys.executable, "-c", FLUSHES], capture_output=True, text=True, check=True)
    if done.stdout.strip() != "noticed":
        pytest.skip(done.stdout)


def _flushed(job: Callable[..., Any]) -> Callable[..., Any]:
    def work(*given: Any, **named: Any) -> Any:
        torch.set_flush_denormal(True)
        try:
            return job(*given, **named)
        finally:
            torch.set_flush_denormal(False)

    return work


@pytest.mark.parametrize("name", sorted(each.name for each in CODECS.values() if not each.sparse))
def test_it_is_noticed_in_each_codecs_decoding_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of bits has nothing to flush."""
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot")
    monkeypatch.setattr(type(CODECS[name]), "decode", _flushed(CODECS[name].decode.__func__))  # type: ignore[attr-defined]
    assert (outer_update.merge_answer() == outer_update.MERGE_ANSWER) == (name in ("fp32", "bf16"))


@pytest.mark.parametrize("place", ["add_scaled", "scale"])
def test_it_is_noticed_in_the_sums_alone(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot")
    monkeypatch.setattr(merge, place, _flushed(getattr(merge, place)))
    assert outer_update.merge_answer() != outer_update.MERGE_ANSWER
