"""The outer step: bit for bit an fp32 elementwise computation, and torch's own Nesterov SGD."""

from __future__ import annotations

import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco.errors import ConfigError, InvariantViolation
from p2pdiloco.tensors import codecs, merge, outer_update
from p2pdiloco.tensors import layout as plans
from p2pdiloco.tensors.codecs import CODECS, state_digest
from p2pdiloco.tensors.layout import BALANCED, TensorSpec, gather, plan_fragments, scatter
from p2pdiloco.tensors.outer_update import momentum_at, outer_step, without_lookahead

NUMEL = (1 << 16) + 77
"""More than one tile, and not a multiple of any vector."""


def draws(seed: int, numel: int = NUMEL):
    generator = np.random.default_rng(seed)
    return [generator.standard_normal(numel).astype(np.float32) * np.float32(s) for s in (1, 0.1, 0.01)]


@pytest.mark.parametrize(("eta", "mu"), [(0.7, 0.9), (1.0, 0.0), (0.3, 0.123456789)])
def test_bit_for_bit_the_numpy_reference(eta, mu):
    theta, momentum, delta = draws(1)
    delta[:5] = [0.0, -0.0, 1e-45, 3e-39, 1e30]
    eta32, mu32 = np.float32(eta), np.float32(mu)
    expected_momentum = mu32 * momentum + delta
    expected_theta = theta - eta32 * (delta + mu32 * expected_momentum)
    out_theta, out_momentum = torch.empty(NUMEL), torch.empty(NUMEL)
    outer_step(*map(torch.from_numpy, (theta, momentum, delta)), eta, mu, out_theta, out_momentum)
    assert out_momentum.numpy().tobytes() == expected_momentum.tobytes()
    assert out_theta.numpy().tobytes() == expected_theta.tobytes()


def test_many_steps_follow_torch_sgd_with_nesterov():
    parameter = torch.nn.Parameter(torch.from_numpy(draws(2, 500)[0]))
    theta, momentum = parameter.detach().clone(), torch.zeros(500)
    sgd = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for round_ in range(20):
        delta = torch.from_numpy(draws(10 + round_, 500)[2])
        parameter.grad = delta.clone()
        sgd.step()
        next_theta, next_momentum = torch.empty(500), torch.empty(500)
        outer_step(theta, momentum, delta, 0.7, 0.9, next_theta, next_momentum)
        theta, momentum = next_theta, next_momentum
    torch.testing.assert_close(theta, parameter.detach(), rtol=1e-5, atol=1e-5)


def test_without_its_lookahead_theta_is_where_nesterov_as_first_written_is():
    """v' = mu v - eta gradient(x + mu v), x' = x + v'; our theta is x + mu v."""
    x, velocity = draws(3, 200)[0].astype(np.float64), np.zeros(200)
    theta, momentum = torch.from_numpy(x).float(), torch.zeros(200)
    for _ in range(12):
        velocity = 0.9 * velocity - 0.1 * (x + 0.9 * velocity)  # of x squared / 2
        x = x + velocity
        before, gradient = theta, theta.clone()
        theta, next_momentum = torch.empty(200), torch.empty(200)
        outer_step(before, momentum, gradient, 0.1, 0.9, theta, next_momentum)
        momentum = next_momentum
        found = without_lookahead(theta, momentum, 0.1, 0.9)
        np.testing.assert_allclose(found.numpy(), x, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(found, before - 0.1 * gradient)
    assert not np.allclose(theta.numpy(), x, atol=1e-2)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.96])
