"""Agreement of a round's contributions: how far each goes where the others go.

Pseudo-gradients of honest learners are nearly orthogonal, but each has some of the direction that all share.
So the median of a contribution's cosines to all others is much the same for all who are honest, whatever a
minority does: liars that agree with each other are no majority of anybody's others. A score is that median,
as a multiple of the round's median of it.

Cosines are taken on a sample of blocks. What draws it is not known before all contributions are in, so that
nobody can be honest there and lie elsewhere. Scores are rounded, and are the syncer's word: two machines may
find them one apart.

Rules: docs/protocol/weights.md, section 5.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import median

import torch
from torch import Tensor

from p2pdiloco.core.api.types import LEAST_SCORE, MOST_SCORE, UNCLEAR, UNMEASURED, USUAL_SCORE
from p2pdiloco.tensors.merging.merge import FEWEST

BLOCK = 256
"""Elements of a block, that are next to each other."""
BLOCKS = 256
"""Blocks of a sample: its cosines are off by about 1/256."""
NOISE = 3.0
"""Least of the usual cosine that says anything, in deviations of a sample's between vectors without any."""


class Sample:
    """Places at which a fragment's contributions are compared."""

    def __init__(self, numel: int, seed: bytes) -> None:
        """Draw them: the same for the same seed (any bytes)."""
        blocks, self._numel = numel // BLOCK, numel
        drawn = sorted(random.Random(seed).sample(range(blocks), BLOCKS)) if blocks > BLOCKS else None
        self._blocks = None if drawn is None else torch.tensor(drawn)

    def of(self, values: Tensor) -> Tensor:
        """Copy the sample of these values, fp32 [numel]: fp64 [sample]."""
        if self._blocks is None:
            return values.double()
        whole = values[: self._numel - self._numel % BLOCK].view(-1, BLOCK)
        return whole.index_select(0, self._blocks).flatten().double()


def cosine(a: Tensor, b: Tensor) -> float | None:
    """Cosine of two samples, fp64; None: one of them is zero."""
    lengths = float(torch.linalg.vector_norm(a)) * float(torch.linalg.vector_norm(b))
    return float(torch.dot(a, b)) / lengths if lengths else None


def scores(samples: Sequence[Tensor]) -> list[int]:
    """Compute the score of every contribution by their samples; `UNMEASURED` for all, where there are too
    few, and `UNCLEAR`, where not even most of them agree."""
    if len(samples) < FEWEST:
        return [UNMEASURED] * len(samples)
    rows = torch.stack(tuple(samples))
    lengths = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    rows = torch.where(lengths > 0, rows / lengths, 0.0)
    cosines = (rows @ rows.T).tolist()
    medians = [median(row[:n] + row[n + 1 :]) for n, row in enumerate(cosines)]
    usual = median(medians)
    if not usual * math.sqrt(rows.shape[1]) > NOISE:
        return [UNCLEAR] * len(samples)
    return [min(max(round(USUAL_SCORE * each / usual), LEAST_SCORE), MOST_SCORE) for each in medians]
