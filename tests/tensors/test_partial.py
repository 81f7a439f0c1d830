"""Partial merges: any partition into groups and levels is the merge of all; foreign bytes are judged."""

import itertools
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_merge import LAYOUT, PERIOD, SPECS, WORK, draw, merged

from p2pdiloco.core.api.types import MAX_WEIGHT
from p2pdiloco.errors import InvariantViolation, RemoteError
from p2pdiloco.tensors.layout import plan_fragments
from p2pdiloco.tensors.merge import (
    MAX_MAGNITUDE,
    Accumulator,
    check_partial,
    contribution_reach,
    contribution_weight,
    decode_partial,
    encode_partial,
    partial_bytes,
)

PIECES = len(LAYOUT.pieces)


def accumulate(inputs, partials=()):
    accumulator = Accumulator(LAYOUT, PERIOD)
    for delta, (tokens, steps) in inputs:
        accumulator.add(delta, tokens, steps)
    for payload in partials:
        part = decode_partial(LAYOUT, payload)
        accumulator.combine(part.weight, part.reach, part.contributions, part.norms, part.sums)
    return accumulator


def result(accumulator):
    out = torch.empty(LAYOUT.numel)
    accumulator.result(out)
    return out


def tree(inputs, cuts):
    """Groups cut at the leaves, then partials in pairs, level by level, until one is left."""
    edges = [0, *sorted(set(cuts)), len(inputs)]
    level = [
        encode_partial(accumulate(inputs[low:high])) for low, high in itertools.pairwise(edges) if low < high
    ]
    while len(level) > 1:
        level = [encode_partial(accumulate([], level[at : at + 2])) for at in range(0, len(level), 2)]
    return level[0]


@settings(max_examples=60, deadline=None)
@given(st.lists(WORK, min_size=1, max_size=12), st.lists(st.integers(1, 11), max_size=6), st.integers(0, 999))
def test_groups_and_levels_make_the_merge_of_all(work, cuts, seed):
    deltas = draw(len(work), seed)
    inputs = list(zip(deltas, work, strict=True))
    payload = tree(inputs, [cut for cut in cuts if cut < len(work)])
    check_partial(LAYOUT, payload, work, PERIOD)
    whole = accumulate([], [payload])
    assert whole.contributions == len(work)
    torch.testing.assert_close(result(whole), merged(deltas, work), rtol=1e-4, atol=1e-5)


@settings(max_examples=20, deadline=None)
@given(st.lists(WORK, min_size=2, max_size=8), st.integers(0, 999))
def test_one_order_gives_one_result_bit_for_bit_and_the_wire_changes_nothing(work, seed):
    inputs = list(zip(draw(len(work), seed), work, strict=True))
    half = len(inputs) // 2
    below = accumulate(inputs[:half])
    direct = accumulate(inputs[half:])
    direct.combine(below.weight, below.reach, below.contributions, below.norms, below.sums)
    payload = encode_partial(below)
    sent = [accumulate(inputs[half:], [bytes(payload)]) for _ in range(2)]
    for other in sent:
        assert encode_partial(other) == encode_partial(direct)
        assert torch.equal(result(other), result(direct))


def test_an_accumulator_works_in_one_buffer_of_the_fragments_size():
    storage = torch.full((LAYOUT.numel + 3,), 7.0)
    accumulator = Accumulator(LAYOUT, PERIOD, storage)
    accumulator.add(draw(1, 0)[0], 10, 1)
    assert accumulator.sums.data_ptr() == storage.data_ptr() and bool((storage[LAYOUT.numel :] == 7).all())


def test_size_follows_from_the_layout_and_the_heaviest_sums_pass():
    (odd,) = plan_fragments([SPECS[0], *SPECS[2:]], 1)
    assert partial_bytes(odd) == 16 + 8 * 2 + 4 + 4 * odd.numel
    work = [(2**31 - 1, 1)] * 8
    accumulator = Accumulator(LAYOUT, PERIOD)
    for tokens, steps in work:
        accumulator.add(torch.full((LAYOUT.numel,), MAX_MAGNITUDE), tokens, steps)
    check_partial(LAYOUT, encode_partial(accumulator), work, PERIOD)
    zeros = Accumulator(LAYOUT, PERIOD)
    zeros.add(torch.zeros(LAYOUT.numel), 1, 100)
    check_partial(LAYOUT, encode_partial(zeros), [(1, 100)], PERIOD)


def test_a_partial_merge_of_nothing_is_our_own_mistake():
    with pytest.raises(InvariantViolation):
        encode_partial(Accumulator(LAYOUT, PERIOD))