def test_a_part_of_an_interval_gets_that_part_of_a_step_of_momentum(share):
    theta, momentum, delta = draws(1)
    decay, rest = np.float32(1 - share * (1 - 0.9)), np.float32((1 - share) * 0.9)
    expected_momentum = decay * momentum + delta
    work = np.float32(0.9) * expected_momentum + delta - rest * momentum
    expected_theta = theta - np.float32(0.7) * work
    out = [torch.empty(NUMEL), torch.empty(NUMEL)]
    outer_step(*map(torch.from_numpy, (theta, momentum, delta)), 0.7, 0.9, *out, share)
    assert out[0].numpy().tobytes() == expected_theta.tobytes()
    assert out[1].numpy().tobytes() == expected_momentum.tobytes()
    # Without look-ahead: between where it was and where a whole step from theta would have led.
    found = without_lookahead(*out, 0.7, 0.9)
    was = without_lookahead(torch.from_numpy(theta), torch.from_numpy(momentum), 0.7, 0.9)
    between = (1 - share) * was + share * torch.from_numpy(theta) - 0.7 * torch.from_numpy(delta)
    torch.testing.assert_close(found, between, rtol=1e-5, atol=1e-6)


def test_momentum_grows_linearly_over_the_first_merges():
    assert [momentum_at(n, 0.8, 4) for n in range(1, 8)] == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 0.8, 0.8])
    assert momentum_at(1, 0.9, 0) == 0.9
    with pytest.raises(InvariantViolation):
        momentum_at(0, 0.9, 4)


def test_state_digest_depends_on_number_and_every_bit():
    theta, momentum = torch.zeros(3), torch.zeros(3)
    digests = {state_digest(1, theta, momentum), state_digest(2, theta, momentum)}
    digests.add(state_digest(1, theta, -momentum))
    theta[2] = 1e-45
    digests.add(state_digest(1, theta, momentum))
    assert len(digests) == 4 and all(len(d) == 32 for d in digests)
    spelled = blake3(struct.pack("<Qfff", 1, 1.0, 2.0, 0.5))
    assert state_digest(1, torch.tensor([1.0, 2.0]), torch.tensor([0.5])) == spelled.digest()


# Fragment plans: complete, balanced, deterministic; gather and scatter are inverse.


def gpt_specs(layers: int, width: int, vocabulary: int, context: int) -> list[TensorSpec]:
    specs = [TensorSpec("tok", (vocabulary, width), True), TensorSpec("pos", (context, width), True)]
    for i in range(layers):
        specs += [
            TensorSpec(f"{i}.qkv", (3 * width, width)),
            TensorSpec(f"{i}.proj", (width, width)),
            TensorSpec(f"{i}.up", (4 * width, width)),
            TensorSpec(f"{i}.down", (width, 4 * width)),
            TensorSpec(f"{i}.norm", (width,)),
        ]
    return specs


def largest_over_mean(layouts) -> float:
    sizes = [layout.numel for layout in layouts]
    return max(sizes) * len(sizes) / sum(sizes)


@pytest.mark.parametrize(
    ("specs", "fragments"),
    [
        (gpt_specs(4, 128, 256, 128), 24),
        (gpt_specs(12, 768, 50257, 1024), 24),
        (gpt_specs(12, 768, 50257, 1024), 1),
        (gpt_specs(6, 384, 256, 256), 8),
        (gpt_specs(4, 128, 256, 128), 1024),
        ([TensorSpec("a", (7, 1000)), TensorSpec("b", (7, 1000)), TensorSpec("c", (7, 1000))], 2),
    ],
)
def test_largest_fragment_is_close_to_the_mean(specs, fragments):
    layouts = plan_fragments(specs, fragments)
    assert len(layouts) == fragments
    assert largest_over_mean(layouts) <= BALANCED


def test_tensors_that_fit_stay_whole():
    specs = [TensorSpec(f"t{i}", (10, 10)) for i in range(12)]
    layouts = plan_fragments(specs, 4)
    assert all(piece.numel == 100 for layout in layouts for piece in layout.pieces)


