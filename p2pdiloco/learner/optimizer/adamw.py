"""AdamW in one kernel, without torch's compiler."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor

from p2pdiloco.learner.parallel.sharding import own

EPSILON = 1e-8


class FusedAdamW:
    """`torch.optim.AdamW(fused=True)`, bit for bit, for CPU and CUDA: one kernel over all tensors.

    torch's own class imports torch's compiler when it is made, which takes as long as torch itself: half of
    the time in which a learner is back after its death. `state` and `param_groups` are laid out as torch's.
    Of a parameter that is shared out among processes it works on this one's rows.
    """

    kind = "adamw"

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        """Take groups of parameters: dicts with "params" and "weight_decay"."""
        self.param_groups = [{**group, "lr": lr} for group in groups]
        self.state: MutableMapping[Tensor, dict[str, Tensor]] = {}
        self._betas = betas

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters that have a gradient, once."""
        for group in self.param_groups:
            given = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.state.get(p) or self.state.setdefault(p, _fresh(own(p))) for p in given]
            if not given:
                continue
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                [own(parameter) for parameter in given],
                [own(parameter.grad) for parameter in given],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                steps,
                lr=group["lr"],
                beta1=self._betas[0],
                beta2=self._betas[1],
                weight_decay=group["weight_decay"],
                eps=EPSILON,
                amsgrad=False,
                maximize=False,
            )


def _fresh(parameter: Tensor) -> dict[str, Tensor]:
    return {
        "step": torch.zeros((), device=step_device(parameter)),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def step_device(parameter: Tensor) -> torch.device:
    """Device on which fused AdamW keeps its step counter."""
    return parameter.device if parameter.is_cuda else torch.device("cpu")
