"""What models do otherwise on a CPU that computes in bf16."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from p2pdiloco.config.manifest import CausalLMSection, ImageSection
from p2pdiloco.tasks.images import VisionTransformer
from p2pdiloco.tasks.transformer import FP32_TOKENS, ROWS, Transformer, attention, by_rows

SHAPE = (2, 3, 8, 4)


def heads(tokens: int = SHAPE[2], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (*SHAPE[:2], tokens, SHAPE[3])
    return [torch.randn(shape, generator=generator).to(dtype) for _ in range(3)]


@pytest.mark.parametrize("causal", [True, False])
def test_it_is_torchs(causal: bool) -> None:
    query, key, value = heads()
    expected = functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
    assert torch.equal(attention(query, key, value, causal=causal), expected)


def test_under_autocast_short_contexts_on_a_cpu_are_fp32_long_ones_are_not() -> None:
    seen = {}
    for tokens in (FP32_TOKENS, FP32_TOKENS + 1):
        query, key, value = heads(tokens, torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16):
            mixed = attention(query, key, value, causal=True)
            assert functional.linear(mixed, torch.eye(SHAPE[3])).dtype is torch.bfloat16, "after it as before"
        seen[tokens] = mixed.dtype
        expected = functional.scaled_dot_product_attention(
            query.float(), key.float(), value.float(), is_causal=True
        )
        torch.testing.assert_close(mixed.float(), expected, rtol=0, atol=2e-2)
    assert seen == {FP32_TOKENS: torch.float32, FP32_TOKENS + 1: torch.bfloat16}


@pytest.mark.parametrize("count", [0, 1, ROWS, ROWS + 1])
@pytest.mark.parametrize("bf16", [False, True])
def test_rows_are_filled_up_under_autocast_only_and_the_answers_are_theirs(count: int, bf16: bool) -> None:
    seen: list[int] = []

    def layer(rows: torch.Tensor) -> torch.Tensor:
        seen.append(len(rows))
        return rows * 2

    rows = torch.randn(count, 3, generator=torch.Generator().manual_seed(0), requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        answers = by_rows(layer, rows)
    assert torch.equal(answers, rows * 2)
    assert seen == [-(-count // ROWS) * ROWS if bf16 else count]
    torch.autograd.backward(answers.sum())
    assert torch.equal(rows.grad, torch.full_like(rows, 2))


@pytest.mark.parametrize("bf16", [False, True])
def test_built_in_models_do_so(bf16: bool) -> None:
    dense = CausalLMSection(layers=1, heads=2, width=16, context_tokens=8, experts=4)
    text = Transformer(dense)
    section = ImageSection(classes=2, image_pixels=8, channels=1, layers=1, width=16, heads=2, patch_pixels=2)
    images = VisionTransformer(section)
    given: dict[str, torch.Tensor] = {}

    def watch(name: str, module: torch.nn.Module) -> None:
        module.register_forward_pre_hook(lambda _module, inputs: given.update({name: inputs[0]}))

    watch("text", text.get_submodule("model.layers.0.self_attn.o_proj"))
    watch("images", images.get_submodule("blocks.0.attention_out"))
    for index in range(4):
        watch(f"expert {index}", text.get_submodule(f"model.layers.0.block_sparse_moe.experts.{index}"))
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        text(torch.randint(256, (5, 8)))
        images(torch.rand(2, 1, 8, 8))
    assert given.pop("text").dtype is given.pop("images").dtype is torch.float32, "of attention"
    rows = [len(tokens) for tokens in given.values()]
    if bf16:
        assert {count % ROWS for count in rows} == {0}
    else:
        assert sum(rows) == 5 * 8 * dense.experts_per_token, "every token goes to two"
