"""Attention of the built-in models, in the precision that is the faster one where they are."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

FP32_TOKENS = 256
"""Up to so many tokens of context torch's attention on CPUs takes less time in fp32 than in bf16: with 64 a
third to a half of it, with 256 about as much (`scripts/bench_bf16.py`)."""


def attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
    """Scaled dot products of (batch, heads, tokens, head width): of that shape again.

    In fp32 where a CPU's autocast would take bf16 for so short a context; else as autocast has it."""
    if _faster_in_fp32(query):
        with torch.autocast("cpu", enabled=False):
            return _mixed(query.float(), key.float(), value.float(), causal)
    return _mixed(query, key, value, causal)


def _faster_in_fp32(query: Tensor) -> bool:
    of_cpu = query.device.type == "cpu" and torch.is_autocast_enabled("cpu")
    return of_cpu and query.shape[-2] <= FP32_TOKENS


def _mixed(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
