"""Merging: weights, length of the result, embeddings. Partial merges: test_partial."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco.core.api.types import MAX_WEIGHT
from p2pdiloco.errors import InvariantViolation, RemoteError
from p2pdiloco.tensors.layout import TensorSpec, plan_fragments
from p2pdiloco.tensors.merge import Accumulator, contribution_reach, contribution_weight

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


def merged(deltas, work):
    accumulator, out = Accumulator(LAYOUT, PERIOD), torch.empty(LAYOUT.numel)
    for delta, (tokens, steps) in zip(deltas, work, strict=True):
        accumulator.add(delta, tokens, steps)
    accumulator.result(out)
    return out


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


def test_orthogonal_pseudo_gradients_keep_their_length_and_embeddings_average():
    deltas = []
    for i in range(3):
        delta = torch.zeros(LAYOUT.numel)
        for piece in LAYOUT.pieces:
            delta[piece.fragment_offset + i] = 2.0
        deltas.append(delta)
    out = merged(deltas, [(10, 1)] * 3)
    for piece in LAYOUT.pieces:
        length = float(out[piece.fragment_offset : piece.fragment_offset + piece.numel].norm())
        assert length == pytest.approx(2.0 / math.sqrt(3) if piece.plain_mean else 2.0, rel=1e-6)


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
    assert [contribution_reach(300, 6, period) for period in (24, 6, 3)] == [3750.0, 15000.0, 15000.0]


@pytest.mark.parametrize(("tokens", "steps"), [(0, 1), (1, 0), (-1, 1), (int(MAX_WEIGHT), 1)])
def test_implausible_work_is_a_peers_fault(tokens, steps):
    with pytest.raises(RemoteError) as refused:
        Accumulator(LAYOUT, PERIOD).add(torch.zeros(LAYOUT.numel), tokens, steps)
    assert refused.value.reason == "implausible-tokens"


def test_a_merge_of_nothing_is_our_own_mistake():
    with pytest.raises(InvariantViolation):
        Accumulator(LAYOUT, PERIOD).result(torch.empty(LAYOUT.numel))
