"""Forward and backward passes over a step's samples, as many at a time as memory holds."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from msgspec import Struct
from torch import Tensor, nn

from p2pdiloco.errors import UserError, first_line
from p2pdiloco.learner.device import autocast, give_memory_back, out_of_memory
from p2pdiloco.learner.lifeline import PassTooLarge
from p2pdiloco.tasks.task import Task

if TYPE_CHECKING:
    from p2pdiloco.tasks.task import Batch


class PassOptions(Struct, frozen=True):
    """Choices about passes, as in `learner.channel_messages.LearnerOptions`."""

    micro_batch_tokens: int = 0
    """Tokens of one pass; 0: `learner.device` decides."""
    halvings: int = 0
    """Times that they are halved, since earlier processes lacked memory for them."""
    compiled: bool = False
    precision: str = "auto"


class Passes:
    """Gradients of a step, added up pass by pass. A pass that does not fit into memory is halved from then
    on, so on an accelerator, where the first one is as large as is useful, the largest that fits is found
    within the first steps. A model that torch.compile fails on is trained as it is. Both are said in `notes`.

    Processes among which the parameters are shared out make their passes together, so none of them can halve
    its own, or leave a compiler: they end, and the daemon starts the learner with halved passes.
    """

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        samples: int,
        compiled: bool = False,
        together: int = 1,
        bf16: bool = False,
    ) -> None:
        """`samples`: of one pass, to begin with; `together`: processes that make their passes together."""
        self._task, self._model = task, model
        self._device = next(model.parameters()).device
        self.samples = samples
        self._bf16 = bf16
        self._notes: list[str] = []
        self._together = together
        self._compiled: nn.Module | None = None
        if compiled and together > 1:
            self._leave_compiler("not with sharded parameters")
        elif compiled:
            try:
                self._compiled = cast(nn.Module, torch.compile(model))
            except RuntimeError as error:  # no compiler for this Python or this system
                self._leave_compiler(first_line(error))

    def gradients(self, batch: Batch, whole: int) -> Tensor:
        """Put into every parameter's `grad` the gradient of the mean loss over a step of `whole` samples.

        Gradient and returned loss (a scalar) are the share that the samples of `batch` have in it.

        Raises:
            UserError: not even a single sample fits into memory.
            PassTooLarge: a pass does not fit, and others make theirs with it.
        """
        while True:
            for parameter in self._model.parameters():
                parameter.grad = None
            try:
                return self._passes(batch, whole)
            except (RuntimeError, MemoryError) as error:
                problem = out_of_memory(error)
                if not problem and self._compiled is None:
                    raise
                said = problem or first_line(error)
            # Here the failed pass's tensors, which the error's traceback held, are gone.
            self._halve(said) if problem else self._leave_compiler(said)

    def _passes(self, batch: Batch, whole: int) -> Tensor:
        model = self._model if self._compiled is None else self._compiled
        total = torch.zeros((), device=self._device)
        most = len(batch[0]) if self._together == 1 else -(-whole // self._together)
        for start in range(0, most, self.samples):
            part = tuple(tensor[start : start + self.samples].to(self._device) for tensor in batch)
            counts = len(part[0])
            if not counts:  # others have one more sample, and need us for its pass
                part = tuple(tensor[:1].to(self._device) for tensor in batch)
            with autocast(self._device, self._bf16):
                loss = self._task.loss(model, part) * (counts / whole)
            torch.autograd.backward(loss)
            total += loss.detach()
        return total

    def _halve(self, said: str) -> None:
        before = self.samples * self._task.tokens_per_sample
        if self.samples == 1:
            raise UserError(
                f"a single sample of {before} tokens does not fit into the memory of {self._device}: {said}",
                "this run needs a larger device",
            )
        give_memory_back(self._device)
        self.samples = (self.samples + 1) // 2
        after = self.samples * self._task.tokens_per_sample
        if self._together > 1:
            raise PassTooLarge(f"a pass of {before} tokens does not fit ({said}): half as many from now on")
        self._notes.append(f"a pass of {before} tokens does not fit ({said}): going on with {after} tokens")

    def take_notes(self) -> list[str]:
        """Remarks for a person since the last call."""
        notes, self._notes = self._notes, []
        return notes

    def _leave_compiler(self, said: str) -> None:
        self._compiled = None
        self._notes.append(f"torch.compile failed ({said}): training without it")