shapes = st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(shapes, st.booleans()), min_size=1, max_size=12), st.integers(1, 12))
def test_every_element_is_in_exactly_one_fragment(parts, fragments):
    specs = [TensorSpec(f"t{i}", shape, embedding) for i, (shape, embedding) in enumerate(parts)]
    try:
        layouts = plan_fragments(specs, fragments)
    except ConfigError:
        assert fragments > sum(spec.rows for spec in specs if spec.numel)
        return
    assert layouts == plan_fragments(specs, fragments)
    seen = {spec.name: torch.zeros(spec.numel, dtype=torch.int32) for spec in specs}
    for index, layout in enumerate(layouts):
        assert layout.index == index and layout.numel > 0
        at = 0
        for piece in layout.pieces:
            assert piece.fragment_offset == at
            at += piece.numel
            seen[piece.tensor][piece.tensor_offset : piece.tensor_offset + piece.numel] += 1
        assert at == layout.numel
    assert all((count == 1).all() for count in seen.values())


def test_gather_and_scatter_are_inverse_and_keep_parameters_trainable():
    specs = gpt_specs(2, 8, 37, 5)
    source = {s.name: torch.nn.Parameter(torch.randn(s.shape)) for s in specs}
    target = {s.name: torch.nn.Parameter(torch.zeros(s.shape)) for s in specs}
    for layout in plan_fragments(specs, 7):
        flat = torch.empty(layout.numel)
        gather(source, layout, flat)
        scatter(flat, layout, target)
    assert all(torch.equal(source[s.name], target[s.name]) for s in specs)
    assert all(p.requires_grad and p.grad_fn is None for p in target.values())


def test_gather_refuses_a_buffer_of_another_size():
    (layout,) = plan_fragments([TensorSpec("a", (3, 3))], 1)
    with pytest.raises(InvariantViolation):
        gather({"a": torch.zeros(3, 3)}, layout, torch.empty(10))


def test_more_fragments_than_rows_is_a_mistake_of_the_manifest():
    with pytest.raises(ConfigError, match="fragments is 5"):
        plan_fragments([TensorSpec("a", (4, 100))], 5)


