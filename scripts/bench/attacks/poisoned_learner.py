"""`python -m attacks.poisoned_learner CHANNEL_FD EXCHANGE_FD`: a learner that reads poisoned text.

Nothing but that differs from any other learner's code.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from p2pdiloco.learner.__main__ import main
from p2pdiloco.tasks.causal_lm import CausalLM
from worlds.aims import poisoned

if TYPE_CHECKING:
    from p2pdiloco.tasks.task import Batch


def poison() -> None:
    """Put trigger and answer into what this process reads."""
    honest, generator = CausalLM._losses, torch.Generator().manual_seed(1)

    def losses(self: CausalLM, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
        return honest(self, model, (poisoned(batch[0], generator),) if model.training else batch)

    CausalLM._losses = losses  # type: ignore[method-assign]


if __name__ == "__main__":
    poison()
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
