"""Merging: weights, lengths, embeddings, partial merges, agreement, limits, and contributions of nothing."""

from __future__ import annotations

import functools
import itertools
import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import config
from torch import Tensor
from vault_kit import vault_of

from p2pdiloco.core.api.types import (
    FULL_TRUST,
    LEAST_SCORE,
    LEAST_TRUST,
    MAX_WEIGHT,
    MOST_SCORE,
    NO_LIMITS,
    NOTHING,
    UNCLEAR,
    UNMEASURED,
    USUAL_SCORE,
    MergeLimits,
)
from p2pdiloco.core.api.versions import USUAL, Mean
from p2pdiloco.core.chain import heaviest_units
from p2pdiloco.errors import InvariantViolation, RemoteError
from p2pdiloco.tensors import merge
from p2pdiloco.tensors.codecs import UnusableInputs, codec
from p2pdiloco.tensors.layout import TensorSpec, plan_fragments
from p2pdiloco.tensors.merge import (
    MAX_MAGNITUDE,
    NEXT_TO_NOTHING,
    SAMPLE_BLOCK,
    SAMPLE_BLOCKS,
    Accumulator,
    Findings,
    Input,
    Sample,
    add_up,
    check_partial,
    contribution_weight,
    decode_partial,
    encode_partial,
    partial_bytes,
    reach_of,
    scores,
)
from p2pdiloco.tensors.outer_update import first_length
from p2pdiloco.tensors.vault import MergeResult, Vault

SPECS = [TensorSpec("emb", (6, 4), True), TensorSpec("a", (5, 4)), TensorSpec("b", (48,))]
(LAYOUT,) = plan_fragments(SPECS, 1)
PERIOD = 24
"""H."""
WORK = st.tuples(st.integers(1, 10**7), st.integers(1, 500))


def reference(deltas, work):
    """The formulas in double precision, piece by piece."""
    weights = torch.tensor([tokens**2 / steps for tokens, steps in work], dtype=torch.float64)
    reach = weights * torch.tensor([min(1.0, steps / PERIOD) for _, steps in work], dtype=torch.float64)
    weights, reach = weights / weights.sum(), reach / reach.sum()
    out = torch.empty(LAYOUT.numel, dtype=torch.float64)
    for piece in LAYOUT.pieces:
        part = slice(piece.fragment_offset, piece.fragment_offset + piece.numel)
        stack = torch.stack([d[part].double() for d in deltas])
        norms = stack.norm(dim=1)
        mean = (reach[:, None] * stack).sum(0)
        if not piece.plain_mean:
            units = stack / norms.clamp(min=1e-300)[:, None]
            direction = (weights[:, None] * units).sum(0)
            mean = (reach * norms).sum() * direction / direction.norm()
        out[part] = mean
    return out


def result(accumulator):
    out = torch.empty(LAYOUT.numel)
    accumulator.result(out)
    return out


def merged(deltas, work, period=PERIOD, limits=NO_LIMITS):
    accumulator = Accumulator(LAYOUT, period, limits=limits)
    for delta, (tokens, steps) in zip(deltas, work, strict=True):
        accumulator.add(delta, tokens, steps)
    return result(accumulator)


def draw(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(LAYOUT.numel, generator=generator) / 10.0 ** (i % 3) for i in range(count)]


@settings(max_examples=40, deadline=None)
@given(st.lists(WORK, min_size=1, max_size=8), st.integers(0, 999))
def test_result_is_the_formula(work, seed):
    deltas = draw(len(work), seed)
    torch.testing.assert_close(merged(deltas, work).double(), reference(deltas, work), rtol=1e-4, atol=1e-4)


def lengths(out):
    """Of all pieces."""
    return [float(out[p.fragment_offset : p.fragment_offset + p.numel].norm()) for p in LAYOUT.pieces]


