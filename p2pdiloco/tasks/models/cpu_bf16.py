"""Attention and layers by rows, made fast on a CPU that computes in bf16.

Measured by `scripts/bench/study/bench_bf16.py`. On any other device they are the plain operations.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

FP32_TOKENS = 256
"""Context up to which torch's attention is faster in fp32 than in bf16. With 64 tokens it takes a third to a
half of the time, with 256 about as much, on an AMD processor with AVX512-BF16. AMX was not measured."""
ROWS = 128
"""Multiple to which numbers of rows are filled up that change all the time."""


def attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
    """Attention by scaled dot products of (batch, heads, tokens, head width); the result has that shape
    again.

    Computes in fp32 where a CPU's autocast would take bf16 for so short a context.
    """
    if _of_cpu_in_bf16(query) and query.shape[-2] <= FP32_TOKENS:
        with torch.autocast("cpu", enabled=False):
            return _mixed(query.float(), key.float(), value.float(), causal)
    return _mixed(query, key, value, causal)


def by_rows(layer: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Apply a layer to rows (n, width), each by itself, where n changes from call to call.

    A CPU's kernels for bf16 are compiled for every shape of matrices, and 1024 of them are kept. With experts
    that takes longer than the multiplications, and 0.8 GiB (`tiny-moe`). So rows are filled up to a few
    shapes only.
    """
    count = len(rows)
    if not _of_cpu_in_bf16(rows):
        return layer(rows)
    return layer(functional.pad(rows, (0, 0, 0, -count % ROWS)))[:count]


def _of_cpu_in_bf16(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and torch.is_autocast_enabled("cpu")


def _mixed(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=causal)
