"""Fragment plans: complete, balanced, deterministic; gather and scatter are inverse."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco.errors import ConfigError, InvariantViolation
from p2pdiloco.tensors import layout as plans
from p2pdiloco.tensors.layout import BALANCED, TensorSpec, gather, plan_fragments, scatter


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
