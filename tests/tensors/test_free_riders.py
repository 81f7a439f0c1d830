"""Contributions that are nothing: they are found in any round, weigh next to nothing, and are no measure."""

import pytest
import torch
from test_limits import LAYOUT, PERIOD, unit, vault

from p2pdiloco.core.api.types import FULL_TRUST, LEAST_TRUST, NOTHING, UNMEASURED, USUAL_SCORE
from p2pdiloco.core.api.versions import USUAL, Mean
from p2pdiloco.tensors.codecs import codec
from p2pdiloco.tensors.merge import NEXT_TO_NOTHING, Input
from p2pdiloco.tensors.vault import MergeResult

OLD = Mean(USUAL, 100)


def merged(*deltas: torch.Tensor, name: str = "fp32") -> MergeResult:
    """Merge contributions of old members."""
    inputs = [Input(bytes(codec(name).encode(each.clone())), 40, PERIOD, mean=OLD) for each in deltas]
    return vault().merge(0, 1, inputs, seed=b"")


@pytest.mark.parametrize("others", [0, 1, 4])
@pytest.mark.parametrize("length", [0.0, 0.9 / NEXT_TO_NOTHING])
def test_nothing_is_found_in_rounds_of_any_size(others: int, length: float) -> None:
    if length and others < 2:
        return  # nobody knows what is usual, and of two the shorter is the measure
    found = merged(length * unit(99), *(unit(seed) for seed in range(others))).found.scores
    assert found[0] == NOTHING and NOTHING not in found[1:]


def test_work_of_one_step_in_hundreds_is_something() -> None:
    assert merged(unit(1) / 500, unit(2)).found.scores == (UNMEASURED, UNMEASURED)


def test_an_old_members_zeros_weigh_next_to_nothing() -> None:
    alone, beside = merged(unit(1)), merged(unit(1), torch.zeros(LAYOUT.numel))
    assert beside.norm == pytest.approx(alone.norm, rel=0.02), "half of it, if zeros weighed in full"


def test_a_majority_of_zeros_keeps_nobody_from_being_compared() -> None:
    shared = unit(7)
    honest = [shared + 0.5 * unit(seed) for seed in range(4)]
    found = merged(*honest, *[torch.zeros(LAYOUT.numel)] * 5).found.scores
    assert found[4:] == (NOTHING,) * 5 and all(score > USUAL_SCORE / 2 for score in found[:4])


def test_nothing_costs_trust_that_comes_back() -> None:
    assert OLD.trust(NOTHING) == LEAST_TRUST and OLD.after(NOTHING) == OLD.after(0) < OLD.agreement
    once = Mean(OLD.after(NOTHING), OLD.merges + 1)
    assert once.trust(USUAL_SCORE) == FULL_TRUST, "one that had nothing to send"
