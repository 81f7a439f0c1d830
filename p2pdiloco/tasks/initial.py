"""Version 0: the same bytes on every peer, whatever its platform and library versions.

A DiLoCo whose workers start from different weights does not converge. So version 0 comes from no torch
generator and no transcendental function: raw Philox integers, taken to floats by exact arithmetic.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from p2pdiloco.tensors.sizes import TensorSpec

EMBEDDING_STD = 0.02
_DRAW_CHUNK = 1 << 20
_HALF_RANGE = 1 << 23


def uniform(seed: int, spec: TensorSpec, std: float) -> Tensor:
    """A fp32 tensor of uniform values with this standard deviation, a function of seed and name alone."""
    return torch.from_numpy(_uniform(f"{seed}/{spec.name}", spec.numel, std)).view(spec.shape)


def plain_start(seed: int, specs: Sequence[TensorSpec]) -> dict[str, Tensor]:
    """Draw matrices, embeddings and vectors in a way that suits most models
    (`tasks.task.Task.initial_parameters`)."""
    return {spec.name: _plain(seed, spec) for spec in specs}


def _plain(seed: int, spec: TensorSpec) -> Tensor:
    if len(spec.shape) > 1:
        inputs = spec.numel // spec.rows
        return uniform(seed, spec, EMBEDDING_STD if spec.embedding else 1 / math.sqrt(inputs))
    is_norm = "norm" in spec.name.lower() and spec.name.endswith("weight")
    return torch.ones(spec.shape) if is_norm else torch.zeros(spec.shape)


def _uniform(seed: str, numel: int, std: float) -> NDArray[np.float32]:
    """numel uniform fp32 values with this standard deviation, a pure function of the seed text.

    The upper 23 bits k of a raw Philox word give the odd integer 2k + 1 - 2^23, exact in fp32; it is
    multiplied once (one IEEE rounding) by a scale that is computed in double and rounded to fp32.
    """
    key = int.from_bytes(hashlib.sha256(f"p2pdiloco/init/{seed}".encode()).digest()[:16], "little")
    generator = np.random.Philox(key=key)
    scale = np.float32(std * math.sqrt(3) / _HALF_RANGE)
    values = np.empty(numel, dtype=np.float32)
    for start in range(0, numel, _DRAW_CHUNK):
        part = values[start : start + _DRAW_CHUNK]
        k = (generator.random_raw(part.size) >> np.uint64(41)).astype(np.int64)
        part[:] = (2 * k + 1 - _HALF_RANGE).astype(np.float32) * scale
    return values
