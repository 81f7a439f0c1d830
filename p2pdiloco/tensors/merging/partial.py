"""Partial merges as payloads: the sums of one group's contributions for the group above.

All little-endian, no header; the size follows from the layout:

    float64  weight           sum of w
    float64  reach            sum of v
    float64  norms [pieces]   sum of v |d| of every piece, 0 for embeddings
    uint32   contributions
    float32  sums [numel]     sum of v d of embeddings, of w phi(d) of all other pieces

(w and v as in `tensors.merging.merge`.)

Sums in full precision compose exactly over any number of levels; four bytes a parameter are paid once per
group, not per contribution. Where these bytes come from a peer, everything in them is checked
(`check_partial`): what passes could be the sums of acceptable contributions, so a syncer between cannot
push a merge further than those could whose labels it shows.

Rules: docs/protocol/groups.md, section 3.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable

import torch
from msgspec import Struct
from torch import Tensor

from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import (
    MAX_CONTRIBUTORS,
    MAX_WEIGHT,
    NO_LIMITS,
    MergeLimits,
)
from p2pdiloco.errors import invariant
from p2pdiloco.tensors.digest import Buffer, bytes_of
from p2pdiloco.tensors.layout import FragmentLayout
from p2pdiloco.tensors.merging.merge import (
    MAX_MAGNITUDE,
    MIN_LENGTH,
    Accumulator,
    contribution_reach,
    contribution_weight,
)
from p2pdiloco.tensors.payload import Payload, size_of
from p2pdiloco.tensors.portable import norm
from p2pdiloco.tensors.unsound import Unsound

ROUNDING = 1.03
"""Factor by which a sum of thousands of fp32 terms may exceed its bound and still be honest."""
LONGEST_PERIOD = 100_000
"""Largest H of any run: a contribution's reach is at least such a part of its weight."""
WEIGHT_TOLERANCE = 1e-9
"""Relative error allowed of a sum of weights: they are summed in fp64, in the merge's order, which the label
does not tell."""


Work = tuple[int, int] | tuple[int, int, int]
"""Tokens, inner steps and trust weight of a contribution: of one that is trusted in full, where it is left
out."""


class PartialSums(Struct, frozen=True):
    """Decoded payload of a partial merge, as `Accumulator.combine` takes it."""

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
        view = memoryview(payload)
        # torch warns of read-only memory
        first: Buffer = bytearray(view) if view.readonly else view.cast("B")
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
) -> None:
    """Judge a partial merge against its label: `work` has (tokens, inner steps, trust weight) of every
    contribution, `period` is H, `limits` are the label's; `storage`: see `decode_partial`.

    Raises:
        RemoteError: as `decode_partial`; "implausible-tokens"; "wrong-weight" (not the sum of the
            contributions' weights) or "wrong-count".
    """
    found, work = decode_partial(layout, payload, storage, limits.longest), list(work)
    most_tokens = limits.most_tokens
    weights = [contribution_weight(tokens, steps, most_tokens, *trust) for tokens, steps, *trust in work]
    if found.contributions != len(weights):
        raise Unsound(Verdict.WRONG_COUNT, f"{found.contributions} contributions, {len(weights)} labels")
    if not math.isclose(found.weight, math.fsum(weights), rel_tol=WEIGHT_TOLERANCE):
        raise Unsound(Verdict.WRONG_WEIGHT, f"{found.weight:.9g}, the labels say {math.fsum(weights):.9g}")
    reach = math.fsum(
        contribution_reach(tokens, steps, period, most_tokens, *trust) for tokens, steps, *trust in work
    )
    if not math.isclose(found.reach, reach, rel_tol=WEIGHT_TOLERANCE):
        raise Unsound(Verdict.WRONG_WEIGHT, f"a reach of {found.reach:.9g}, the labels say {reach:.9g}")


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
