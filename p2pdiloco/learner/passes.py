"""Forward and backward passes over a step's samples, as many at a time as memory holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from msgspec import Struct
from torch import Tensor, nn

from p2pdiloco.config.settings import Compile
from p2pdiloco.errors import UserError, first_line
from p2pdiloco.learner.compiling import Forms
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
    compile: Compile = "never"
    compile_cache: str = ""
    """Folder for compiled code; empty: torch's own."""
    precision: str = "auto"


class Passes:
    """Gradients of a step, added up pass by pass. A pass that does not fit into memory is halved from then
    on, so on an accelerator, where the first one is as large as is useful, the largest that fits is found
    within the first steps. A model that torch.compile fails on is trained as it is. Both are said in `notes`.

    Processes among which the parameters are shared out make their passes together, so none of them can halve
    its own, or leave a compiler: they end, and the daemon starts the learner with halved passes.
    """

    def __init__(
        self, task: Task, model: nn.Module, samples: int, options: PassOptions, together: int, bf16: bool
    ) -> None:
        """`samples`: of one pass, to begin with; `together`: processes that make their passes together."""
        self._task, self._model = task, model
        self._parameters = list(model.parameters())
        self._device = self._parameters[0].device
        self.samples = samples
        self.made = 0
        """Passes of the last step."""
        self._together = together
        choice: Compile = options.compile
        if together > 1 or (choice == "auto" and task.shapes_change(self._device, bf16)):
            choice = "never"

        def forward(*part: Tensor) -> Tensor:
            with autocast(self._device, bf16):
                return task.loss(model, part)

        self._forms = Forms(forward, self._parameters, choice, options.compile_cache)
        self._notes: list[str] = []
        if options.compile == "always" and together > 1:
            self._notes.append("torch.compile failed (not with sharded parameters): training without it")

    def before_step(self, steps_left: float) -> None:
        """Compile or record, if it is time to; nothing else computes on the device now."""
        self._forms.before_step(steps_left)

    @property
    def compiles_now(self) -> bool:
        """True: the next pass compiles, which takes long."""
        return self._forms.compiles_now

    def step_took(self, step_s: float) -> None:
        """Take the length of the last inner step, by which forms of passes are judged."""
        self._forms.step_took(step_s, self.made)

    @property
    def gradients_stay(self) -> bool:
        """True: the step's gradients are in the same memory as those of the last one."""
        return self._forms.is_replayed

    def take_notes(self) -> list[str]:
        """Remarks for a person since the last call."""
        notes, self._notes = self._notes, []
        return notes + self._forms.take_notes()

    def gradients(self, batch: Batch, whole: int) -> Tensor:
        """Put into every parameter's `grad` the gradient of the mean loss over a step of `whole` samples.

        Gradient and returned loss (a scalar) are the share that the samples of `batch` have in it.

        Raises:
            UserError: not even a single sample fits into memory.
            PassTooLarge: a pass does not fit, and others make theirs with it.
        """
        while True:
            for parameter in self._parameters:
                parameter.grad = None
            self.made = 0
            try:
                return self._passes(batch, whole)
            except Exception as error:
                problem = out_of_memory(error)
                said = problem or first_line(error)
                if not (problem or self._forms.leave(said)):
                    raise
            # Here the failed pass's tensors, which the error's traceback held, are gone. What is compiled may
            # need more than a pass as it is, which makes its loss in chunks.
            if problem and (self.samples > 1 or not self._forms.leave(said)):
                self._halve(said)

    def _passes(self, batch: Batch, whole: int) -> Tensor:
        total = torch.zeros((), device=self._device)
        most = len(batch[0]) if self._together == 1 else -(-whole // self._together)
        for start in range(0, most, self.samples):
            part = tuple(tensor[start : start + self.samples].to(self._device) for tensor in batch)
            counts = len(part[0])
            if not counts:  # others have one more sample, and need us for its pass
                part = tuple(tensor[:1].to(self._device) for tensor in batch)
            total += self._forms.make_pass(part, counts / whole)
            self.made += 1
        return total

    def _halve(self, said: str) -> None:
        before = self.samples * self._task.tokens_per_sample
        if self.samples == 1:
            raise UserError(
                f"a single sample of {before} tokens does not fit into the memory of {self._device}: {said}",
                "this run needs a larger device",
            )
        self._forms.begin_anew()
        give_memory_back(self._device)
        self.samples = (self.samples + 1) // 2
        after = self.samples * self._task.tokens_per_sample
        if self._together > 1:
            raise PassTooLarge(f"a pass of {before} tokens does not fit ({said}): half as many from now on")
        self._notes.append(f"a pass of {before} tokens does not fit ({said}): going on with {after} tokens")