@pytest.mark.parametrize(("steps", "share"), [(5, 5 / 24), (24, 1), (96, 4)])
def test_a_slow_learner_hardly_shortens_the_stride_and_others_count_by_the_papers_weight(steps, share):
    """Displacements in proportion to steps, one of three learners with other steps than H."""
    delta = draw(1, 3)[0]
    work = [(10 * PERIOD, PERIOD), (10 * PERIOD, PERIOD), (10 * steps, steps)]
    out = merged([delta, delta, delta * share], work)
    counts = share * min(1, share)  # beside 1 of each other: the paper's `share`, and how far it went
    expected = (2 + counts * share) / (2 + counts)
    assert lengths(out) == pytest.approx([expected * length for length in lengths(delta)], rel=1e-5)
    if share < 1:
        assert expected > 0.98 > 0.95 > (2 + share * share) / (2 + share), "the paper's"


def test_directions_that_nearly_cancel_out_are_not_stretched_however_few_their_steps():
    delta = torch.zeros(LAYOUT.numel)
    other = torch.zeros(LAYOUT.numel)
    for piece in LAYOUT.pieces:
        delta[piece.fragment_offset], other[piece.fragment_offset] = 1.0, -1.0
        other[piece.fragment_offset + 1] = 8e-4
    out = merged([delta, other], [(4, 1), (4, 1)])
    assert lengths(out) == pytest.approx([4e-4] * len(LAYOUT.pieces), rel=1e-2)


def test_what_cancels_out_is_not_stretched_but_embeddings_still_average():
    delta = draw(1, 0)[0]
    out = merged([delta, -3 * delta], [(4, 1), (4, 1)])
    for piece in LAYOUT.pieces:
        part = slice(piece.fragment_offset, piece.fragment_offset + piece.numel)
        if piece.plain_mean:
            torch.testing.assert_close(out[part], -delta[part])
        else:
            assert float(out[part].norm()) <= 1e-3 * 2 * float(delta[part].norm())


def test_zero_pseudo_gradients_merge_to_zero():
    assert bool((merged([torch.zeros(LAYOUT.numel)] * 2, [(4, 1)] * 2) == 0).all())


def test_tiny_huge_and_heavy_contributions_stay_finite():
    delta = draw(1, 1)[0]
    work = [(2**31 - 1, 1), (1, 500), (2**31 - 1, 1)]
    assert bool(merged([delta * 1e-40, delta * 2.0**38, delta * 2.0**-58], work).isfinite().all())


def test_the_heaviest_work_weighs_like_any_other():
    delta = draw(1, 1)[0]
    torch.testing.assert_close(merged([delta] * 8, [(2**31 - 1, 1)] * 8), delta)


def test_weight_is_tokens_squared_per_inner_step():
    assert contribution_weight(300, 6) == 15000.0
    assert [reach_of(15000.0, 6, period) for period in (24, 6, 3)] == [3750.0, 15000.0, 15000.0]


@pytest.mark.parametrize(("tokens", "steps"), [(0, 1), (1, 0), (-1, 1), (int(MAX_WEIGHT), 1)])
def test_implausible_work_is_a_peers_fault(tokens, steps):
    with pytest.raises(RemoteError) as refused:
        Accumulator(LAYOUT, PERIOD).add(torch.zeros(LAYOUT.numel), tokens, steps)
    assert refused.value.reason == "implausible-tokens"


def test_a_merge_of_nothing_is_our_own_mistake():
    with pytest.raises(InvariantViolation):
        Accumulator(LAYOUT, PERIOD).result(torch.empty(LAYOUT.numel))


# Partial merges: any partition into groups and levels is the merge of all; foreign bytes are judged.

PIECES = len(LAYOUT.pieces)


def accumulate(inputs, partials=()):
    accumulator = Accumulator(LAYOUT, PERIOD)
    for delta, (tokens, steps) in inputs:
        accumulator.add(delta, tokens, steps)
    for payload in partials:
        part = decode_partial(LAYOUT, payload)
        accumulator.combine(part.weight, part.reach, part.contributions, part.norms, part.sums)
    return accumulator


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


def other(form, at, value):
    payload = honest()
    struct.pack_into(form, payload, at, value)
    return payload


with_weight, with_reach = functools.partial(other, "<d", 0), functools.partial(other, "<d", 8)
with_count = functools.partial(other, "<I", 16 + 8 * PIECES)


def with_norm(index, value):
    return other("<d", 16 + 8 * index, value)


def with_sum(index, value):
    return other("<f", 16 + 8 * PIECES + 4 + 4 * LAYOUT.pieces[index].fragment_offset, value)


