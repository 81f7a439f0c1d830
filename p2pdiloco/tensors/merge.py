"""Merging of pseudo-gradients: token weights and radial-directional averaging.

    RDA = (sum v |d| / sum v) * phi(sum w phi(d) / sum w),   phi(x) = x / |x|, phi(0) = 0
    w = tokens^2 / inner steps,   v = w * min(1, inner steps / H)

per piece of a tensor, where w has min(tokens, limit) * tokens for tokens^2, times the learner's trust weight,
and what is longer than a limit is cut to it: what one learner says, or sends, moves a merge no further than a
generous one's work (`MergeLimits`). Embeddings get the plain mean with weights v.

Pseudo-gradients of different learners are nearly orthogonal: a mean of M of them shrinks like 1/sqrt(M),
RDA keeps their length. In Decoupled DiLoCo v is w. Learners that made H inner steps, or more, count by it
here too; but one that is slower has gone less far, and counted by w it shortens everybody's stride by more
than it adds (docs/results.md).

Only sums are kept, never means, and the result is a function of the sums: so partial merges of groups
(`PartialSums`) combine to the merge of all, over any number of levels. That holds as well where
directions cancel out (`DEGENERATE`): the result is then the mean length times the mean direction as short as
it is, of the order of the plain mean, which the sums do not tell.

Everybody who has the contributions can make the same merge to the bit: all arithmetic is the portable one of
`tensors.codecs`, or Python's in fp64.

`Accumulator` has the sums. `scores` says how far each contribution agrees with the others. `add_up` merges
payloads that peers sent, which may lie elsewhere than in memory (`Payload`).

Rules: docs/protocol/rounds.md, section 5.
"""

from __future__ import annotations

import hashlib
import math
import operator
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, pairwise
from statistics import median, median_low
from typing import NamedTuple, Protocol

import torch
from msgspec import Struct
from torch import Tensor

