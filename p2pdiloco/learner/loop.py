"""The inner loop. It knows a task, a model and an optimizer; it does not know that peers exist.

After every inner step it calls `boundary`, which may change the parameters (`learner.mailbox` does, a
benchmark does not) and says whether to go on.
"""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from msgspec import Struct
from torch import nn

from p2pdiloco.core.api.config import Amendment
from p2pdiloco.errors import P2PDilocoError, UserError, first_line
from p2pdiloco.learner.counts import TrainingCounts
from p2pdiloco.learner.device import micro_batch_tokens, passes_in_bf16, staged
from p2pdiloco.learner.optimizer.build import clip, make_optimizer, set_learning_rate
from p2pdiloco.learner.optimizer.schedule import learning_rate, schedule_of
from p2pdiloco.learner.parallel.ranks import ALONE, Ranks
from p2pdiloco.learner.passes import Passes, PassOptions
from p2pdiloco.learner.reading.stream import SampleStream
from p2pdiloco.learner.recorded import RecordedUpdate
from p2pdiloco.tasks.task import Samples, Shards, Task

if TYPE_CHECKING:
    from p2pdiloco.tasks.task import Batch

MAX_SKIPPED_IN_A_ROW = 10
COMPILING = "compiling the passes: the next inner step takes as long as that, often a minute"


class TrainingDiverged(P2PDilocoError):
    """Error: loss or gradient was not finite for `MAX_SKIPPED_IN_A_ROW` inner steps in a row."""


class StepReport(Struct, frozen=True):
    """Result of an inner step."""

    inner_step: int
    """Inner steps made so far, this one included."""
    loss: float
    """Loss that was minimised, a mean over the step's samples (text: nats per token)."""
    tokens: int
    """Tokens that went into the parameters; 0 if the step was skipped."""


class Training(TrainingCounts):
    """State that inner steps read and write. Public attributes are what a checkpoint keeps."""

    def __init__(
        self,
        task: Task,
        model: nn.Module,
        samples: Samples | Shards | None,
        peer: str,
        place: Path | None = None,
        ranks: Ranks = ALONE,
        options: PassOptions = PassOptions(),  # noqa: B008 (frozen)
        meanwhile: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        """`model` is on its device already. `place`: the file that keeps the place in the data. `samples` is
        None if rank 0 of `ranks` has them. `meanwhile`: context for computations that take long and write no
        parameters.

        Raises:
            UserError: tokens_per_step is no whole number of samples, or there are none.
        """
        super().__init__()
        per_sample = task.tokens_per_sample
        self.section = task.manifest.inner
        if self.section.tokens_per_step % per_sample:
            raise UserError(
                f"inner.tokens_per_step {self.section.tokens_per_step} is not a multiple of {per_sample}, "
                "the tokens of a sample"
            )
        self.task, self.model = task, model
        self.device = next(model.parameters()).device
        self.precision = options.precision
        self.bf16 = passes_in_bf16(self.device, options.precision)
        """True: passes are made in bf16."""
        self.optimizer = make_optimizer(model, self.section)
        self.skipped_steps = 0
        self._skipped_in_a_row = 0
        self._samples = self.section.tokens_per_step // per_sample
        self.ranks = ranks
        self.meanwhile = meanwhile
        self.stream: SampleStream
        """Samples of rank 0, which deals; other ranks have no stream."""
        if samples is not None:
            self.stream = SampleStream(samples, task.manifest.run.seed, peer, self._samples, place)
        tokens = micro_batch_tokens(self.device, options.micro_batch_tokens, self.section.tokens_per_step)
        together = ranks.count if ranks.sharded else 1
        # Of processes that compute together a pass is a rank's part of the step at most.
        at_once = min(max(1, tokens // per_sample), -(-self._samples // together))
        first = max(1, at_once >> options.halvings)
        self._passes = Passes(task, model, first, options, together, self.bf16)
        self._recorded_update: RecordedUpdate | None = None
        self._records_updates = True
        self._say: Callable[[str], None] = lambda _text: None
        self._ahead: Batch | None = None
        """Samples of the next step, taken and on their way to the accelerator while that computes."""

    def step(self) -> StepReport:
        """Make an inner step: forward, backward, clip, optimizer.

        Raises:
            TrainingDiverged: see there.
            UserError: not even a single sample fits into memory.
            ChannelBroken: the daemon is gone.
        """
        self._passes.before_step(self.steps_left)
        if self._passes.compiles_now:
            self._say(COMPILING)
        began = time.perf_counter()
        rate = learning_rate(self.section, self.run_tokens, self.optimizer_steps, self.amendment)
        set_learning_rate(self.optimizer, rate)
        with self.meanwhile():
            batch, self._ahead = self._ahead or self._take(), None
            loss = self._passes.gradients(batch, self._samples)
            self.ranks.sum_gradients(self.model, loss)
            norm = clip(self.model, self.section)
            if self.device.type != "cpu":
                self._ahead = self._take()
            loss_value, norm_value = torch.stack((loss, norm)).tolist()  # the one wait for an accelerator
        tokens = self._update(math.isfinite(loss_value) and math.isfinite(norm_value))
        if self.ranks.rank == 0:
            self.stream.used()
        self.count(tokens)
        self._passes.step_took(time.perf_counter() - began)
        return StepReport(self.inner_step, loss_value, tokens)

    @property
    def samples_at_once(self) -> int:
        """Samples of one pass."""
        return self._passes.samples

    def listen(self, say: Callable[[str], None]) -> None:
        """Be told, from now on, of what takes long, before it does."""
        self._say = say

    def take_notes(self) -> list[str]:
        """Remarks for a person since the last call."""
        return self._passes.take_notes()

    @property
    def steps_left(self) -> float:
        """Inner steps of this learner until the end of the schedule, if the others go on as well."""
        tokens = schedule_of(self.section, self.amendment) - self.run_tokens
        return max(0, tokens) / self.section.tokens_per_step / self.learners

    def amend(self, amendments: tuple[Amendment, ...]) -> None:
        """Go by these amendments from now on, in all processes of this learner."""
        if amendments != self.amendments:
            super().amend(amendments)
            self.ranks.tell_amendments(amendments)

    def _take(self) -> Batch:
        """Take this rank's samples of the next step."""
        batch = self.ranks.deal(lambda: self.stream.take(self._samples), self._samples)
        return staged(batch, self.device)

    def _update(self, finite: bool) -> int:
        """Make the optimizer step, or skip it: a bad batch must not become a peer's parameters."""
        if finite:
            self._skipped_in_a_row = 0
            if not self._replay_update():
                self.optimizer.step()
            self.optimizer_steps += 1
            return self.section.tokens_per_step
        self.skipped_steps += 1
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            raise TrainingDiverged(
                f"loss or gradient was not finite in {MAX_SKIPPED_IN_A_ROW} inner steps in a row "
                f"(up to inner step {self.inner_step})"
            )
        return 0

    def _replay_update(self) -> bool:
        """Make the optimizer step as it was recorded, if it can be; False: it is to be made."""
        if not self._passes.gradients_stay:
            self._recorded_update = None  # its gradients are gone
            return False
        if self._recorded_update is None and self._records_updates:
            try:
                self._recorded_update = RecordedUpdate(self.optimizer, self.device)
            except RuntimeError as error:
                print(f"the optimizer step is not recorded: {first_line(error)}", file=sys.stderr, flush=True)
                self._records_updates = False
        return self._recorded_update is not None and self._recorded_update.replay()


def train(training: Training, boundary: Callable[[StepReport], bool]) -> None:
    """Make inner steps until `boundary` says no."""
    while boundary(training.step()):
        pass
