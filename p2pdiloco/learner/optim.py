"""The inner optimizer: AdamW.

Its moments belong to this learner alone; they are never averaged nor touched by an outer update.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from p2pdiloco.config.manifest import InnerSection

EPSILON = 1e-8


class Optimizer(Protocol):
    """What the inner loop and its checkpoint need of an optimizer."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Dicts with "params", "lr" and "weight_decay"."""

    @property
    def state(self) -> MutableMapping[Tensor, dict[str, Tensor]]:
        """Parameter -> "step", "exp_avg", "exp_avg_sq"."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""

    def step(self) -> object:
        """One update of all parameters that have a gradient."""


class FusedAdamW:
    """`torch.optim.AdamW(fused=True)`, bit for bit, for CPU and CUDA: one kernel over all tensors.

    torch's own class imports torch's compiler when it is made, which takes as long as torch itself: half of
    the time in which a learner is back after its death. `state` and `param_groups` are laid out as torch's.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        """groups: dicts with "params" and "weight_decay"."""
        self.param_groups = [{**group, "lr": lr} for group in groups]
        self.state: dict[Tensor, dict[str, Tensor]] = {}
        self._betas = betas

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """One update of all parameters that have a gradient."""
        for group in self.param_groups:
            params = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.state.get(p) or self.state.setdefault(p, _fresh(p)) for p in params]
            if not params:
                continue
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                params,
                [parameter.grad for parameter in params],
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
        "step": torch.zeros((), device=_step_device(parameter)),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def make_optimizer(model: nn.Module, section: InnerSection) -> Optimizer:
    """AdamW; matrices and embeddings decay, norms do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (section.beta1, section.beta2)
    if parameters[0].device.type in ("cpu", "cuda"):
        return FusedAdamW(groups, section.learning_rate, betas)
    return torch.optim.AdamW(groups, lr=section.learning_rate, betas=betas, eps=EPSILON)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """For the next optimizer step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip(model: nn.Module, section: InnerSection) -> Tensor:
    """Scale the gradients to at most `clip_norm`; returns the norm before (a scalar, may be non-finite)."""
    return nn.utils.clip_grad_norm_(model.parameters(), section.clip_norm)


def moments(model: nn.Module, optimizer: Optimizer) -> tuple[int, dict[str, Tensor]]:
    """Optimizer steps made, and the moments by name: exp_avg.NAME, exp_avg_sq.NAME. (0, {}) at first."""
    found: dict[str, Tensor] = {}
    steps = 0
    for name, parameter in model.named_parameters():
        state = optimizer.state.get(parameter)
        if state:
            steps = int(state["step"])
            found[f"exp_avg.{name}"] = state["exp_avg"]
            found[f"exp_avg_sq.{name}"] = state["exp_avg_sq"]
    return steps, found


def set_moments(model: nn.Module, optimizer: Optimizer, steps: int, saved: dict[str, Tensor]) -> None:
    """Put back what `moments` gave. Raises: KeyError, ValueError (other names or shapes)."""
    if not steps:
        return
    restored: dict[Tensor, dict[str, Tensor]] = {}
    for name, parameter in model.named_parameters():
        state = {"step": torch.tensor(float(steps), device=_step_device(parameter))}
        for kind in ("exp_avg", "exp_avg_sq"):
            moment = saved[f"{kind}.{name}"]
            if moment.shape != parameter.shape:
                raise ValueError(f"{kind}.{name} has shape {tuple(moment.shape)}")
            state[kind] = moment.to(parameter.device, parameter.dtype, copy=True)
        restored[parameter] = state
    optimizer.state.update(restored)


def _step_device(parameter: Tensor) -> torch.device:
    """Where fused AdamW keeps its step counter."""
    return parameter.device if parameter.is_cuda else torch.device("cpu")
