"""Which samples a learner takes, in which order.

Every epoch all training samples are put into an order that is a pseudo-random permutation keyed by (run
seed, epoch). A peer walks along that endless sequence from a start that is the hash of its id, and nobody has
to know who else is there: two peers see the same sample only when one has walked to where the other began.
Starts are random, so two may lie close together. The permutation is a Feistel network: position -> sample in
O(1), nothing stored, so a stream goes on at any position at once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from p2pdiloco.errors import UserError
from p2pdiloco.tasks.split import hash64
from p2pdiloco.tasks.task import Samples

if TYPE_CHECKING:
    from p2pdiloco.tasks.task import Batch, Indices

_ROUNDS = 4

Array = NDArray[Any]


class Stream:
    """A learner's endless sequence of training samples (module docstring)."""

    def __init__(self, samples: Samples, seed: int, peer: str, position: int = 0) -> None:
        """`position`: samples that this peer has taken before.

        Raises:
            UserError: there is nothing to train on.
        """
        self._samples, self._count = samples, len(samples)
        if self._count < 1:
            raise UserError("there is nothing to train on", "give more with --data")
        self._seed = seed
        self._start = hash64(f"stream/{seed}/{peer}") % self._count
        self.position = position

    def take(self, samples: int) -> Batch:
        """The next so many samples."""
        at = self._start + self.position + np.arange(samples)
        self.position += samples
        epochs, places = np.divmod(at, self._count)
        indices = np.empty(samples, dtype=np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            indices[chosen] = permuted(places[chosen], self._count, f"{self._seed}/{epoch}")
        return self._samples.batch(indices)


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
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << shift) | right


def _mixed(values: Array) -> Array:
    """The finaliser of splitmix64: every bit of the result depends on every bit of the value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return cast(Array, values ^ (values >> np.uint64(31)))
