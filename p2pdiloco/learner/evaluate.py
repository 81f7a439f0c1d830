"""Figures of a model on samples that nobody trains on."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec import Struct
from torch import nn

from p2pdiloco.learner.device import autocast, give_memory_back, out_of_memory, passes_in_bf16
from p2pdiloco.learner.lifeline import PassTooLarge
from p2pdiloco.tasks.task import Samples, Task

if TYPE_CHECKING:
    from p2pdiloco.tasks.task import Batch

BATCH_TOKENS = 8192


class Evaluation(Struct, frozen=True):
    """Figures of a model, means over held-out samples."""

    loss: float
    """Nats per token (text) or per image."""
    tokens: int
    metrics: dict[str, float]
    """Figures that the task measures beside the loss: "accuracy", for instance."""


@torch.no_grad()
def evaluate(
    task: Task,
    model: nn.Module,
    batch: Batch,
    together: int = 0,
    precision: str = "auto",
    tell: Callable[[int, int], None] = lambda _done, _total: None,
) -> Evaluation:
    """The task's figures of this model on a batch of held-out samples (`heldout_batch`), on its device;
    without what a model does in training only. `together`: samples at a time, where several processes compute
    it together (0: it is one alone). `precision` as in `LearnerOptions`, but on CPUs always fp32: it costs
    little, and machines with and without bf16 then tell the same. `tell` is told how many samples are done,
    and of how many.

    Raises:
        PassTooLarge: they do not fit, and others compute them too.
    """
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        return _evaluated(task, model, batch, together, precision, tell)
    finally:
        for module in trained:
            module.training = True


def _evaluated(
    task: Task,
    model: nn.Module,
    batch: Batch,
    together: int,
    precision: str,
    tell: Callable[[int, int], None],
) -> Evaluation:
    device = next(model.parameters()).device
    bf16 = device.type != "cpu" and passes_in_bf16(device, precision)
    count = len(batch[0])
    size = together or max(1, BATCH_TOKENS // task.tokens_per_sample)
    sums: dict[str, float] = {}
    done = 0
    while done < count:
        part = tuple(tensor[done : done + size] for tensor in batch)
        found = _metrics(task, model, part, device, bf16)
        if found is None and together:
            raise PassTooLarge(
                f"{len(part[0])} samples do not fit while evaluating: half as many from now on"
            )
        if found is None:  # training left less memory than that
            size = (size + 1) // 2
            give_memory_back(device)
            continue
        for name, value in found.items():
            sums[name] = sums.get(name, 0.0) + value * len(part[0])
        done += len(part[0])
        tell(done, count)
    means = {name: total / count for name, total in sums.items()}
    return Evaluation(means.pop("loss"), count * task.tokens_per_sample, means)


def _metrics(
    task: Task, model: nn.Module, part: Batch, device: torch.device, bf16: bool
) -> dict[str, float] | None:
    """Figures of a part; None if it does not fit into memory, and a smaller one might."""
    try:
        with autocast(device, bf16):
            found = task.metrics(model, tuple(tensor.to(device) for tensor in part))
        return {name: float(value) for name, value in found.items()}
    except (RuntimeError, MemoryError) as error:
        if len(part[0]) == 1 or not out_of_memory(error):
            raise
        return None


def heldout_batch(task: Task, samples: Samples, tokens: int) -> Batch:
    """Pick the same held-out samples every time, evenly spread: about `tokens` tokens, or one sample."""
    count = min(len(samples), max(1, tokens // task.tokens_per_sample))
    return samples.batch(np.arange(count, dtype=np.int64) * len(samples) // count)
