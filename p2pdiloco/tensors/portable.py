"""Arithmetic that has the same bits on every machine, whatever its vector instructions and threads.

IEEE 754 fixes what one operation makes of one element, but not the order of a reduction's additions, nor
whether a multiplication is fused with the addition after it. So there are elementwise operations only, each
of which writes what it made to memory. Tiles stay in a cache from one operation to the next.
"""

from __future__ import annotations

import ctypes
import math
import threading
from collections.abc import Iterable

import torch
from torch import Tensor

TILE = 1 << 17
"""Elements scaled and added at a time: scratch of half a MiB."""
_WIDTH = 1 << 16
"""Number of sums of squares at most: with as much scratch, half a MiB in each thread."""
_FEW = 64
"""Number of sums, or of elements, that Python adds exactly. A power of two, as _WIDTH is."""
_FAINT = 2.0**-100
"""Beginning of every sum of squares. Beside it squares below fp32's normal numbers are nothing, whether a
processor keeps them or makes them zero."""
_LEAST = 2.0**-60
"""Sum of all squares, below which too much may have been lost in fp32."""


class _Room(threading.local):
    """Scratch of this thread."""

    def __init__(self) -> None:
        self.sums, self.squares = torch.empty(_WIDTH), torch.empty(_WIDTH)
        # Cutting a tensor costs as much as adding thousands of elements.
        self.halves = {
            width: (self.sums[: width // 2], self.sums[width // 2 : width], self.sums[:width])
            for width in (_FEW << i for i in range((_WIDTH // _FEW).bit_length()))
        }


_room = _Room()


def norm(values: Tensor) -> float:
    """Euclidean length of a flat fp32 tensor, within a few roundings of fp32, also where squares leave its
    range.

    With a width of 2^16, or the largest power of two that is no more than numel: sum i is of the squares of
    elements i, i + width, and so on, in this order. Then the latter half of the sums is added to the former
    until 64 are left, which are added exactly. Squares that are too large or too small for fp32 are made and
    added in fp64 instead, one after the other.
    """
    numel = len(values)
    if numel < _FEW:
        return whole_norm(values.tolist())
    width = min(1 << numel.bit_length() - 1, _WIDTH)
    sums, room = _room.halves[width][2], _room.squares[:width]
    first, *others = torch.split(values, width)
    torch.mul(first, first, out=sums).add_(_FAINT)
    for part in others:
        if len(part) < width:
            sums, room = sums[: len(part)], room[: len(part)]
        sums.add_(torch.mul(part, part, out=room))
    while width > _FEW:
        former, latter, _ = _room.halves[width]
        former.add_(latter)
        width //= 2
    total = math.fsum(_room.halves[_FEW][2].tolist())
    return math.sqrt(total) if _LEAST < total < math.inf else _wide_norm(values)


def _wide_norm(values: Tensor) -> float:
    """Length by squares in fp64, where squares of fp32 are exact."""
    low, high = torch.aminmax(values)
    if low == high == 0:  # as most pieces of a sparse contribution
        return 0.0
    width = min(1 << len(values).bit_length() - 1, _WIDTH // 4)
    sums = torch.zeros(width, dtype=torch.float64)
    for part in torch.split(values, width):
        sums[: len(part)].add_(part.double().square_())
    while width > _FEW:
        width //= 2
        sums = sums[:width].add_(sums[width:])
    return math.sqrt(math.fsum(sums.tolist()))


def whole_norm(lengths: Iterable[float]) -> float:
    """Length of what has parts of these lengths: exact but for two roundings."""
    return math.sqrt(math.fsum(length * length for length in lengths))


def scratch(numel: int) -> Tensor:
    """Make room for `add_scaled` of up to so many elements."""
    return torch.empty(min(numel, TILE))


def add_scaled(total: Tensor, values: Tensor, factor: float, work: Tensor) -> None:
    """Add factor times values to total, all fp32 [numel], by way of `work` (`scratch`): each product is
    rounded, then each sum. The factor is rounded to fp32 before use."""
    factor = _rounded(factor)
    for part, sums in zip(torch.split(values, TILE), torch.split(total, TILE), strict=True):
        sums.add_(torch.mul(part, factor, out=work[: len(part)]))


def scale(values: Tensor, factor: float, out: Tensor) -> None:
    """Write factor times values into `out`, which may be `values`: fp32 [numel]. The factor is rounded to
    fp32 before use."""
    torch.mul(values, _rounded(factor), out=out)


def _rounded(factor: float) -> float:
    """Round to fp32. A tensor would do it by itself."""
    return ctypes.c_float(factor).value
