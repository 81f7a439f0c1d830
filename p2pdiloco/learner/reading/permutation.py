"""Pseudo-random order of any number of samples, of which any part is known, none stored."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from p2pdiloco.tasks.documents import hash64

if TYPE_CHECKING:
    from p2pdiloco.tasks.task import Indices

_ROUNDS = 4

Array = NDArray[Any]


def permuted(places: Array, size: int, key: str) -> Indices:
    """A keyed pseudo-random permutation of range(size), at these places: int64, same shape.

    A balanced Feistel network over the next even power of two; results beyond `size` walk on along their
    cycle until they are inside it (at most 4 tries on average).
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [np.uint64(hash64(f"permutation/{key}/{i}")) for i in range(_ROUNDS)]
    values = _feistel(places.astype(np.uint64), half_bits, keys)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], half_bits, keys)
    return values.astype(np.int64)


def _feistel(values: Array, half_bits: int, keys: list[np.uint64]) -> Array:
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (mixed(right ^ key) & mask)
    return (left << shift) | right


def mixed(values: Array) -> Array:
    """The finaliser of splitmix64: every bit of the result depends on every bit of the value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return cast(Array, values ^ (values >> np.uint64(31)))
