"""How far contributions agree: honest ones alike, liars less, and nothing where nothing can be told."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from p2pdiloco.core.api.types import LEAST_SCORE, MOST_SCORE, UNCLEAR, UNMEASURED, USUAL_SCORE
from p2pdiloco.tensors import merge
from p2pdiloco.tensors.merge import SAMPLE_BLOCK, SAMPLE_BLOCKS, Sample, scores

NUMEL = 40_000


def vectors(count: int, shared: float = 0.3, numel: int = NUMEL) -> list[Tensor]:
    """Contributions with some of one direction in each, and noise of length 1."""
    generator = torch.Generator().manual_seed(count)
    common = torch.randn(numel, generator=generator) / math.sqrt(numel)
    return [
        shared * common + torch.randn(numel, generator=generator) / math.sqrt(numel) for _ in range(count)
    ]


def scored(given: list[Tensor]) -> list[int]:
    sample = Sample(len(given[0]), b"seed")
    return scores([sample.of(each) for each in given])


def test_honest_contributions_are_usual_whatever_their_length() -> None:
    honest = vectors(8)
    assert all(40 < score <= MOST_SCORE for score in scored(honest))
    assert scored([10.0**n * each for n, each in enumerate(honest)]) == scored(honest)


@pytest.mark.parametrize("liars", [1, 2, 3])
def test_liars_that_agree_with_each_other_do_not_agree_with_the_others(liars: int) -> None:
    given = vectors(10)
    noise = torch.randn(NUMEL, generator=torch.Generator().manual_seed(99))
    for lie in (-given[0], noise, -sum(given)):  # type: ignore[operator]
        found = scored([*([lie] * liars), *given[liars:]])
        assert max(found[:liars]) < 10 and min(found[liars:]) > 30, found


def test_zeros_agree_with_nobody() -> None:
    found = scored([torch.zeros(NUMEL), *vectors(5)])
    assert found[0] == 0 and min(found[1:]) > 30


@pytest.mark.parametrize("given", [[], vectors(1), vectors(2)])
def test_of_two_none_can_be_told_from_the_other(given: list[Tensor]) -> None:
    sample = Sample(NUMEL, b"")
    assert scores([sample.of(each) for each in given]) == [UNMEASURED] * len(given)


def test_where_most_do_not_agree_nothing_is_measured() -> None:
    assert scored(vectors(8, shared=0.0)) == [UNCLEAR] * 8
    flipped = [each * (-1) ** n for n, each in enumerate(vectors(8))]
    assert scored(flipped) == [UNCLEAR] * 8, "half of them against the others"


def test_a_score_has_ends() -> None:
    given = vectors(9)
    found = scored([sum(given), -sum(given), *given])  # type: ignore[list-item, operator]
    assert found[:2] == [MOST_SCORE, LEAST_SCORE] and USUAL_SCORE < MOST_SCORE


def test_a_sample_is_drawn_by_its_seed_and_is_all_of_a_small_fragment() -> None:
    numel = SAMPLE_BLOCK * SAMPLE_BLOCKS * 3 + 17
    values = torch.arange(numel, dtype=torch.float32)
    one, same, other = (Sample(numel, seed).of(values) for seed in (b"1", b"1", b"2"))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert len(one) == SAMPLE_BLOCK * SAMPLE_BLOCKS == len(set(one.tolist()))
    assert Sample(100, b"1").of(values[:100]).tolist() == list(range(100))


def test_a_score_is_the_same_in_whatever_order_sums_are_made() -> None:
    given = [*vectors(6), 2.0**40 * vectors(1)[0], 2.0**-60 * vectors(7)[1]]
    rows = [Sample(NUMEL, b"seed").of(each) for each in given]
    assert scores(rows) == scores([row.flip(0) for row in rows])
    whole = [merge._whole(row) for row in rows]
    for one, other in pairwise(whole):
        exact = sum(int(a) * int(b) for a, b in zip(one.tolist(), other.tolist(), strict=True))
        assert float(torch.dot(one, other)) == exact


def test_what_some_processors_make_zero_is_nothing() -> None:
    honest = vectors(5)
    faint = 2.0**-130 * honest[0]
    assert scored([faint, *honest]) == scored([torch.zeros(NUMEL), *honest])
