"""Passes and updates recorded as CUDA graphs: all kernels of one are a single launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from p2pdiloco.learner.device import give_memory_back
from p2pdiloco.learner.optimizer.build import Optimizer, set_learning_rate

if TYPE_CHECKING:
    from p2pdiloco.tasks.task import Batch

WARM_UP_PASSES = 3


class RecordedPass:
    """A pass whose gradients are the whole step's: a replay writes them anew, always to the same memory.

    What its passes keep between forward and backward stays allocated as long as it lives.
    """

    def __init__(
        self, forward: Callable[..., Tensor], parameters: Sequence[Tensor], part: Batch, share: float
    ) -> None:
        """Record passes as large as `part`, a step's only one, of which the loss counts `share`.

        Raises:
            RuntimeError: the device lacks memory for it, or something in the pass waits for the device.
        """
        self._parameters, self._share = parameters, share
        self._part = tuple(tensor.clone() for tensor in part)
        give_memory_back(part[0].device)  # what passes held so far is not for graphs
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP_PASSES):
                self._clear()
                torch.autograd.backward(forward(*self._part))
        torch.cuda.current_stream().wait_stream(side)
        self._clear()
        self._graph = torch.cuda.CUDAGraph()
        # Threads beside the inner loop use the device, too.
        with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
            loss = forward(*self._part) * share
            torch.autograd.backward(loss)
            self._loss = loss.detach()
        self._gradients = [parameter.grad for parameter in parameters]
        self._clear()

    def fits(self, part: Batch, share: float) -> bool:
        """Tell whether this pass is like the recorded one."""
        return share == self._share and all(a.shape == b.shape for a, b in zip(part, self._part, strict=True))

    def replay(self, part: Batch) -> Tensor:
        """Make the pass; returns the loss, which the next replay overwrites."""
        for ours, theirs in zip(self._part, part, strict=True):
            ours.copy_(theirs, non_blocking=True)
        self._graph.replay()
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._loss

    def _clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class RecordedUpdate:
    """An optimizer step on gradients that are always in the same memory (`RecordedPass`)."""

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        """Record the next step, of an optimizer that has made some; nothing is updated yet.

        Raises:
            RuntimeError: the device lacks memory for it, or something in the step waits for the device.
        """
        self._optimizer = optimizer
        self._rate = torch.zeros((), device=device)
        self._used = self._gradients_and_moments()
        rate = optimizer.param_groups[0]["lr"]
        self._graph = torch.cuda.CUDAGraph()
        set_learning_rate(optimizer, self._rate)
        try:
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                optimizer.step()
        finally:
            set_learning_rate(optimizer, rate)

    def replay(self) -> bool:
        """Make the step, with the learning rate that is set; False: a gradient or a moment is elsewhere by
        now."""
        used = self._gradients_and_moments()
        if len(used) != len(self._used) or any(a is not b for a, b in zip(used, self._used, strict=True)):
            return False
        self._rate.fill_(self._optimizer.param_groups[0]["lr"])
        self._graph.replay()
        return True

    def _gradients_and_moments(self) -> list[Tensor | None]:
        groups, states = self._optimizer.param_groups, self._optimizer.state.values()
        gradients = [parameter.grad for group in groups for parameter in group["params"]]
        return gradients + [moment for state in states for moment in state.values()]
