"""Held-out loss, and a sample of what the model writes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from p2pdiloco.learner.device import autocast
from p2pdiloco.learner.model import Transformer

BATCH_TOKENS = 8192


@torch.no_grad()
def evaluate(model: Transformer, windows: Tensor) -> tuple[float, int]:
    """Mean loss in nats per token over held-out windows (n, context + 1), and the number of tokens."""
    device = next(model.parameters()).device
    context = windows.shape[1] - 1
    total = torch.zeros((), dtype=torch.float64)
    for batch in torch.split(windows, max(1, BATCH_TOKENS // context)):
        ids = batch.to(device)
        with autocast(device):
            logits = model(ids[:, :-1])
        loss = functional.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        total += loss.double().cpu()
    tokens = windows.shape[0] * context
    return float(total) / tokens, tokens


@torch.no_grad()
def generate(
    model: Transformer, prompt: bytes, tokens: int, temperature: float = 0.8, seed: int = 0
) -> bytes:
    """`tokens` bytes that the model puts behind the prompt. Temperature 0: always the likeliest byte."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt or b"\n")
    for _ in range(tokens):
        window = torch.tensor([ids[-model.context_tokens :]], device=device)
        logits = model(window)[0, -1, :256].float().cpu()
        if temperature > 0:
            chances = functional.softmax(logits / temperature, dim=-1)
            ids.append(int(torch.multinomial(chances, 1, generator=generator)))
        else:
            ids.append(int(logits.argmax()))
    return bytes(ids[-tokens:]) if tokens else b""
