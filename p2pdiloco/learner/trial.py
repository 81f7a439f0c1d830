"""Program that tries states of others on this node's held-out data: `python -m p2pdiloco.learner.trial`.

`TryOrder` comes in, `StatesTried` or `Failed` goes out. It is a process of its own, as no learner runs
before a node is a full member, and it ends when its input does.

Rules: docs/protocol/belief.md, section 4.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Callable, Collection, Sequence
from math import isfinite
from statistics import fmean, stdev
from typing import TYPE_CHECKING

import safetensors
import torch
from torch import Tensor, nn

from p2pdiloco.errors import P2PDilocoError, UserError
from p2pdiloco.learner.channel import (
    Deframer,
    Failed,
    LearnerEvent,
    StatesTried,
    TryOrder,
    decode_command,
    frame,
)
from p2pdiloco.learner.loop import evaluate, heldout_batch
from p2pdiloco.learner.ranks import choose_device, configure_torch, out_of_memory
from p2pdiloco.learner.training_process import load_data, task_and_constants
from p2pdiloco.tasks.description import instance_of
from p2pdiloco.tasks.initial import named_parameters
from p2pdiloco.tasks.task import Task
from p2pdiloco.tensors.layout import Layouts, plan_fragments, scatter
from p2pdiloco.util import end_with, yield_memory

if TYPE_CHECKING:
    from p2pdiloco.tasks.task import Batch

PARTS = 8
"""Parts of the held-out samples that are measured apart, to know how far a mean may be off."""
SAME_DATA_SHARE, OWN_DATA_SHARE = 0.05, 0.5
"""Share of what was learned that a state may be worse by: where all read the same data, and where each brings
its own, on which others' work is not always good."""
LEAST_SHARE = 0.01
"""Share of our loss that it may be worse by, whatever was learned, as far as the parts differ (`ERRORS`)."""
ERRORS = 2.0
"""Standard errors that count."""


class LossComparison:
    """Comparison of others' states with ours on the same held-out samples, in fp32.

    Each is measured twice: as it is, and a step on, where its momentum alone leads.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        layouts: Layouts,
        parts: Sequence[Batch],
        state: Callable[[str], Tensor],
    ) -> None:
        """`state` reads an fp32 [numel] by its name: `ours.F.theta`, `ours.F.momentum` of each fragment F,
        and so `theirs` of those that are tried."""
        self._task, self._model, self._layouts = task, model, layouts
        self._parts, self._state = parts, state
        outer = task.manifest.outer
        self._step = outer.learning_rate * outer.momentum
        self._parameters = named_parameters(model)
        self._ours = [self._losses((), ahead) for ahead in (False, True)]
        self.ours = fmean(self._ours[0])
        share = SAME_DATA_SHARE if task.manifest.data.source in ("embedded", "hub") else OWN_DATA_SHARE
        self.allowed = share * self._learned()
        """Loss by which others' states may be above ours."""

    def passes(self, fragments: Sequence[int], best: float | None) -> tuple[bool, str]:
        """Tell whether others' states of these fragments are no worse than ours, together. What ours was
        once, by `best`, counts: else a little could be lost each time. Also returns the losses, as words."""
        words, passed = "", True
        lost = max(0.0, self.ours - best) if best is not None else 0.0
        for ahead, ours in zip((False, True), self._ours, strict=True):
            theirs = self._losses(fragments, ahead)
            if not all(map(isfinite, theirs)):
                return False, f"loss not finite, ours {self.ours:.4f}"
            words = (
                words or f"loss {fmean(theirs):.4f}, ours {self.ours:.4f}, at most {self.allowed:.4f} more"
            )
            if not all(map(isfinite, ours)):
                continue  # anything is better
            more = [their - our for their, our in zip(theirs, ours, strict=True)]
            error = ERRORS * stdev(more) / len(more) ** 0.5 if len(more) > 1 else 0.0
            allowed = max(self.allowed, min(error, LEAST_SHARE * fmean(ours)))
            passed = passed and fmean(more) <= max(0.0, allowed - lost)
        return passed, words

    def _learned(self) -> float:
        """Compute by how much ours is better than version 0; our loss itself where that was given."""
        if self._task.manifest.run.initial:
            return self.ours
        with torch.no_grad():
            for name, value in self._task.initial_parameters().items():
                self._parameters[name].copy_(value)
        return max(0.0, fmean(self._losses_now()) - self.ours)

    def _losses(self, theirs: Collection[int], ahead: bool) -> list[float]:
        with torch.no_grad():
            for layout in self._layouts:
                name = f"{'theirs' if layout.index in theirs else 'ours'}.{layout.index}"
                theta = self._state(f"{name}.theta")
                if ahead:
                    theta = theta.sub(self._state(f"{name}.momentum"), alpha=self._step)
                scatter(theta, layout, self._parameters)
        return self._losses_now()

    def _losses_now(self) -> list[float]:
        return [evaluate(self._task, self._model, part, precision="fp32").loss for part in self._parts]


def tried(order: TryOrder) -> StatesTried:
    """Try the states in the order's file.

    Raises:
        UserError: device or data cannot be used, or nothing is held out.
    """
    options, manifest = order.options, order.manifest
    task, constants = task_and_constants(manifest, options)
    batch = heldout_batch(task, load_data(task, options).heldout, options.evaluation_tokens)
    count = len(batch[0])
    if not count:
        raise UserError("no samples are held out here")
    parts = min(PARTS, count)
    cuts = [count * place // parts for place in range(parts + 1)]
    batches = [tuple(column[a:b] for column in batch) for a, b in itertools.pairwise(cuts)]
    layouts = plan_fragments(task.specs(), manifest.sync.fragments)
    states = safetensors.safe_open(order.path, framework="pt")  # one at a time: all are four models
    for device in dict.fromkeys((choose_device(options.device), torch.device("cpu"))):
        configure_torch(device, options.threads)
        try:
            model = instance_of(task, constants).to(device)
            found = LossComparison(task, model, layouts, batches, states.get_tensor)
            passed, words = found.passes(order.fragments, order.best)
        except (RuntimeError, MemoryError) as error:
            if device.type == "cpu" or not out_of_memory(error):
                raise
            continue  # a learner may have it
        return StatesTried(passed, found.ours, words)
    raise UserError("there is too little memory for a second model")


def main() -> int:
    """Try what comes, and answer. What a task or a library prints goes elsewhere."""
    yield_memory()
    end_with(sys.stdin)
    answers = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    deframer, bodies = Deframer(), list[bytes]()
    while not bodies:
        bodies = deframer.feed(os.read(sys.stdin.fileno(), 1 << 16))
    order = decode_command(bodies[0])
    assert isinstance(order, TryOrder)
    os.nice(order.options.niceness)
    answer: LearnerEvent
    try:
        answer = tried(order)
    except P2PDilocoError as error:
        answer = Failed(str(error)[:4096])
    os.write(answers, frame(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main())
