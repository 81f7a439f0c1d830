"""Inputs of a merge, how they are added up, and what is found out about them on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from msgspec import Struct
from torch import Tensor

from p2pdiloco.core.api.plausible import FULL_TRUST
from p2pdiloco.tensors.codec_base import Codec
from p2pdiloco.tensors.merging.agreement import Sample, scores
from p2pdiloco.tensors.merging.merge import Accumulator
from p2pdiloco.tensors.merging.partial import decode_partial
from p2pdiloco.tensors.payload import Payload, check_magnitude, parts_of
from p2pdiloco.tensors.unsound import Unsound, UnusableInputs


class Input(NamedTuple):
    """Contribution to a merge."""

    payload: Payload
    tokens: int
    inner_steps: int
    trust: int = FULL_TRUST
    """Trust weight (`core.chain.trust_weight`)."""


Given = tuple[Payload, int, int] | tuple[Payload, int, int, int]
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
    seed: bytes | None,
) -> Findings:
    """Add contributions, encoded by `codec`, and then partial merges to the sums. `scratch`: fp32 [numel];
    `seed` draws the sample on which contributions are compared; None: they are not, and scores are none.

    Raises:
        UnusableInputs: those at fault, by their place among both.
        StorageError: a payload that is not in memory cannot be read.
    """
    layout = accumulator.layout
    sample = None if seed is None else Sample(layout.numel, seed)
    samples: list[Tensor] = []
    lengths: list[float] = []
    faults: dict[int, Unsound] = {}
    if accumulator.compares:
        accumulator.compare(_lengths(accumulator, codec, inputs, scratch), [given[2] for given in inputs])
    for index, given in enumerate(inputs):
        payload, tokens, inner_steps, trust = Input(*given)
        try:
            _decode(codec, payload, scratch)
            lengths.append(accumulator.add(scratch, tokens, inner_steps, trust))
            if sample is not None:
                samples.append(sample.of(scratch))
        except Unsound as error:
            faults[index] = error
    for index, payload in enumerate(partials, len(inputs)):
        try:
            part = decode_partial(layout, payload, scratch)
        except Unsound as error:
            faults[index] = error
        else:
            accumulator.combine(part.weight, part.reach, part.contributions, part.norms, part.sums)
    if faults:
        raise UnusableInputs(faults)
    return Findings(tuple(accumulator.cut), tuple(lengths), tuple(scores(samples)))


def _decode(codec: Codec, payload: Payload, out: Tensor) -> None:
    """Decode a contribution, fp32 [numel]. Raises: Unsound, StorageError."""
    for content, start, stop in parts_of(codec, payload, len(out)):
        check_magnitude(codec, content, stop - start)
        codec.decode(content, out[start:stop])


def _lengths(accumulator: Accumulator, codec: Codec, inputs: Sequence[Given], scratch: Tensor) -> list[float]:
    """Measure contributions before any is added; those that are unsound have none."""
    found = []
    for given in inputs:
        try:
            _decode(codec, given[0], scratch)
        except Unsound:
            found.append(0.0)
        else:
            found.append(accumulator.measure(scratch).whole)
    return found