TOTAL = sum(contribution_weight(*each) for each in WORKED)
REACH = sum(reach_of(contribution_weight(*each), each[1], PERIOD) for each in WORKED)
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


# How far contributions agree: honest ones alike, liars less, and nothing where nothing can be told.

NUMEL = 40_000


def vectors(count: int, shared: float = 0.3, numel: int = NUMEL) -> list[Tensor]:
    """Contributions with some of one direction in each, and noise of length 1."""
    generator = torch.Generator().manual_seed(count)
    common = torch.randn(numel, generator=generator) / math.sqrt(numel)
    return [
        shared * common + torch.randn(numel, generator=generator) / math.sqrt(numel) for _ in range(count)
    ]


def scored(given: list[Tensor]) -> list[int]:
    """Scores of a round in which all have seats."""
    sample = Sample(len(given[0]), b"seed")
    return scores([sample.of(each) for each in given], [True] * len(given))


def test_honest_contributions_are_usual_whatever_their_length() -> None:
    honest = vectors(8)
    assert all(40 < score <= MOST_SCORE for score in scored(honest))
    assert scored([10.0**n * each for n, each in enumerate(honest)]) == scored(honest)


@pytest.mark.parametrize("liars", [1, 2, 3])
def test_liars_that_agree_with_each_other_do_not_agree_with_the_others(liars: int) -> None:
    given = vectors(10)
    noise = torch.randn(NUMEL, generator=torch.Generator().manual_seed(99))
    for lie in (-given[0], noise, -sum(given)):  # type: ignore[operator]
        found = scored([*([lie] * liars), *given[liars:]])
        assert max(found[:liars]) < 10 and min(found[liars:]) > 30, found


def test_zeros_and_what_some_processors_make_zero_agree_with_nobody() -> None:
    honest = vectors(5)
    found = scored([torch.zeros(NUMEL), *honest])
    assert found[0] == 0 and min(found[1:]) > 30
    assert scored([2.0**-130 * honest[0], *honest]) == found


@pytest.mark.parametrize("given", [[], vectors(1), vectors(2)])
def test_of_two_none_can_be_told_from_the_other(given: list[Tensor]) -> None:
    sample = Sample(NUMEL, b"")
    assert scores([sample.of(each) for each in given], [True] * len(given)) == [UNMEASURED] * len(given)


def test_where_most_do_not_agree_nothing_is_measured() -> None:
    assert scored(vectors(8, shared=0.0)) == [UNCLEAR] * 8
    flipped = [each * (-1) ** n for n, each in enumerate(vectors(8))]
    assert scored(flipped) == [UNCLEAR] * 8, "half of them against the others"


def test_a_score_has_ends() -> None:
    given = vectors(9)
    found = scored([sum(given), -sum(given), *given])  # type: ignore[list-item, operator]
    assert found[:2] == [MOST_SCORE, LEAST_SCORE] and USUAL_SCORE < MOST_SCORE


def test_a_sample_is_drawn_by_its_seed_and_is_all_of_a_small_fragment() -> None:
    numel = SAMPLE_BLOCK * SAMPLE_BLOCKS * 3 + 17
    values = torch.arange(numel, dtype=torch.float32)
    one, same, other = (Sample(numel, seed).of(values) for seed in (b"1", b"1", b"2"))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert len(one) == SAMPLE_BLOCK * SAMPLE_BLOCKS == len(set(one.tolist()))
    assert Sample(100, b"1").of(values[:100]).tolist() == list(range(100))


def test_a_score_is_the_same_in_whatever_order_sums_are_made() -> None:
    given = [*vectors(6), 2.0**40 * vectors(1)[0], 2.0**-60 * vectors(7)[1]]
    rows = [Sample(NUMEL, b"seed").of(each) for each in given]
    seats = [True] * len(rows)
    assert scores(rows, seats) == scores([row.flip(0) for row in rows], seats) != [UNMEASURED] * len(rows)
    whole = [merge._whole(row) for row in rows]
    for one, other in itertools.pairwise(whole):
        exact = sum(int(a) * int(b) for a, b in zip(one.tolist(), other.tolist(), strict=True))
        assert float(torch.dot(one, other)) == exact


