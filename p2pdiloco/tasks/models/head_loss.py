"""Loss behind a model's head, the largest matrix product of a text model, without all logits at once.

Of 65,536 tokens and 50,304 ids, logits in fp32 are 13 GB, and their gradient as much again. So they are made
a chunk of tokens at a time, and the gradient of a chunk is computed while its logits are here. Small
vocabularies are one chunk: torch's own operations.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional

CPU_CHUNK_NUMEL = 1 << 24
"""Logits of a chunk on a CPU: 64 MiB in fp32, some 330 tokens of 50,304 ids."""
CHUNK_NUMEL = 1 << 28
"""Logits of a chunk on an accelerator: 1 GiB in fp32. Each chunk adds up the head's gradient once more."""


def next_token_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy (a scalar, nats) of `targets` (tokens) under the logits `hidden @ head.T`.

    `hidden` is (tokens, width), `head` is (ids, width). Under autocast the products are in its type; softmax,
    sums and the head's gradient are fp32.
    """
    chunks = chunks_of(hidden, head)
    # A compiler fuses the softmax into what reads the logits, and keeps these in the product's type. In bf16
    # that is faster than chunks (docs/results.md); in fp32 it would take twice the memory of passes that
    # are not compiled. (`is_compiling` is true in all threads while one compiles.)
    fuses = torch.compiler.is_dynamo_compiling() and torch.is_autocast_enabled(hidden.device.type)
    if chunks == 1 or fuses:
        return functional.cross_entropy(functional.linear(hidden, head).float(), targets)
    wants_gradient = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
    at_once = -(-len(hidden) // chunks)
    apply: Any = _ChunkedLoss.apply
    return cast(Tensor, apply(hidden, head, targets, at_once, wants_gradient))


def chunks_of(hidden: Tensor, head: Tensor) -> int:
    """Number of chunks in which the logits of `hidden` (tokens, width) are made."""
    most = CPU_CHUNK_NUMEL if hidden.device.type == "cpu" else CHUNK_NUMEL
    return max(1, -(-len(hidden) * len(head) // most))


def narrowed(x: Tensor) -> Tensor:
    """The tensor in the type that autocast multiplies in: cast once for all layers that read it."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class _ChunkedLoss(torch.autograd.Function):
    """The loss and, in the same go, the gradients of its inputs."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, at_once: int, wants_gradient: bool
    ) -> Tensor:
        rows, matrix = narrowed(hidden), narrowed(head)
        total = torch.zeros((), device=hidden.device)
        of_rows, of_head = [], torch.zeros(head.shape if wants_gradient else (), device=head.device)
        for part, wanted in zip(torch.split(rows, at_once), torch.split(targets, at_once), strict=True):
            logits = (part @ matrix.T).float()
            log_sums = logits.logsumexp(dim=-1, keepdim=True)
            wanted = wanted.unsqueeze(-1)
            total = total + (log_sums - logits.gather(-1, wanted)).sum()
            if wants_gradient:
                slope = logits.sub_(log_sums).exp_()
                slope.scatter_add_(-1, wanted, torch.full_like(wanted, -1, dtype=slope.dtype))
                slope = slope.mul_(1 / len(rows)).to(part.dtype)
                of_rows.append(slope @ matrix)
                of_head += slope.T @ part
        if wants_gradient:
            ctx.save_for_backward(torch.cat(of_rows).to(hidden.dtype), of_head.to(head.dtype))
        return total / len(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_head = ctx.saved_tensors
        return of_hidden * gradient, of_head * gradient, None, None, None
