"""Inputs of a merge, how they are added up, and what is found out about them on the way."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace
from torch import Tensor

from p2pdiloco.core.api.types import FULL_TRUST, NOTHING
from p2pdiloco.core.api.versions import Mean, references
from p2pdiloco.tensors.codec_base import Codec
from p2pdiloco.tensors.merging.agreement import Sample, scores
from p2pdiloco.tensors.merging.merge import Accumulator, Lengths
from p2pdiloco.tensors.merging.partial import decode_partial
from p2pdiloco.tensors.payload import Payload, check_magnitude, parts_of
from p2pdiloco.tensors.unsound import Unsound, UnusableInputs

NEXT_TO_NOTHING = 1 << 14
"""Times that a contribution is shorter than the lower median of its round, if it is next to nothing: honest
work of one inner step in hundreds is not."""


class Input(NamedTuple):
    """Contribution to a merge."""

    payload: Payload
    tokens: int
    inner_steps: int
    trust: int = FULL_TRUST
    """Trust weight (`core.api.trust_weight`)."""
    mean: Mean | None = None
    """Agreement of its learner so far, which gives the trust weight with the score that is found here."""
    votes: bool = False
    """True: its learner votes, and it may be a measure of all (`core.api.references`)."""


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
    """Scores (`tensors.merging.agreement`)."""


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
            decode(codec, given[0], scratch)
        except Unsound as error:
            faults[index] = error
        else:
            lengths.append(accumulator.measure(scratch))
            samples.append(sample.of(scratch))
    found = Findings((), tuple(each.whole for each in lengths), ())
    if not faults:
        votes = [Input(*given).votes for given in inputs]
        found = replace(found, scores=_scored(found.lengths, samples, votes))
        faults = _add(accumulator, codec, inputs, lengths, found, scratch)
    for index, payload in enumerate(partials, len(inputs)):
        try:
            part = decode_partial(accumulator.layout, payload, scratch)
        except Unsound as error:
            faults[index] = error
        else:
            accumulator.combine(part.weight, part.reach, part.contributions, part.norms, part.sums)
    if faults:
        raise UnusableInputs(faults)
    return replace(found, cut=tuple(accumulator.cut))


def _scored(lengths: Sequence[float], samples: Sequence[Tensor], votes: Sequence[bool]) -> tuple[int, ...]:
    """Score contributions of these lengths. Those that are next to nothing beside what is usual are compared
    with nobody."""
    some = [(length, vote) for length, vote in zip(lengths, votes, strict=True) if length > 0]
    ranked = sorted(references([length for length, _ in some], [vote for _, vote in some]))
    least = ranked[(len(ranked) - 1) // 2] / NEXT_TO_NOTHING if ranked else 0.0
    there = [length > least for length in lengths]
    found = iter(scores(list(compress(samples, there)), list(compress(votes, there))))
    return tuple(next(found) if is_there else NOTHING for is_there in there)


def _add(
    accumulator: Accumulator,
    codec: Codec,
    inputs: Sequence[Given],
    lengths: Sequence[Lengths],
    found: Findings,
    scratch: Tensor,
) -> dict[int, Unsound]:
    """Add contributions that were looked at; returns what is at fault."""
    faults: dict[int, Unsound] = {}
    votes = [Input(*given).votes for given in inputs]
    accumulator.compare(found.lengths, [given[2] for given in inputs], votes)
    for index, given in enumerate(inputs):
        payload, tokens, inner_steps, trust, mean, _ = Input(*given)
        if mean is not None:
            trust = mean.trust(found.scores[index])
        decode(codec, payload, scratch)
        try:
            accumulator.add(scratch, tokens, inner_steps, trust, lengths[index])
        except Unsound as error:
            faults[index] = error
    return faults


def decode(codec: Codec, payload: Payload, out: Tensor) -> None:
    """Decode a contribution, fp32 [numel]. Raises: Unsound, StorageError."""
    for content, start, stop in parts_of(codec, payload, len(out)):
        check_magnitude(codec, content, stop - start)
        codec.decode(content, out[start:stop])
