"""Attention: in the precision that is faster where it is computed."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from p2pdiloco.tasks.attention import FP32_TOKENS, attention

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
