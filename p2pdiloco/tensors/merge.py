"""Merging pseudo-gradients: token weights and radial-directional averaging, one contribution at a time.

    RDA = (sum w |d| / sum w) * phi(sum w phi(d) / sum w),   phi(x) = x / |x|, phi(0) = 0

per piece of a tensor; embeddings get the plain weighted mean (Decoupled DiLoCo). Pseudo-gradients of
different learners are nearly orthogonal: a mean of M of them shrinks like 1/sqrt(M), RDA keeps their length.
Sums are kept, not means, so partial merges of groups combine to the merge of all.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from p2pdiloco.errors import RemoteError, invariant
from p2pdiloco.tensors.layout import FragmentLayout

DEGENERATE = 1e-3
"""Mean directions shorter than this cancel out (256 orthogonal ones have 0.06): fall back to the mean."""
MAX_WEIGHT = 2.0**62
"""Two thousand million tokens in one inner step. With `MIN_LENGTH` it keeps every sum inside fp32's range."""
MIN_LENGTH = 2.0**-60
"""A shorter pseudo-gradient is no longer than one rounding of any parameter: it has no direction."""


def contribution_weight(tokens: int, inner_steps: int) -> float:
    """w = tokens^2 / inner_steps: tokens times tokens per inner step.

    Raises:
        RemoteError: "implausible-tokens", without tokens or inner steps, or above `MAX_WEIGHT`.
    """
    if tokens < 1 or inner_steps < 1 or tokens * tokens > MAX_WEIGHT * inner_steps:
        raise RemoteError("implausible-tokens", f"{tokens} tokens in {inner_steps} inner steps")
    return tokens * tokens / inner_steps


class Accumulator:
    """Sums of w, w |d|, w phi(d) and w d of one fragment. Memory: two fp32 fragments for any number of peers.

    `storage`: two fp32 buffers of at least layout.numel elements to work in, instead of new ones.
    """

    def __init__(self, layout: FragmentLayout, storage: tuple[Tensor, Tensor] | None = None) -> None:
        self.layout = layout
        self.weight = 0.0
        self.contributions = 0
        self._norms = [0.0] * len(layout.pieces)
        if storage is None:
            storage = (torch.empty(layout.numel), torch.empty(layout.numel))
        self._directions = storage[0][: layout.numel].zero_()
        self._sums = storage[1][: layout.numel].zero_()

    def add(self, delta: Tensor, tokens: int, inner_steps: int) -> None:
        """Take in one pseudo-gradient, fp32 [layout.numel], not kept.

        Raises:
            RemoteError: "implausible-tokens" (see `contribution_weight`).
        """
        invariant(delta.shape == (self.layout.numel,), "a pseudo-gradient of another fragment")
        weight = contribution_weight(tokens, inner_steps)
        self.weight += weight
        self.contributions += 1
        self._sums.add_(delta, alpha=weight)
        for index, piece in enumerate(self.layout.pieces):
            if piece.embedding:
                continue
            part = slice(piece.fragment_offset, piece.fragment_offset + piece.numel)
            length = norm(delta[part])
            if length >= MIN_LENGTH:
                self._norms[index] += weight * length
                self._directions[part].add_(delta[part], alpha=weight / length)

    def combine(self, other: Accumulator) -> None:
        """Take in another partial merge of the same fragment, as if its contributions had been added here."""
        invariant(other.layout == self.layout, "partial merges of two different fragments")
        self.weight += other.weight
        self.contributions += other.contributions
        self._norms = [mine + theirs for mine, theirs in zip(self._norms, other._norms, strict=True)]
        self._directions.add_(other._directions)
        self._sums.add_(other._sums)

    def result(self, out: Tensor) -> None:
        """The merged pseudo-gradient into `out`, fp32 [layout.numel]. At least one contribution is in."""
        invariant(self.contributions > 0, "a merge of nothing")
        torch.mul(self._sums, 1.0 / self.weight, out=out)
        for index, piece in enumerate(self.layout.pieces):
            if piece.embedding:
                continue
            part = slice(piece.fragment_offset, piece.fragment_offset + piece.numel)
            length = norm(self._directions[part])
            if length > DEGENERATE * self.weight:
                radius = self._norms[index] / self.weight
                torch.mul(self._directions[part], radius / length, out=out[part])


def norm(values: Tensor) -> float:
    """Euclidean length of an fp32 tensor, also where squares leave fp32's range."""
    fast = float(torch.linalg.vector_norm(values))
    if 1e-15 < fast < math.inf or not values.numel():
        return fast
    return float(torch.linalg.vector_norm(values.double()))
