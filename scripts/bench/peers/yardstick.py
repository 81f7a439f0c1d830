"""Yardstick of a learner's speed: a plain GPT-2 of the same width, compiled, with fused AdamW; and ours.

The yardstick is what somebody would write who trains one model on one device: no data (its tokens lie on the
device), no clipping, nothing read back. Ours is the whole inner step of a learner (`learner.loop`). Each is
in a process of its own, so that peaks of memory are each one's own.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from typing import Any, cast

import msgspec
import torch
from torch import Tensor, nn
from torch.nn import functional

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.learner.channel import PassOptions
from p2pdiloco.learner.inner_step import TIMED_STEPS, UNTIMED_STEPS
from p2pdiloco.learner.loop import Training
from p2pdiloco.learner.ranks import (
    autocast,
    choose_device,
    configure_torch,
    micro_batch_tokens,
    passes_in_bf16,
)
from p2pdiloco.tasks.registry import task_of

WINDOWS = 5
SETTLED_STEPS = 2 * (UNTIMED_STEPS + TIMED_STEPS) + 2
"""Inner steps after which a learner that compiles at once changes nothing any more."""


class Found(msgspec.Struct, frozen=True):
    """Speed and memory of one of the two."""

    tokens_per_s: list[float]
    """Speed in each window."""
    memory_bytes: int
    """Largest sum of what torch had allocated on a GPU; 0 on a CPU."""
    outside: float | None
    """Share of the time in which no pass was computed."""
    start_s: float
    """Until the first of the steps that are counted."""
    notes: list[str]


class PlainBlock(nn.Module):
    """GPT-2's block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.widen, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """The next stream."""
        q, k, v = (
            t.view(*x.shape[:2], self.heads, -1).transpose(1, 2)
            for t in self.mix(self.before(x)).chunk(3, -1)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return cast(Tensor, x + self.narrow(functional.gelu(self.widen(self.between(x)), approximate="tanh")))


class PlainGPT2(nn.Module):
    """GPT-2 with its head tied to the embedding."""

    def __init__(self, layers: int, width: int, heads: int, context: int, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(PlainBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The mean loss."""
        x = self.tokens(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = functional.linear(self.norm(x), self.tokens.weight)
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain(manifest: Manifest, device_name: str, pass_tokens: int, window_s: float) -> Found:
    """Measure the yardstick."""
    began = time.monotonic()
    device = choose_device(device_name)
    configure_torch(device, 0)
    model_of = manifest.model
    context, step_tokens = int(model_of["context_tokens"]), manifest.inner.tokens_per_step
    sizes = (model_of["layers"], model_of["width"], model_of["heads"], context, model_of["vocabulary"])
    model = PlainGPT2(*sizes).to(device)
    compiled: Any = torch.compile(model)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    samples = micro_batch_tokens(device, pass_tokens, step_tokens) // context
    passes = step_tokens // context // samples
    ids = torch.randint(int(model_of["vocabulary"]), (samples, context + 1), device=device)
    bf16 = passes_in_bf16(device, "auto")

    def step() -> None:
        for _ in range(passes):
            with autocast(device, bf16):
                loss = compiled(ids[:, :-1], ids[:, 1:]) / passes
            torch.autograd.backward(loss)
        adamw.step()
        adamw.zero_grad()

    for _ in range(3):
        step()
    speeds, memory, start_s = _windows(step, samples * context * passes, device, window_s, began)
    return Found(speeds, memory, None, start_s, [])


def ours(manifest: Manifest, device_name: str, pass_tokens: int, window_s: float, choice: str) -> Found:
    """Measure a learner's inner steps. `choice`: of `--compile`."""
    began = time.monotonic()
    device = choose_device(device_name)
    configure_torch(device, 0)
    task = task_of(manifest)
    model = task.model().to(device)
    options = PassOptions(pass_tokens, compile=cast(Any, choice))
    data = task.load_data(None)
    training = Training(task, model, data.train, "yardstick", options=options)
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    passes: Any = training._passes
    gradients = passes.gradients

    def timed(batch: tuple[Tensor, ...], whole: int) -> Tensor:
        if device.type != "cuda":
            return cast(Tensor, gradients(batch, whole))
        both = (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        both[0].record()  # type: ignore[no-untyped-call]
        loss = gradients(batch, whole)
        both[1].record()  # type: ignore[no-untyped-call]
        events.append(both)
        return cast(Tensor, loss)

    passes.gradients = timed
    for _ in range(SETTLED_STEPS if choice != "never" else 3):
        training.step()
    events.clear()
    tokens = manifest.inner.tokens_per_step
    speeds, memory, start_s = _windows(training.step, tokens, device, window_s, began)
    spent_s = sum(tokens / speed for speed in speeds) / len(speeds)
    inside = [first.elapsed_time(last) / 1000 for first, last in events]  # type: ignore[no-untyped-call]
    outside = 1 - sum(inside) / len(inside) / spent_s if inside else None
    return Found(speeds, memory, outside, start_s, training.take_notes())


def _windows(
    step: Callable[[], object], tokens: int, device: torch.device, window_s: float, began: float
) -> tuple[list[float], int, float]:
    """Tokens per second of each window; peak memory; seconds until the first."""
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start_s = time.monotonic() - began
    speeds = []
    for _ in range(WINDOWS):
        steps, at = 0, time.perf_counter()
        while not steps or time.perf_counter() - at < window_s:
            step()
            steps += 1
        wait()
        speeds.append(steps * tokens / (time.perf_counter() - at))
    return speeds, torch.cuda.max_memory_allocated() if device.type == "cuda" else 0, start_s


def apart(function: Callable[..., Found], *arguments: object) -> Found:
    """Call in a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, arguments)
