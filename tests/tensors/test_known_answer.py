"""The known answer of merges, which every machine must make before it accuses anybody."""

from __future__ import annotations

import pytest
import torch

from p2pdiloco.tensors import portable
from p2pdiloco.tensors.merging import known_answer, merge


def test_this_machine_makes_it() -> None:
    """If it was changed on purpose, merges have other bits: raise WIRE_VERSION, and then ANSWER."""
    assert known_answer.answer() == known_answer.ANSWER


def test_another_order_of_additions_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "norm", lambda values: float(values.double().square().sum().sqrt()))
    assert known_answer.answer() != known_answer.ANSWER


def test_a_fused_product_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused(total: torch.Tensor, values: torch.Tensor, factor: float, _work: torch.Tensor) -> None:
        total.copy_((total.double() + values.double() * portable._rounded(factor)).float())

    monkeypatch.setattr(merge, "add_scaled", fused)
    assert known_answer.answer() != known_answer.ANSWER


def test_this_machine_makes_the_known_outer_steps() -> None:
    """If it was changed on purpose, states have other bits: raise WIRE_VERSION, and then STEP_ANSWER."""
    assert known_answer.step_answer() == known_answer.STEP_ANSWER


def test_another_outer_step_has_another_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    step = known_answer.outer_step

    def rounded(*job: torch.Tensor | float) -> None:
        step(*job)  # type: ignore[arg-type]
        theta = job[5]
        assert isinstance(theta, torch.Tensor)
        theta.mul_(1 + 2.0**-22)

    monkeypatch.setattr(known_answer, "outer_step", rounded)
    assert known_answer.step_answer() != known_answer.STEP_ANSWER


def test_a_machine_that_makes_the_smallest_numbers_zero_is_noticed() -> None:
    """It would find false what all others find right, once some momentum is next to nothing."""
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot")
    try:
        assert known_answer.step_answer() != known_answer.STEP_ANSWER
    finally:
        torch.set_flush_denormal(False)