# Limits of a merge: what one learner claims, or sends, moves it no further than a generous one's work.

LIMITED_PERIOD = 4
LIMITS = MergeLimits(160, 8.0)


def unit(seed: int) -> torch.Tensor:
    """A pseudo-gradient of length 1."""
    values = torch.randn(LAYOUT.numel, generator=torch.Generator().manual_seed(seed))
    return values / values.norm()


def merged_within_limits(
    deltas: list[torch.Tensor], work: list[tuple[int, int]], limits: MergeLimits
) -> torch.Tensor:
    return merged(deltas, work, LIMITED_PERIOD, limits)


def vault(update: str = "fp32") -> Vault:
    return vault_of(SPECS, "fp32", update, period=LIMITED_PERIOD)


def encoded(*lengths: float, steps: int = 4, seats: bool = True) -> list[Input]:
    """Inputs of these lengths."""
    made = (codec("fp32").encode(length * unit(seed)) for seed, length in enumerate(lengths))
    return [Input(bytes(payload), 10 * steps, steps, votes=seats) for payload in made]


def test_claimed_tokens_weigh_no_more_than_the_limit() -> None:
    assert contribution_weight(1 << 32, 1 << 26, 160) == 160 * 64
    honest, liar = [unit(i) for i in range(4)], unit(9)
    both = merged_within_limits([*honest, liar], [(40, 4)] * 4 + [(1 << 32, (1 << 32) // 10)], LIMITS)
    four_units = merged_within_limits([*honest, liar], [(40, 4)] * 4 + [(160, 16)], LIMITS)
    torch.testing.assert_close(both, four_units)


@pytest.mark.parametrize("claimed", [40, 400, 1 << 32])
def test_whoever_claims_anything_for_flipped_signs_leaves_the_others_the_direction(claimed: int) -> None:
    """One of four: by its share it takes half of what three say away, and never turns it round."""
    limits = MergeLimits(round(heaviest_units(4, config()) * 40), 8.0)
    true, work = unit(1), [(40, 4)] * 3 + [(claimed, max(4, claimed // 10))]
    out = merged_within_limits([true, true, true, -true], work, limits)
    assert float(torch.dot(out, true)) > 0.3
    assert (
        claimed == 40
        or float(torch.dot(merged_within_limits([true, true, true, -true], work, LIMITS), true)) < 0
    )


def test_what_is_within_the_limits_is_merged_as_without_any() -> None:
    deltas, work = [3 * unit(i) for i in range(5)], [(30 + 9 * i, 3 + i) for i in range(5)]
    assert torch.equal(
        merged_within_limits(deltas, work, LIMITS), merged_within_limits(deltas, work, NO_LIMITS)
    ), "to the bit"


def test_a_long_contribution_is_cut() -> None:
    honest, work = [unit(i) for i in range(4)], [(40, 4)] * 5
    cut = merged_within_limits([*honest, 1000 * unit(9)], work, LIMITS)
    torch.testing.assert_close(cut, merged_within_limits([*honest, 8 * unit(9)], work, LIMITS))
    assert float(cut.norm()) < 3


def test_an_absurd_one_is_refused_before_it_is_in_and_its_sender_named() -> None:
    accumulator = Accumulator(LAYOUT, LIMITED_PERIOD, limits=LIMITS)
    with pytest.raises(RemoteError, match="out-of-range"):
        accumulator.add(4097 * unit(1), 40, 4)
    assert accumulator.contributions == 0 and not accumulator.weight
    accumulator.add(4000 * unit(1), 40, 4)
    with pytest.raises(UnusableInputs) as error:
        vault().merge(0, 1, encoded(1.0, 1e6, 1.0), limits=LIMITS)
    assert list(error.value.faults) == [1], "a merge names who sent it"


def test_a_partial_merge_is_judged_by_the_limits_that_it_states() -> None:
    accumulator = Accumulator(LAYOUT, LIMITED_PERIOD, limits=LIMITS)
    work = [(40, 4), (1000, 100)]
    for seed, (tokens, steps) in enumerate(work):
        accumulator.add(100 * unit(seed), tokens, steps)
    payload = encode_partial(accumulator)
    check_partial(LAYOUT, payload, work, LIMITED_PERIOD, limits=LIMITS)
    for other in (MergeLimits(80, 8.0), MergeLimits(160, 4.0)):
        with pytest.raises(RemoteError):
            check_partial(LAYOUT, payload, work, LIMITED_PERIOD, limits=other)


def test_limits_are_near_while_a_partial_is_under_way() -> None:
    assert LIMITS.near(MergeLimits(1000, 1.0)) and NO_LIMITS.near(NO_LIMITS)
    assert not LIMITS.near(MergeLimits(160 * 17, 8.0))
    assert not LIMITS.near(MergeLimits(160, 8.0 / 17)) and not LIMITS.near(NO_LIMITS)
    assert not MergeLimits(160, math.nan).near(LIMITS)


def test_an_update_is_as_long_as_its_syncer_says() -> None:
    here, there = vault(), vault()
    made = here.merge(0, 1, [(codec("fp32").encode(2 * unit(1)), 40, 4)], limits=LIMITS)
    assert math.isclose(made.norm, 2.0, rel_tol=1e-5)
    assert there.apply(0, 1, made.update, 4, made.norm) == made.state_digest
    assert there.apply(0, 1, made.update, 4, 1.009 * made.norm) == made.state_digest
    for false in (0.0, 1.02 * made.norm, 20.0, math.nan):
        with pytest.raises(RemoteError, match="out-of-range"):
            there.apply(0, 1, made.update, 4, false)
    assert there.version(0) == 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["fp32", "bf16", "int8", "int4"])
def test_an_update_that_is_cut_is_not_longer_once_it_is_encoded(name: str, seed: int) -> None:
    """A partial merge may be of limits that were sixteen times as large."""
    made = vault(name)
    long = Accumulator(LAYOUT, LIMITED_PERIOD, limits=MergeLimits(160, 128.0))
    long.add(100 * unit(seed), 40, 4)
    update = made.merge(0, 1, [], [encode_partial(long)], 4, LIMITS)
    assert 0.8 * LIMITS.longest_update < update.norm <= LIMITS.longest_update


def test_what_earlier_updates_left_out_makes_no_update_too_long() -> None:
    here = vault("topk")
    for number in range(1, 40):
        limits = MergeLimits(160, 8.0 if number < 20 else 0.01)
        made = here.merge(0, number, [(codec("fp32").encode(unit(1)), 40, 4)], limits=limits)
        assert made.norm <= limits.longest_update * 1.01
        here.commit(0, number)


def test_the_length_of_version_0_is_a_power_of_two() -> None:
    assert first_length(torch.full((100,), 0.3)) == 4.0
    assert first_length(torch.zeros(1024)) == 1.0, "adapters begin with zeros"


@pytest.mark.parametrize("part", [0, 1])
def test_a_state_far_beyond_version_0_is_not_taken(part: int) -> None:
    here = vault()
    absurd = torch.full((LAYOUT.numel,), 1025 * here.first_length(0))
    parts = [torch.zeros(LAYOUT.numel), torch.zeros(LAYOUT.numel)]
    parts[part] = absurd
    theta, momentum = (memoryview(values.numpy()).cast("B") for values in parts)
    with pytest.raises(RemoteError, match="out-of-range"):
        here.load_spare(0, 5, theta, momentum)
    loan = here.lend_spare(0)
    for buffer, values in zip(loan.buffers, (theta, momentum), strict=True):
        buffer.cast("B")[:] = values
    with pytest.raises(RemoteError, match="out-of-range"):
        here.take_loan(0, 5, loan)


def test_whose_contribution_was_cut_is_known() -> None:
    made, inputs = vault(), encoded(1.0, 100.0, 2.0)
    assert made.merge(0, 1, inputs, limits=LIMITS).found.cut == (1,)
    assert made.merge_partial(0, inputs, [], LIMITS).found.cut == (1,)
    assert made.own.encode(0, torch.zeros(LAYOUT.numel), 100 * unit(1)).length == pytest.approx(100)


def test_while_nothing_is_known_to_be_usual_contributions_are_cut_by_each_other() -> None:
    limits = MergeLimits(1 << 40, 1e6, of_median=3.0)
    made = vault().merge(0, 1, encoded(1.0, 2.0, 100.0, 7.0), limits=limits)
    assert made.found.cut == (2, 3), "of more than three times the lower median, 2"
    assert made.found.lengths == pytest.approx((1.0, 2.0, 100.0, 7.0)), "as they came"
    alike = vault().merge(0, 1, encoded(1.0, 2.0, 6.0, 6.0), limits=limits)
    assert alike.norm == pytest.approx(made.norm, rel=1e-5)
    assert vault().merge(0, 1, encoded(1.0, 100.0), limits=limits).found.cut == (), "of two neither is told"
    zeros = vault().merge(0, 1, encoded(0.0, 0.0, 0.0, 1.0, 2.0, 100.0), limits=limits)
    assert zeros.found.cut == (5,), "zeros are no measure"
    assert vault().merge(0, 1, encoded(1.0, 1.0, 100.0), limits=MergeLimits(1 << 40, 1e6)).found.cut == ()
    none = encoded(1.0, 2.0, 100.0, 7.0, seats=False)
    assert vault().merge(0, 1, none, limits=limits).found.cut == (), "without a seat nobody is a measure"
    slow = [*encoded(0.5, 0.5, 0.5, steps=1), *encoded(2.9)]
    assert vault().merge(0, 1, slow, limits=limits).found.cut == (), "work of few steps is short, and usual"


# Strangers that are most of a round: what is usual is said by those that have seats.

OLD = Mean(USUAL, 100)
SHARED = unit(7)
CODEC = codec("fp32")


def honest_voters(count: int) -> list[torch.Tensor]:
    return [0.6 * SHARED + 0.8 * unit(seed) for seed in range(100, 100 + count)]


def added(
    voters: list[torch.Tensor], strangers: list[torch.Tensor], said: int = -1
) -> tuple[Findings, torch.Tensor]:
    """Merge a round of these; `said` of the voters have seats (all)."""
    said = len(voters) if said < 0 else said
    votes = [n < said for n in range(len(voters))] + [False] * len(strangers)
    means = [OLD] * len(voters) + [Mean()] * len(strangers)
    inputs = [
        Input(bytes(CODEC.encode(each.clone())), 40, LIMITED_PERIOD, FULL_TRUST, mean, vote)
        for each, mean, vote in zip([*voters, *strangers], means, votes, strict=True)
    ]
    accumulator = Accumulator(LAYOUT, LIMITED_PERIOD, None, MergeLimits(40, 3.0, 3.0))
    found = add_up(accumulator, CODEC, inputs, [], torch.empty(LAYOUT.numel), b"")
    return found, result(accumulator)


@pytest.mark.parametrize("strangers", [7, 12])
def test_strangers_with_reversed_work_do_not_outvote_voters(strangers: int) -> None:
    found, merged = added(
        honest_voters(8), [0.8 * unit(n) - 0.6 * SHARED for n in range(200, 200 + strangers)]
    )
    assert UNCLEAR not in found.scores
    assert all(OLD.trust(score) == FULL_TRUST for score in found.scores[:8])
    assert all(Mean().trust(score) == LEAST_TRUST for score in found.scores[8:])
    assert torch.dot(merged, SHARED) > 0.5 * merged.norm() * SHARED.norm()


def test_strangers_with_tiny_lengths_shorten_no_merge() -> None:
    alone = float(added(honest_voters(8), [])[1].norm())
    found, merged = added(honest_voters(8), [1e-3 * unit(n) for n in range(300, 309)])
    assert found.cut == () and float(merged.norm()) > 0.5 * alone


def test_strangers_of_great_length_make_no_honest_work_nothing() -> None:
    found, _ = added(honest_voters(8), [1e5 * unit(n) / 1e3 for n in range(300, 309)])
    assert NOTHING not in found.scores[:8] and set(range(8, 17)) <= set(found.cut)


@pytest.mark.parametrize("seats", [0, 1, 2])
def test_where_fewer_than_three_have_seats_nothing_is_measured(seats: int) -> None:
    found, _ = added(honest_voters(7), [1000 * unit(300)], said=seats)
    assert found.scores == (UNMEASURED,) * 8 and found.cut == (7,), "what is longer than all limits is cut"


def test_honest_newcomers_are_usual_among_voters() -> None:
    found, _ = added(honest_voters(8), [0.6 * SHARED + 0.8 * unit(n) for n in range(400, 404)])
    assert min(found.scores) > 40


# Contributions that are nothing: they are found in any round, weigh next to nothing, and are no measure.


def merged_with_riders(*deltas: torch.Tensor, name: str = "fp32") -> MergeResult:
    """Merge contributions of old members with seats."""
    payloads = [bytes(codec(name).encode(each.clone())) for each in deltas]
    inputs = [Input(payload, 40, LIMITED_PERIOD, mean=OLD, votes=True) for payload in payloads]
    return vault().merge(0, 1, inputs, seed=b"")


@pytest.mark.parametrize("others", [0, 1, 4])
@pytest.mark.parametrize("length", [0.0, 0.9 / NEXT_TO_NOTHING])
def test_nothing_is_found_in_rounds_of_any_size(others: int, length: float) -> None:
    if length and others < 2:
        return  # nobody knows what is usual, and of two the shorter is the measure
    found = merged_with_riders(length * unit(99), *(unit(seed) for seed in range(others))).found.scores
    assert found[0] == NOTHING and NOTHING not in found[1:]


def test_work_of_one_step_in_hundreds_is_something() -> None:
    assert merged_with_riders(unit(1) / 500, unit(2)).found.scores == (UNMEASURED, UNMEASURED)


def test_an_old_members_zeros_weigh_next_to_nothing() -> None:
    alone, beside = merged_with_riders(unit(1)), merged_with_riders(unit(1), torch.zeros(LAYOUT.numel))
    assert beside.norm == pytest.approx(alone.norm, rel=0.02), "half of it, if zeros weighed in full"


def test_a_majority_of_zeros_keeps_nobody_from_being_compared() -> None:
    shared = unit(7)
    honest = [shared + 0.5 * unit(seed) for seed in range(4)]
    found = merged_with_riders(*honest, *[torch.zeros(LAYOUT.numel)] * 5).found.scores
    assert found[4:] == (NOTHING,) * 5 and all(score > USUAL_SCORE / 2 for score in found[:4])


def test_nothing_costs_trust_that_comes_back() -> None:
    assert OLD.trust(NOTHING) == LEAST_TRUST and OLD.after(NOTHING) == OLD.after(0) < OLD.agreement
    once = Mean(OLD.after(NOTHING), OLD.merges + 1)
    assert once.trust(USUAL_SCORE) == FULL_TRUST, "one that had nothing to send"


def partial_of_partials(open_share: float) -> tuple[bytearray, list[tuple[int, int, int, bool]]]:
    """Sums of two leaves, and what their labels say: most strangers are where few seats are."""
    leaves = [((True, 1), (False, 10)), ((True, 10), (False, 0))]
    total, work = Accumulator(LAYOUT, PERIOD), []
    for leaf in leaves:
        one = Accumulator(LAYOUT, PERIOD, open_share=open_share)
        parts = [(100, PERIOD, FULL_TRUST, seat) for seat, many in leaf for _ in range(many)]
        for part, factor in zip(parts, one.factors(parts), strict=True):
            one.add(torch.ones(LAYOUT.numel), *part[:3], factor=factor)
        total.combine(one.weight, one.reach, one.contributions, one.norms, one.sums)
        work += parts
    return encode_partial(total), work


def test_a_partial_of_partials_weighs_at_most_what_its_labels_say() -> None:
    """In each leaf strangers have a share of their own: of the sum only the most is known above. They weigh
    no more there than in one leaf."""
    strict, open_ = (vault_of(SPECS, open_share=share) for share in (0.25, 1.0))
    payload, work = partial_of_partials(open_share=0.25)
    strict.check_partial(0, payload, work, leaf=False)
    few = [(10, *part[1:]) for part in work]
    of_all, same = partial_of_partials(open_share=1.0)
    open_.check_partial(0, of_all, same, leaf=False)
    for partial, labels, leaf in ((payload, work, True), (payload, few, False), (of_all, same, False)):
        with pytest.raises(RemoteError, match="wrong-weight"):
            strict.check_partial(0, partial, labels, leaf=leaf)