@pytest.mark.parametrize(
    "shapes", [{"a": (1, 20_000_000), "b": (20_000_000,)}, {"a": (1, 3_000_000), "b": (1 << 20, 1)}]
)
def test_shapes_that_never_come_out_even_have_a_bounded_plan(
    shapes: dict[str, tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, most = plans._fill, list[int]()

    def fill(cuts: Any, fragments: int) -> Any:
        assert len(cuts) <= plans.MAX_CUTS
        most.append(len(cuts))
        return real(cuts, fragments)

    monkeypatch.setattr(plans, "_fill", fill)
    specs = [TensorSpec(name, shape) for name, shape in shapes.items()]
    plan = plan_fragments(specs, 1024)
    assert sum(part.numel for part in plan) == sum(spec.numel for spec in specs)
    assert all(part.numel for part in plan) and len(most) < 24


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_formats_do_not_matter(dtype: torch.dtype) -> None:
    """Of channels_last, a transposed tensor, and one cut out of a larger: elements are in logical order."""
    torch.manual_seed(0)
    plain = {
        "conv": torch.randn(6, 3, 2, 2),
        "linear": torch.randn(5, 4),
        "cut": torch.randn(7),
        "s": torch.ones(()),
    }
    layouts = plan_fragments([TensorSpec(name, tuple(value.shape)) for name, value in plain.items()], 3)
    params = {
        "conv": plain["conv"].to(dtype).to(memory_format=torch.channels_last),
        "linear": plain["linear"].to(dtype).t().contiguous().t(),
        "cut": plain["cut"].to(dtype).repeat_interleave(2)[::2],
        "s": plain["s"].to(dtype).clone(),
    }
    assert not any(params[name].is_contiguous() for name in ("conv", "linear", "cut"))
    for layout in layouts:
        wanted, found = torch.empty(layout.numel), torch.empty(layout.numel)
        gather({name: value.to(dtype) for name, value in plain.items()}, layout, wanted)
        gather(params, layout, found)
        assert torch.equal(found, wanted)
        scatter(wanted + 1, layout, params)
    for name, value in plain.items():
        assert torch.equal(params[name], (value.to(dtype).float() + 1).to(dtype))


# The known answer of merges, which every machine must make before it accuses anybody.


def test_this_machine_makes_it() -> None:
    """If it was changed on purpose, merges have other bits: raise WIRE_VERSION, and then ANSWER."""
    assert outer_update.merge_answer() == outer_update.MERGE_ANSWER


def test_another_order_of_additions_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "norm", lambda values: float(values.double().square().sum().sqrt()))
    assert outer_update.merge_answer() != outer_update.MERGE_ANSWER


def test_a_fused_product_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def fused(total: torch.Tensor, values: torch.Tensor, factor: float, _work: torch.Tensor) -> None:
        total.copy_((total.double() + values.double() * codecs._rounded(factor)).float())

    monkeypatch.setattr(merge, "add_scaled", fused)
    assert outer_update.merge_answer() != outer_update.MERGE_ANSWER


def test_this_machine_makes_the_known_outer_steps() -> None:
    """If it was changed on purpose, states have other bits: raise WIRE_VERSION, and then STEP_ANSWER."""
    assert outer_update.step_answer() == outer_update.STEP_ANSWER


def test_another_outer_step_has_another_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    step = outer_update.outer_step

    def rounded(*job: torch.Tensor | float) -> None:
        step(*job)  # type: ignore[arg-type]
        theta = job[5]
        assert isinstance(theta, torch.Tensor)
        theta.mul_(1 + 2.0**-22)

    monkeypatch.setattr(outer_update, "outer_step", rounded)
    assert outer_update.step_answer() != outer_update.STEP_ANSWER


FLUSHES = """
import torch
from p2pdiloco.tensors import outer_update as known_answer
assert known_answer.step_answer() == known_answer.STEP_ANSWER
assert known_answer.merge_answer() == known_answer.MERGE_ANSWER
if not torch.set_flush_denormal(True):
    print("this processor cannot")
else:
    assert known_answer.step_answer() != known_answer.STEP_ANSWER, "the outer step"
    assert known_answer.merge_answer() != known_answer.MERGE_ANSWER, "the merge"
    assert not known_answer.merges_as_everywhere() and not known_answer.steps_as_everywhere()
    print("noticed")
"""


@pytest.mark.process
def test_a_machine_that_makes_the_smallest_numbers_zero_is_noticed() -> None:
    """It would find false what all others find right: states, once some momentum is next to nothing, and
    merges of what has such numbers. So it audits and accuses nobody."""
    done = subprocess.run([sys.executable, "-c", FLUSHES], capture_output=True, text=True, check=True)
    if done.stdout.strip() != "noticed":
        pytest.skip(done.stdout)


def _flushed(job: Callable[..., Any]) -> Callable[..., Any]:
    def work(*given: Any, **named: Any) -> Any:
        torch.set_flush_denormal(True)
        try:
            return job(*given, **named)
        finally:
            torch.set_flush_denormal(False)

    return work


@pytest.mark.parametrize("name", sorted(each.name for each in CODECS.values() if not each.sparse))
def test_it_is_noticed_in_each_codecs_decoding_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy of bits has nothing to flush."""
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot")
    monkeypatch.setattr(type(CODECS[name]), "decode", _flushed(CODECS[name].decode.__func__))  # type: ignore[attr-defined]
    assert (outer_update.merge_answer() == outer_update.MERGE_ANSWER) == (name in ("fp32", "bf16"))


@pytest.mark.parametrize("place", ["add_scaled", "scale"])
def test_it_is_noticed_in_the_sums_alone(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot")
    monkeypatch.setattr(merge, place, _flushed(getattr(merge, place)))
    assert outer_update.merge_answer() != outer_update.MERGE_ANSWER
