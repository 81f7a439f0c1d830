"""Names and shapes of a model's parameters, without torch: fragments are planned from them."""

from __future__ import annotations

import math

from msgspec import Struct

MAX_TENSORS = 1 << 15
"""Tensors of one model: more, and only looking at a manifest would take seconds."""
MAX_NUMEL = 1 << 46
"""Elements of one model: beyond it are mistakes, and numbers that overflow."""


class TensorSpec(Struct, frozen=True):
    """A named parameter. `embedding` tensors are merged by plain weighted mean (Decoupled DiLoCo, arXiv
    2604.21428)."""

    name: str
    shape: tuple[int, ...]
    embedding: bool = False

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """Number of slices along the first dimension: the finest pieces that a tensor is cut into."""
        return self.shape[0] if self.shape else 1
