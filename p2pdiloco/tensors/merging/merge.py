"""Merging of pseudo-gradients: token weights and radial-directional averaging.

    RDA = (sum v |d| / sum v) * phi(sum w phi(d) / sum w),   phi(x) = x / |x|, phi(0) = 0
    w = tokens^2 / inner steps,   v = w * min(1, inner steps / H)

per piece of a tensor, where w has min(tokens, limit) * tokens for tokens^2, times the learner's trust weight,
and what is longer than a limit is cut to it: what one learner says, or sends, moves a merge no further than a
generous one's work (`core.chain.scale`). Embeddings get the plain mean with weights v.

Pseudo-gradients of different learners are nearly orthogonal: a mean of M of them shrinks like 1/sqrt(M),
RDA keeps their length. In Decoupled DiLoCo v is w. Learners that made H inner steps, or more, count by it
here too; but one that is slower has gone less far, and counted by w it shortens everybody's stride by more
than it adds (docs/results.md).

Only sums are kept, never means, and the result is a function of the sums: so partial merges of groups
(`tensors.merging.partial`) combine to the merge of all, over any number of levels. That holds as well where
directions cancel out (`DEGENERATE`): the result is then the mean length times the mean direction as short as
it is, of the order of the plain mean, which the sums do not tell.

Whoever has the contributions can make the same merge to the bit: all arithmetic is that of
`tensors.portable`, or Python's in fp64.

Rules: docs/protocol/rounds.md, section 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from msgspec import Struct
from torch import Tensor

from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import FULL_TRUST, NO_LIMITS, MergeLimits, can_be_weighed, weight_of
from p2pdiloco.core.api.versions import FEWEST, references
from p2pdiloco.errors import invariant
from p2pdiloco.tensors.layout import FragmentLayout
from p2pdiloco.tensors.portable import add_scaled, norm, scale, scratch, whole_norm
from p2pdiloco.tensors.unsound import Unsound

DEGENERATE = 1e-3
"""Least length of a mean direction that is stretched: shorter ones cancel out (256 orthogonal ones have
0.06)."""
MIN_LENGTH = 2.0**-60
"""Least length of a pseudo-gradient that has a direction. A shorter one is below one rounding of any
parameter."""
MAX_MAGNITUDE = 2.0**40
"""Largest value of a contribution or update. No honest pseudo-gradient has larger ones, and below it no sum
of a merge, and no state of a run, can leave fp32's range: nobody can push the swarm to infinity with finite
numbers."""


def contribution_weight(
    tokens: int, inner_steps: int, most_tokens: int = NO_LIMITS.most_tokens, trust: int = FULL_TRUST
) -> float:
    """Weight of a contribution, w = tokens^2 / inner_steps: tokens times tokens per inner step (Decoupled
    DiLoCo). Of the tokens at most `most_tokens` weigh, and of that the share that its learner is trusted with
    (`core.api.trust_weight`).

    Raises:
        Unsound: "implausible-tokens" (see `can_be_weighed`, which who admits contributions asks, too).
    """
    if not can_be_weighed(tokens, inner_steps):
        raise Unsound(Verdict.IMPLAUSIBLE_TOKENS, f"{tokens} tokens in {inner_steps} inner steps")
    return weight_of(tokens, inner_steps, most_tokens, trust)


def contribution_reach(
    tokens: int,
    inner_steps: int,
    period: int,
    most_tokens: int = NO_LIMITS.most_tokens,
    trust: int = FULL_TRUST,
) -> float:
    """Reach of a contribution, v: its weight, times inner steps / `period` where it has fewer than `period`
    (H). Raises: see `contribution_weight`."""
    weight = contribution_weight(tokens, inner_steps, most_tokens, trust)
    return weight * min(1.0, inner_steps / period)


class Lengths(Struct, frozen=True):
    """Lengths (L2) of a pseudo-gradient: of its pieces, in their order, and of the whole."""

    pieces: tuple[float, ...]
    whole: float

    @classmethod
    def of(cls, delta: Tensor, parts: Sequence[slice]) -> Lengths:
        """Measure one whose pieces are there: fp32 [numel]."""
        pieces = tuple(norm(delta[part]) for part in parts)
        return cls(pieces, whole_norm(pieces))


class Accumulator:
    """Sums over the contributions to one fragment. Memory: one fp32 fragment and a tile, for any number of
    them.

    `period` is H; `storage`: an fp32 buffer of at least layout.numel elements to work in, not a new one.
    """

    def __init__(
        self,
        layout: FragmentLayout,
        period: int,
        storage: Tensor | None = None,
        limits: MergeLimits = NO_LIMITS,
    ) -> None:
        self.layout = layout
        self._period, self._limits, self._longest = period, limits, limits.longest
        self.weight = 0.0
        """Sum of w."""
        self.reach = 0.0
        """Sum of v."""
        self.contributions = 0
        self.cut: list[int] = []
        """Indices of contributions that were cut, as they were too long, in the order in which they came."""
        self.norms = [0.0] * len(layout.pieces)
        """Sum of v |d| of every piece; 0 for embeddings."""
        self._slices = [
            slice(piece.fragment_offset, piece.fragment_offset + piece.numel) for piece in layout.pieces
        ]
        buffer = torch.empty(layout.numel) if storage is None else storage
        self.sums = buffer[: layout.numel]
        """Sum of v d of embeddings, of w phi(d) of all other pieces: fp32 [numel]. Anything before the first
        contribution, which overwrites it."""
        self._work = scratch(layout.numel)

    def add(
        self,
        delta: Tensor,
        tokens: int,
        inner_steps: int,
        trust: int = FULL_TRUST,
        lengths: Lengths | None = None,
    ) -> None:
        """Take in one pseudo-gradient, fp32 [layout.numel], not kept. `lengths`: if they were measured.

        Raises:
            Unsound: "implausible-tokens" (see `contribution_weight`), "out-of-range" (absurdly long).
        """
        invariant(delta.shape == (self.layout.numel,), "a pseudo-gradient of another fragment")
        most_tokens = self._limits.most_tokens
        weight = contribution_weight(tokens, inner_steps, most_tokens, trust)
        reach = contribution_reach(tokens, inner_steps, self._period, most_tokens, trust)
        lengths = lengths or self.measure(delta)
        shown = self._cut(lengths.whole)
        pieces = zip(self.layout.pieces, self._slices, lengths.pieces, strict=True)
        for index, (piece, part, length) in enumerate(pieces):
            if piece.plain_mean:
                self._add(part, delta, reach * shown)
            elif length >= MIN_LENGTH:
                self.norms[index] += reach * shown * length
                self._add(part, delta, weight / length)
            elif not self.contributions:
                self.sums[part].zero_()
        self.weight += weight
        self.reach += reach
        self.contributions += 1

    def _add(self, part: slice, delta: Tensor, factor: float) -> None:
        """Add a part of a pseudo-gradient, times this, to the sums."""
        if self.contributions:
            add_scaled(self.sums[part], delta[part], factor, self._work)
        else:
            scale(delta[part], factor, out=self.sums[part])

    def measure(self, delta: Tensor) -> Lengths:
        """Measure a pseudo-gradient, fp32 [layout.numel]."""
        return Lengths.of(delta, self._slices)

    def compare(
        self, lengths: Sequence[float], inner_steps: Sequence[int], votes: Sequence[bool] = ()
    ) -> None:
        """Cut what comes by what is usual among contributions of these lengths, too, if the limits say so:
        the lower median of those whose learners vote, or of all (`core.api.references`), each as if it was of
        H inner steps. Those without any length are no measure."""
        steps = (min(1.0, each / self._period) for each in inner_steps)
        rows = zip(lengths, steps, votes or [False] * len(lengths), strict=True)
        there = [(length / math.sqrt(share), vote) for length, share, vote in rows if length > 0]
        usual = sorted(references([each for each, _ in there], [vote for _, vote in there]))
        if not self._limits.of_median or len(usual) < FEWEST:
            return
        self._longest = min(self._longest, self._limits.of_median * usual[(len(usual) - 1) // 2])

    def _cut(self, length: float) -> float:
        """Find the share that is left of a pseudo-gradient of this length: 1, as a rule."""
        if length > self._limits.absurd:
            raise Unsound(
                Verdict.OUT_OF_RANGE, f"length {length:.3g}, the limit is {self._limits.longest:.3g}"
            )
        if length <= self._longest:
            return 1.0
        self.cut.append(self.contributions)
        return self._longest / length

    def combine(
        self, weight: float, reach: float, contributions: int, norms: Sequence[float], sums: Tensor
    ) -> None:
        """Take in the sums of a partial merge of this fragment, as if its contributions were added here."""
        invariant(sums.shape == self.sums.shape, "a partial merge of another fragment")
        if self.contributions:
            self.sums.add_(sums)
        else:
            self.sums.copy_(sums)
        self.weight += weight
        self.reach += reach
        self.contributions += contributions
        self.norms = [mine + theirs for mine, theirs in zip(self.norms, norms, strict=True)]

    def result(self, out: Tensor) -> None:
        """Write the merged pseudo-gradient into `out`, fp32 [layout.numel]. At least one contribution is
        in."""
        invariant(self.contributions > 0, "a merge of nothing")
        for index, (piece, part) in enumerate(zip(self.layout.pieces, self._slices, strict=True)):
            factor = 1.0 / self.reach
            if not piece.plain_mean:
                length = norm(self.sums[part])
                shown = length if length > DEGENERATE * self.weight else self.weight
                factor = self.norms[index] / self.reach / shown
            scale(self.sums[part], factor, out=out[part])