from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import (
    FULL_TRUST,
    LEAST_SCORE,
    MAX_CONTRIBUTORS,
    MAX_WEIGHT,
    MOST_SCORE,
    NO_LIMITS,
    NOTHING,
    UNCLEAR,
    UNMEASURED,
    USUAL_SCORE,
    MergeLimits,
    can_be_weighed,
    weight_of,
)
from p2pdiloco.core.api.versions import FEWEST_REFERENCES, Mean, references
from p2pdiloco.errors import invariant
from p2pdiloco.hashing import Hash, content_digest
from p2pdiloco.tensors.codecs import (
    Buffer,
    Codec,
    Unsound,
    UnusableInputs,
    add_scaled,
    bytes_of,
    norm,
    scale,
    scratch,
    whole_norm,
    writable,
)
from p2pdiloco.tensors.layout import FragmentLayout

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
    (`core.api.types.weight_of`).

    Raises:
        Unsound: "implausible-tokens" (see `can_be_weighed`, which who admits contributions asks, too).
    """
    if not can_be_weighed(tokens, inner_steps):
        raise Unsound(Verdict.IMPLAUSIBLE_TOKENS, f"{tokens} tokens in {inner_steps} inner steps")
    return weight_of(tokens, inner_steps, most_tokens, trust)


def reach_of(weight: float, inner_steps: int, period: int) -> float:
    """Reach of a contribution of this weight, v: the weight, times inner steps / `period` where it has fewer
    than `period` (H)."""
    return weight * min(1.0, inner_steps / period)


def open_factor(seats: Iterable[float], others: Iterable[float], share: float) -> float:
    """Compute the factor of the weights of contributions without a seat, so that all of them together have at
    most `share` of a merge; 1 where no seat is in it. `seats`, `others`: weights of both kinds."""
    beside, alone = math.fsum(seats), math.fsum(others)
    if share >= 1.0 or not beside:
        return 1.0
    most = share / (1.0 - share) * beside
    return most / alone if alone > most else 1.0


class Lengths(Struct, frozen=True):
    """Lengths (L2) of a pseudo-gradient: of its pieces, in their order, and of the whole."""

    pieces: tuple[float, ...]
    whole: float


SEATLESS_OF_MEDIAN = 1.25
"""Length of a contribution without a seat at most, in those that are usual among the round's seats."""


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
        open_share: float = 1.0,
    ) -> None:
        """`open_share`: of a merge, that all contributions without a seat have at most."""
        self.layout, self._open_share = layout, open_share
        self._period, self._limits, self._longest = period, limits, limits.longest
        self._seatless_longest = limits.longest
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
        factor: float = 1.0,
        votes: bool = True,
    ) -> None:
        """Take in one pseudo-gradient, fp32 [layout.numel], not kept. `lengths`: if they were measured.
        `factor`: of its weight (`open_factor`). `votes`: its learner has a seat.

        Raises:
            Unsound: "implausible-tokens" (see `contribution_weight`), "out-of-range" (absurdly long).
        """
        invariant(delta.shape == (self.layout.numel,), "a pseudo-gradient of another fragment")
        weight = contribution_weight(tokens, inner_steps, self._limits.most_tokens, trust)
        reach = factor * reach_of(weight, inner_steps, self._period)
        weight *= factor
        lengths = lengths or self.measure(delta)
        shown = self._cut(lengths.whole, self._longest if votes else self._seatless_longest)
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
        if self.contributions:
            add_scaled(self.sums[part], delta[part], factor, self._work)
        else:
            scale(delta[part], factor, out=self.sums[part])

    def factors(self, parts: Iterable[Work]) -> list[float]:
        """Compute the factor of each contribution to a merge (`open_factor`). Raises: see
        `contribution_weight`."""
        return open_factors(parts, self._limits.most_tokens, self._open_share)

    def measure(self, delta: Tensor) -> Lengths:
        """Measure a pseudo-gradient, fp32 [layout.numel]."""
        pieces = tuple(norm(delta[part]) for part in self._slices)
        return Lengths(pieces, whole_norm(pieces))

    def compare(
        self, lengths: Sequence[float], inner_steps: Sequence[int], votes: Sequence[bool] = ()
    ) -> None:
        """Cut what comes by what is usual among contributions of these lengths, too, if the limits say so:
        the lower median of those whose learners have seats (`core.api.versions.references`), each as if it
        was of H inner steps. Those without any length are no measure. Whoever has no seat is cut to hardly
        more than that: the last update, sent back at three times its length, is what all agree with most."""
        steps = (min(1.0, each / self._period) for each in inner_steps)
        rows = zip(lengths, steps, votes or [False] * len(lengths), strict=True)
        there = [(length / math.sqrt(share), vote) for length, share, vote in rows if length > 0]
        usual = references([each for each, _ in there], [vote for _, vote in there])
        if not self._limits.of_median or len(usual) < FEWEST_REFERENCES:
            return
        middle = median_low(usual)
        self._longest = min(self._longest, self._limits.of_median * middle)
        self._seatless_longest = min(self._longest, SEATLESS_OF_MEDIAN * middle)

    def _cut(self, length: float, longest: float) -> float:
        """Share that is left of a pseudo-gradient of this length: 1, as a rule."""
        if length > self._limits.absurd:
            raise Unsound(
                Verdict.OUT_OF_RANGE, f"length {length:.3g}, the limit is {self._limits.longest:.3g}"
            )
        if length <= longest:
            return 1.0
        self.cut.append(self.contributions)
        return longest / length

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


# --- agreement of a round's contributions ------------------------------------------------------------
#
# Pseudo-gradients of honest learners are nearly orthogonal, but each has some of the direction that all
# share. So the median of a contribution's cosines to all others is much the same for all who are honest,
# whatever a minority does: liars that agree with each other are no majority of anybody's others. A score is
# that median, as a multiple of the round's median of it. Strangers can be a majority, so the others are
# seats; where there are fewer than three of them nothing is measured.
#
# Cosines are taken on a sample of blocks. What draws it is not known before all contributions are in, so that
# nobody can be honest there and lie elsewhere. Whoever has the contributions finds the same scores: samples
# are rounded to whole numbers, whose products and sums are exact in fp64 in any order.
#
# Rules: docs/protocol/weights.md, section 5.

SAMPLE_BLOCK = 256
"""Elements of a block, that are next to each other."""
SAMPLE_BLOCKS = 256
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
        blocks, self._numel = numel // SAMPLE_BLOCK, numel
        self._blocks = torch.tensor(_drawn(blocks, seed)) if blocks > SAMPLE_BLOCKS else None

    def of(self, values: Tensor) -> Tensor:
        """Copy the sample of these values, fp32 [numel]: fp64 [sample]."""
        if self._blocks is None:
            return values.double()
        whole = values[: self._numel - self._numel % SAMPLE_BLOCK].view(-1, SAMPLE_BLOCK)
        return whole.index_select(0, self._blocks).flatten().double()


