"""Two parts of models that are slow on a CPU that computes in bf16 if they are left as they are
(`scripts/bench/study/bench_bf16.py`). Everywhere else they are what they look like."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

FP32_TOKENS = 256
"""Up to so many tokens of context torch's attention takes less time in fp32 than in bf16: with 64 a third to
a half of it, with 256 about as much, on an AMD processor with AVX512-BF16. Nobody has looked at AMX."""
ROWS = 128
"""What comes in numbers of rows that change all the time is filled up to a multiple of this."""


def attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
    """Scaled dot products of (batch, heads, tokens, head width): of that shape again.

    In fp32 where a CPU's autocast would take bf16 for so short a context."""
    if _of_cpu_in_bf16(query) and query.shape[-2] <= FP32_TOKENS:
        with torch.autocast("cpu", enabled=False):
            return _mixed(query.float(), key.float(), value.float(), causal)
    return _mixed(query, key, value, causal)


def by_rows(layer: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """`layer` of rows (n, width), of which each is answered by itself, where n is another one at every call.

    A CPU's kernels for bf16 are compiled for every shape of matrices, and 1024 of them are kept: with experts
    that takes longer than the multiplications, and 0.8 GiB (`tiny-moe`). So there are a few shapes only."""
    count = len(rows)
    if not _of_cpu_in_bf16(rows):
        return layer(rows)
    return layer(functional.pad(rows, (0, 0, 0, -count % ROWS)))[:count]


def _of_cpu_in_bf16(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and torch.is_autocast_enabled("cpu")


def _mixed(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