WORKED = [(300, 6), (100, 1)]
DIRECTIONS = next(i for i, piece in enumerate(LAYOUT.pieces) if not piece.plain_mean)
EMBEDDING = next(i for i, piece in enumerate(LAYOUT.pieces) if piece.plain_mean)


def honest():
    return encode_partial(accumulate(zip(draw(2, 0), WORKED, strict=True)))


def with_norm(index, value):
    payload = honest()
    struct.pack_into("<d", payload, 16 + 8 * index, value)
    return payload


def with_sum(index, value):
    payload = honest()
    at = 16 + 8 * PIECES + 4 + 4 * LAYOUT.pieces[index].fragment_offset
    struct.pack_into("<f", payload, at, value)
    return payload


def with_weight(value):
    payload = honest()
    struct.pack_into("<d", payload, 0, value)
    return payload


def with_reach(value):
    payload = honest()
    struct.pack_into("<d", payload, 8, value)
    return payload


def with_count(value):
    payload = honest()
    struct.pack_into("<I", payload, 16 + 8 * PIECES, value)
    return payload


TOTAL = sum(contribution_weight(*each) for each in WORKED)
REACH = sum(contribution_reach(*each, PERIOD) for each in WORKED)
LONGEST = MAX_MAGNITUDE * math.sqrt(LAYOUT.pieces[DIRECTIONS].numel)
BAD = {
    "short": ("wrong-size", lambda: honest()[:-4]),
    "long": ("wrong-size", lambda: honest() + bytes(4)),
    "empty": ("wrong-size", lambda: b""),
    "weight nan": ("non-finite", lambda: with_weight(math.nan)),
    "weight inf": ("non-finite", lambda: with_weight(math.inf)),
    "weight zero": ("implausible-weight", lambda: with_weight(0.0)),
    "weight negative": ("implausible-weight", lambda: with_weight(-TOTAL)),
    "weight too large": ("implausible-weight", lambda: with_weight(3 * MAX_WEIGHT)),
    "weight below reach": ("implausible-weight", lambda: with_weight(0.9 * REACH)),
    "reach nan": ("non-finite", lambda: with_reach(math.nan)),
    "reach zero": ("implausible-weight", lambda: with_reach(0.0)),
    "reach too large": ("implausible-weight", lambda: with_reach(1.1 * TOTAL)),
    "reach too small": ("implausible-weight", lambda: with_reach(TOTAL / 200_000)),
    "reach claimed": ("wrong-weight", lambda: with_reach(2 * REACH)),
    "weight claimed": ("wrong-weight", lambda: with_weight(2 * TOTAL)),
    "count zero": ("implausible-weight", lambda: with_count(0)),
    "count huge": ("implausible-weight", lambda: with_count(2**32 - 1)),
    "count claimed": ("wrong-count", lambda: with_count(3)),
    "norm nan": ("non-finite", lambda: with_norm(DIRECTIONS, math.nan)),
    "norm negative": ("out-of-range", lambda: with_norm(DIRECTIONS, -1.0)),
    "norm longer than its reach": ("out-of-range", lambda: with_norm(DIRECTIONS, 2 * LONGEST * REACH)),
    "norm huge": ("out-of-range", lambda: with_norm(DIRECTIONS, 1e300)),
    "directions without norm": ("out-of-range", lambda: with_norm(DIRECTIONS, 0.0)),
    "norm of an embedding": ("out-of-range", lambda: with_norm(EMBEDDING, 1.0)),
    "sum nan": ("non-finite", lambda: with_sum(DIRECTIONS, math.nan)),
    "sum inf": ("non-finite", lambda: with_sum(EMBEDDING, -math.inf)),
    "directions longer than their weight": ("out-of-range", lambda: with_sum(DIRECTIONS, 1.1 * TOTAL)),
    "embedding out of range": ("out-of-range", lambda: with_sum(EMBEDDING, 1.1 * REACH * MAX_MAGNITUDE)),
}


@pytest.mark.parametrize("case", BAD)
def test_what_no_honest_group_sends_is_refused(case):
    reason, make = BAD[case]
    with pytest.raises(RemoteError) as refused:
        check_partial(LAYOUT, make(), WORKED, PERIOD)
    assert refused.value.reason == reason
    check_partial(LAYOUT, honest(), WORKED, PERIOD)


@settings(max_examples=100, deadline=None)
@given(st.binary(min_size=partial_bytes(LAYOUT), max_size=partial_bytes(LAYOUT)))
def test_noise_is_refused_and_nothing_else_happens(payload):
    with pytest.raises(RemoteError):
        check_partial(LAYOUT, payload, WORKED, PERIOD)