def _drawn(blocks: int, seed: bytes) -> list[int]:
    """Without Python's own random numbers, which its versions draw differently."""
    stream = hashlib.shake_256(seed).digest(PLACE_BYTES * SAMPLE_BLOCKS)
    ends = [place * blocks // SAMPLE_BLOCKS for place in range(SAMPLE_BLOCKS + 1)]
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
    few, and `UNCLEAR`, where not even most of them agree. `votes`: whose learners have seats (nobody's):
    they are the others with whom all are compared (`core.api.versions.references`)."""
    asked = references(range(len(samples)), votes or [False] * len(samples))
    if not asked:
        return [UNMEASURED] * len(samples)
    rows = torch.stack([_whole(sample) for sample in samples])
    products = [[int(each) for each in row] for row in (rows @ rows.T).tolist()]
    squares = [row[n] for n, row in enumerate(products)]
    cosines = [
        [_cosine(each, one * other) for each, other in zip(row, squares, strict=True)]
        for row, one in zip(products, squares, strict=True)
    ]
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
    """`squares`: product of both squared lengths."""
    return product / math.sqrt(squares) if squares else 0.0


# --- partial merges: the sums of one group, for the group above --------------------------------------

ROUNDING = 1.03
"""Factor by which a sum of thousands of fp32 terms may exceed its bound and still be honest."""
LONGEST_PERIOD = 100_000
"""Largest H of any run: a contribution's reach is at least such a part of its weight."""
WEIGHT_TOLERANCE = 1e-9
"""Relative error allowed of a sum of weights: they are summed in fp64, in the merge's order, which the label
does not tell."""


Work = tuple[int, int] | tuple[int, int, int] | tuple[int, int, int, bool]
"""Tokens, inner steps and trust weight of a contribution, and whether its learner has a seat: of one that is
trusted in full, and has none, where these are left out."""


def open_factors(parts: Iterable[Work], most_tokens: int, share: float) -> list[float]:
    """Compute the factor of each weight in a merge (`open_factor`). Raises: see `contribution_weight`."""
    weights = [
        (contribution_weight(tokens, steps, most_tokens, *rest[:1]), bool(rest[1:] and rest[1]))
        for tokens, steps, *rest in parts
    ]
    seats, others = ([weight for weight, seat in weights if seat is is_seat] for is_seat in (True, False))
    factor = open_factor(seats, others, share)
    return [1.0 if seat else factor for _, seat in weights]


class PartialSums(Struct, frozen=True):
    """Decoded payload of a partial merge, as `Accumulator.combine` takes it.

    All little-endian, no header; the size follows from the layout:

        float64  weight           sum of w
        float64  reach            sum of v
        float64  norms [pieces]   sum of v |d| of every piece, 0 for embeddings
        uint32   contributions
        float32  sums [numel]     sum of v d of embeddings, of w phi(d) of all other pieces

    Sums in full precision compose exactly over any number of levels; four bytes a parameter are paid once per
    group, not per contribution. Where these bytes come from a peer, everything in them is checked
    (`check_partial`): what passes could be the sums of acceptable contributions, so a syncer between cannot
    push a merge further than those could whose labels it shows.

    Rules: docs/protocol/groups.md, section 3.
    """

    weight: float
    reach: float
    contributions: int
    norms: tuple[float, ...]
    sums: Tensor
    """Sums, fp32 [numel], that share the payload's memory."""


def partial_bytes(layout: FragmentLayout) -> int:
    """Size of a partial merge of this fragment."""
    return _head(layout).size + 4 * layout.numel


def encode_partial(accumulator: Accumulator) -> bytearray:
    """Encode an accumulator's sums. At least one contribution is in."""
    invariant(accumulator.contributions > 0, "a partial merge of nothing")
    head = _head(accumulator.layout)
    payload = bytearray(partial_bytes(accumulator.layout))
    head.pack_into(
        payload, 0, accumulator.weight, accumulator.reach, *accumulator.norms, accumulator.contributions
    )
    memoryview(payload)[head.size :] = bytes_of(accumulator.sums)
    return payload


def decode_partial(
    layout: FragmentLayout, payload: Payload, storage: Tensor | None = None, longest: float = math.inf
) -> PartialSums:
    """Decode the sums in a payload, which anybody may have sent. Where the payload is not in memory, they are
    read into `storage` (fp32, at least numel elements), or a new tensor. `longest`: length of the longest
    contribution in it.

    Raises:
        Unsound: "wrong-size", "non-finite", "implausible-weight", "out-of-range" (sums that no
            contributions of that weight have). StorageError.
    """
    size = size_of(payload)
    if size != partial_bytes(layout):
        raise Unsound(
            Verdict.WRONG_SIZE, f"{size} bytes of a partial merge, expected {partial_bytes(layout)}"
        )
    head = _head(layout)
    if isinstance(payload, Buffer):
        first = writable(payload)
        sums = torch.frombuffer(first, dtype=torch.float32, offset=head.size, count=layout.numel)
    else:
        first = bytearray(head.size)
        payload.read(0, memoryview(first))
        sums = (torch.empty(layout.numel) if storage is None else storage)[: layout.numel]
        payload.read(head.size, bytes_of(sums))
    weight, reach, *norms, contributions = head.unpack_from(first)
    found = PartialSums(weight, reach, contributions, tuple(norms), sums)
    _check(layout, found, longest)
    return found


def check_partial(
    layout: FragmentLayout,
    payload: Payload,
    work: Iterable[Work],
    period: int,
    storage: Tensor | None = None,
    limits: MergeLimits = NO_LIMITS,
    open_share: float = 1.0,
    leaf: bool = True,
) -> None:
    """Judge a partial merge against its label: `work` has every contribution, `period` is H, `limits` are the
    label's, `storage`: see `decode_partial`. `open_share`: of a merge, that those without a seat have.

    In a partial of partials (`leaf` is false) they have it in each leaf, and leaves may have been merged by
    earlier limits. So only the most that it can weigh is known: what it would as one leaf.

    Raises:
        RemoteError: as `decode_partial`; "implausible-tokens"; "wrong-weight" (not the sum of the
            contributions' weights) or "wrong-count".
    """
    found, work = decode_partial(layout, payload, storage, limits.longest), list(work)
    factors = open_factors(work, limits.most_tokens, open_share)
    weights = [contribution_weight(each[0], each[1], limits.most_tokens, *each[2:3]) for each in work]
    weight = math.fsum(map(operator.mul, factors, weights))
    if found.contributions != len(weights):
        raise Unsound(Verdict.WRONG_COUNT, f"{found.contributions} contributions, {len(weights)} labels")
    if not _adds_up(found.weight, weight, leaf):
        raise Unsound(Verdict.WRONG_WEIGHT, f"{found.weight:.9g}, the labels say {weight:.9g}")
    reach = math.fsum(
        (factor if leaf else 1.0) * reach_of(weight, each[1], period)
        for factor, weight, each in zip(factors, weights, work, strict=True)
    )
    if not _adds_up(found.reach, reach, leaf):
        raise Unsound(Verdict.WRONG_WEIGHT, f"a reach of {found.reach:.9g}, the labels say {reach:.9g}")


def _adds_up(found: float, labels: float, exactly: bool) -> bool:
    """Tell whether a sum is what the labels say, or at most that."""
    return math.isclose(found, labels, rel_tol=WEIGHT_TOLERANCE) or (not exactly and 0 < found < labels)


def _head(layout: FragmentLayout) -> struct.Struct:
    return struct.Struct(f"<2d{len(layout.pieces)}dI")


def _check(layout: FragmentLayout, found: PartialSums, longest: float) -> None:
    weight, reach = found.weight, found.reach
    if not math.isfinite(weight + reach) or not all(map(math.isfinite, found.norms)):
        raise Unsound(Verdict.NON_FINITE, "in the sums of a partial merge")
    # contribution_weight is at most MAX_WEIGHT, and at least a token's in as many inner steps as fit a count.
    if not 1 <= found.contributions <= MAX_CONTRIBUTORS or not (
        2.0**-62 <= weight <= found.contributions * MAX_WEIGHT
        and weight / LONGEST_PERIOD <= reach <= (1 + WEIGHT_TOLERANCE) * weight
    ):
        raise Unsound(
            Verdict.IMPLAUSIBLE_WEIGHT,
            f"{weight:.3g}, reach {reach:.3g} of {found.contributions} contributions",
        )
    for piece, radius in zip(layout.pieces, found.norms, strict=True):
        part = found.sums[piece.fragment_offset : piece.fragment_offset + piece.numel]
        low, high = (float(end) for end in torch.aminmax(part))
        peak = max(-low, high) if low == low and high == high else math.nan
        if not math.isfinite(peak):
            raise Unsound(Verdict.NON_FINITE, f"in the sums of {piece.tensor}")
        if piece.plain_mean:
            sound = radius == 0.0 and peak <= ROUNDING * min(MAX_MAGNITUDE, longest) * reach
        else:
            most = min(longest, MAX_MAGNITUDE * math.sqrt(piece.numel))
            length = norm(part)
            sound = length <= ROUNDING * weight and MIN_LENGTH * length <= ROUNDING * LONGEST_PERIOD * radius
            sound = sound and 0.0 <= radius <= ROUNDING * most * reach
        if not sound:
            raise Unsound(Verdict.OUT_OF_RANGE, f"the sums of {piece.tensor}")


# --- payloads, in memory or not ----------------------------------------------------------------------

READ_TILE = 1 << 20
"""Elements of a stored payload in memory at one time; a multiple of every codec's block."""
_READ_BYTES = 1 << 20


class Stored(Protocol):
    """Payload that is not in memory (`adapters.data_dir.Spool`): it is read tile by tile."""

    @property
    def nbytes(self) -> int:
        """Size of the payload."""

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` from this offset on, from any thread. Raises: StorageError."""


Payload = Buffer | Stored


def size_of(payload: Payload) -> int:
    """Bytes of a payload, wherever it is."""
    return memoryview(payload).nbytes if isinstance(payload, Buffer) else payload.nbytes


def memory_bytes(payload: Payload) -> int:
    """Bytes of the payload that are in memory."""
    return memoryview(payload).nbytes if isinstance(payload, Buffer) else 0


def digest_of(payload: Payload) -> bytes:
    """Digest of a payload. Raises: StorageError."""
    if isinstance(payload, Buffer):
        return content_digest(payload)
    found, room = Hash(), memoryview(bytearray(_READ_BYTES))
    for start in range(0, payload.nbytes, _READ_BYTES):
        part = room[: payload.nbytes - start]
        payload.read(start, part)
        found.update(part)
    return found.digest()


def parts_of(chosen: Codec, payload: Payload, numel: int) -> Iterator[tuple[Buffer, int, int]]:
    """Parts of a payload of numel elements: (payload of elements start to stop, start, stop).

    A payload in memory is one part. Another one comes in tiles, each valid until the next.

    Raises:
        Unsound: "wrong-size". StorageError.
    """
    if isinstance(payload, Buffer):
        yield payload, 0, numel
        return
    size = chosen.encoded_bytes(numel)
    if payload.nbytes != size:
        raise Unsound(Verdict.WRONG_SIZE, f"{payload.nbytes} bytes of {chosen.name}, expected {size}")
    room = memoryview(bytearray(chosen.encoded_bytes(min(numel, READ_TILE))))
    for start in range(0, numel, READ_TILE):
        stop = min(start + READ_TILE, numel)
        have = 0
        for offset, length in chosen.spans(start, stop, numel):
            payload.read(offset, room[have : have + length])
            have += length
        yield room[:have], start, stop


def check_magnitude(chosen: Codec, payload: Buffer, numel: int, limit: float = MAX_MAGNITUDE) -> None:
    """Judge an encoding of `numel` values by its largest.

    Raises:
        Unsound: "out-of-range", and as `Codec.peak`.
    """
    peak = chosen.peak(payload, numel)
    if peak > 1.01 * limit:  # int8's bound is looser than its values, 128 for 127 parts
        raise Unsound(Verdict.OUT_OF_RANGE, f"a magnitude of {peak:.3g}")


# --- inputs of a merge, and what is found out about them ---------------------------------------------

NEXT_TO_NOTHING = 1 << 14
"""Times that a contribution is shorter than the lower median of its round, if it is next to nothing: honest
work of one inner step in hundreds is not."""


class Input(NamedTuple):
    """Contribution to a merge."""

    payload: Payload
    tokens: int
    inner_steps: int
    trust: int = FULL_TRUST
    """Trust weight (`core.api.types.weight_of`)."""
    mean: Mean | None = None
    """Agreement of its learner so far, which gives the trust weight with the score that is found here."""
    votes: bool = False
    """True: its learner has a seat, and it is a measure of all (`core.api.versions.references`)."""


Given = (
    tuple[Payload, int, int]
    | tuple[Payload, int, int, int]
    | tuple[Payload, int, int, int, Mean | None]
    | tuple[Payload, int, int, int, Mean | None, bool]
)
"""An input: of a learner that is trusted in full, where it does not say."""


class Findings(Struct, frozen=True):
    """Findings of a merge about its inputs, in their order."""

    cut: tuple[int, ...]
    """Indices of those that were cut: too long."""
    lengths: tuple[float, ...]
    scores: tuple[int, ...]
    """Scores (`scores`)."""


def add_up(
    accumulator: Accumulator,
    codec: Codec,
    inputs: Sequence[Given],
    partials: Sequence[Payload],
    scratch: Tensor,
    seed: bytes,
) -> Findings:
    """Add contributions, encoded by `codec`, and then partial merges to the sums. `scratch`: fp32 [numel];
    `seed` draws the sample on which contributions are compared.

    Raises:
        UnusableInputs: those at fault, by their place among both.
        StorageError: a payload that is not in memory cannot be read.
    """
    sample = Sample(accumulator.layout.numel, seed)
    lengths: list[Lengths] = []
    samples: list[Tensor] = []
    faults: dict[int, Unsound] = {}
    for index, given in enumerate(inputs):
        try:
            decode_contribution(codec, given[0], scratch)
        except Unsound as error:
            faults[index] = error
        else:
            lengths.append(accumulator.measure(scratch))
            samples.append(sample.of(scratch))
    given_scores: tuple[int, ...] = ()
    if not faults:
        all_given = [Input(*given) for given in inputs]
        given_scores = _scored(lengths, samples, [each.votes for each in all_given])
        faults = _add_inputs(accumulator, codec, all_given, lengths, given_scores, scratch)
    for index, payload in enumerate(partials, len(inputs)):
        try:
            part = decode_partial(accumulator.layout, payload, scratch)
        except Unsound as error:
            faults[index] = error
        else:
            accumulator.combine(part.weight, part.reach, part.contributions, part.norms, part.sums)
    if faults:
        raise UnusableInputs(faults)
    return Findings(tuple(accumulator.cut), tuple(each.whole for each in lengths), given_scores)


def _scored(lengths: Sequence[Lengths], samples: Sequence[Tensor], votes: Sequence[bool]) -> tuple[int, ...]:
    """Score contributions of these lengths. Those that are next to nothing beside what is usual are compared
    with nobody."""
    some = [(each.whole, vote) for each, vote in zip(lengths, votes, strict=True) if each.whole > 0]
    usual = references([length for length, _ in some], [vote for _, vote in some])
    least = median_low(usual) / NEXT_TO_NOTHING if usual else 0.0
    there = [each.whole > least for each in lengths]
    found = iter(scores(list(compress(samples, there)), list(compress(votes, there))))
    return tuple(next(found) if is_there else NOTHING for is_there in there)


def _add_inputs(
    accumulator: Accumulator,
    codec: Codec,
    inputs: Sequence[Input],
    lengths: Sequence[Lengths],
    given_scores: Sequence[int],
    scratch: Tensor,
) -> dict[int, Unsound]:
    """Returns what is at fault."""
    faults: dict[int, Unsound] = {}
    whole = [each.whole for each in lengths]
    accumulator.compare(whole, [each.inner_steps for each in inputs], [each.votes for each in inputs])
    trusts = [
        each.trust if each.mean is None else each.mean.trust(score)
        for each, score in zip(inputs, given_scores, strict=True)
    ]
    work = [(e.tokens, e.inner_steps, trust, e.votes) for e, trust in zip(inputs, trusts, strict=True)]
    sound = [each if can_be_weighed(each[0], each[1]) else (1, 1, 1, False) for each in work]
    factors = accumulator.factors(sound)  # what cannot be weighed is found below, and then there is no merge
    for index, each in enumerate(inputs):
        decode_contribution(codec, each.payload, scratch)
        try:
            accumulator.add(
                scratch,
                each.tokens,
                each.inner_steps,
                trusts[index],
                lengths[index],
                factors[index],
                each.votes,
            )
        except Unsound as error:
            faults[index] = error
    return faults


def decode_contribution(codec: Codec, payload: Payload, out: Tensor) -> None:
    """Decode a contribution, fp32 [numel]. Raises: Unsound, StorageError."""
    for content, start, stop in parts_of(codec, payload, len(out)):
        check_magnitude(codec, content, stop - start)
        codec.decode(content, out[start:stop])
