"""Agreement of a round's contributions: how far each goes where the others go.

Pseudo-gradients of honest learners are nearly orthogonal, but each has some of the direction that all share.
So the median of a contribution's cosines to all others is much the same for all who are honest, whatever a
minority does: liars that agree with each other are no majority of anybody's others. A score is that median,
as a multiple of the round's median of it. Strangers can be a majority, so the others are those that vote,
where three or more do.

Cosines are taken on a sample of blocks. What draws it is not known before all contributions are in, so that
nobody can be honest there and lie elsewhere. Whoever has the contributions finds the same scores: samples are
rounded to whole numbers, whose products and sums are exact in fp64 in any order.

Rules: docs/protocol/weights.md, section 5.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import median

import torch
from torch import Tensor

from p2pdiloco.core.api.types import LEAST_SCORE, MOST_SCORE, UNCLEAR, UNMEASURED, USUAL_SCORE
from p2pdiloco.core.api.versions import FEWEST, references

BLOCK = 256
"""Elements of a block, that are next to each other."""
BLOCKS = 256
"""Blocks of a sample: its cosines are off by about 1/256."""
PLACE_BYTES = 8
"""Bytes of a seed's stream that draw one block."""
GRAIN = 2.0**18
"""Whole number to which the largest element of a sample is scaled: 2^16 squares of it add up to less than
2^53, within which fp64 is exact."""
FAINT = 2.0**-100
"""Largest element below which a sample is nothing. Above it fp32's smallest numbers, which some processors
make zero, are rounded to zero everywhere."""
NOISE = 3.0
"""Least of the usual cosine that says anything, in deviations of a sample's between vectors without any."""


class Sample:
    """Places at which a fragment's contributions are compared."""

    def __init__(self, numel: int, seed: bytes) -> None:
        """Draw them: the same for the same seed (any bytes). One block of each stretch of blocks."""
        blocks, self._numel = numel // BLOCK, numel
        self._blocks = torch.tensor(_drawn(blocks, seed)) if blocks > BLOCKS else None

    def of(self, values: Tensor) -> Tensor:
        """Copy the sample of these values, fp32 [numel]: fp64 [sample]."""
        if self._blocks is None:
            return values.double()
        whole = values[: self._numel - self._numel % BLOCK].view(-1, BLOCK)
        return whole.index_select(0, self._blocks).flatten().double()


def _drawn(blocks: int, seed: bytes) -> list[int]:
    """Draw places without Python's own random numbers, which its versions draw differently."""
    stream = hashlib.shake_256(seed).digest(PLACE_BYTES * BLOCKS)
    ends = [place * blocks // BLOCKS for place in range(BLOCKS + 1)]
    places = []
    for at, (first, end) in enumerate(pairwise(ends)):
        drawn = int.from_bytes(stream[PLACE_BYTES * at : PLACE_BYTES * (at + 1)], "big")
        places.append(first + drawn % (end - first))
    return places


def cosine(a: Tensor, b: Tensor) -> float | None:
    """Cosine of two samples, fp64; None: one of them is zero."""
    lengths = float(torch.linalg.vector_norm(a)) * float(torch.linalg.vector_norm(b))
    return float(torch.dot(a, b)) / lengths if lengths else None


def scores(samples: Sequence[Tensor], votes: Sequence[bool] = ()) -> list[int]:
    """Compute the score of every contribution by their samples; `UNMEASURED` for all, where there are too
    few, and `UNCLEAR`, where not even most of them agree. `votes`: whose learners vote (nobody's): they are
    the others with whom all are compared, where enough do (`core.api.references`)."""
    if len(samples) < FEWEST:
        return [UNMEASURED] * len(samples)
    rows = torch.stack([_whole(sample) for sample in samples])
    products = [[int(each) for each in row] for row in (rows @ rows.T).tolist()]
    squares = [row[n] for n, row in enumerate(products)]
    cosines = [
        [_cosine(each, one * other) for each, other in zip(row, squares, strict=True)]
        for row, one in zip(products, squares, strict=True)
    ]
    asked = references(range(len(samples)), votes or [False] * len(samples))
    medians = [median(row[other] for other in asked if other != n) for n, row in enumerate(cosines)]
    usual = median(medians[n] for n in asked)
    if not usual * math.sqrt(rows.shape[1]) > NOISE:
        return [UNCLEAR] * len(samples)
    return [min(max(round(USUAL_SCORE * each / usual), LEAST_SCORE), MOST_SCORE) for each in medians]


def _whole(sample: Tensor) -> Tensor:
    """Round a sample to whole numbers of at most `GRAIN`: which one has no part in cosines."""
    largest = float(sample.abs().max()) if len(sample) else 0.0
    return torch.round(sample * (GRAIN / largest)) if largest >= FAINT else torch.zeros_like(sample)


def _cosine(product: int, squares: int) -> float:
    """Cosine by an inner product and the product of both squared lengths."""
    return product / math.sqrt(squares) if squares else 0.0
