"""Device and precision in which the passes of a study's learners are made."""

from __future__ import annotations

import contextlib

import torch
from msgspec import Struct
from torch import nn

from p2pdiloco.learner.channel import PassOptions
from p2pdiloco.learner.loop import Training
from p2pdiloco.tasks.task import Samples, Shards, Task

CPU = torch.device("cpu")


class Computing(Struct, frozen=True):
    """Device and precision of all models of a run. Merges are the CPU's, as in production."""

    device: torch.device = CPU
    bf16: bool = False
    """Matrices are multiplied in bf16, as production does where that is fast, and models compiled: for models
    of some million parameters on processors that have bf16."""

    def training(self, task: Task, model: nn.Module, samples: Samples | Shards, name: str) -> Training:
        """Prepare the training of a model that is on the device already."""
        # A CPU's is the setting's (`passes`), not the machine's: equal settings make equal runs.
        precision = "fp32" if self.device.type == "cpu" else "auto"
        options = PassOptions(compile="always" if self.bf16 else "never", precision=precision)
        return Training(task, model, samples, name, options=options, meanwhile=self.passes)

    def passes(self) -> contextlib.AbstractContextManager[None]:
        """Around forward and backward."""
        return torch.autocast(self.device.type, torch.bfloat16) if self.bf16 else contextlib.nullcontext()


FP32 = Computing()
