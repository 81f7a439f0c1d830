"""What fragments are planned from: a model's parameters by name and shape, without torch."""

from __future__ import annotations

import math

from msgspec import Struct


class TensorSpec(Struct, frozen=True):
    """One named parameter. `embedding` tensors are merged by plain weighted mean (algorithm, section 1)."""

    name: str
    shape: tuple[int, ...]
    embedding: bool = False

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        """Slices along the first dimension: the finest pieces that a tensor is cut into."""
        return self.shape[0] if self.shape else 1
