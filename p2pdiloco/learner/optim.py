"""The inner optimizer: AdamW with linear warm-up and cosine decay to a floor.

Its moments belong to this learner alone; they are never averaged nor touched by an outer update.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from p2pdiloco.config.manifest import InnerSection

FLOOR = 0.1
"""The cosine ends at this share of the learning rate and stays there."""


def make_optimizer(model: nn.Module, section: InnerSection) -> torch.optim.AdamW:
    """AdamW; matrices and embeddings decay, norms do not."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        groups,
        lr=section.learning_rate,
        betas=(section.beta1, section.beta2),
        # One kernel over all tensors, where torch has it.
        fused=parameters[0].device.type in ("cpu", "cuda"),
    )


def learning_rate(section: InnerSection, inner_step: int) -> float:
    """Rate of the inner step with this number (the first is 0)."""
    if inner_step < section.warmup_steps:
        return section.learning_rate * (inner_step + 1) / section.warmup_steps
    span = max(1, section.schedule_steps - section.warmup_steps)
    progress = min(1.0, (inner_step - section.warmup_steps) / span)
    return section.learning_rate * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """For the next optimizer step."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip(model: nn.Module, section: InnerSection) -> Tensor:
    """Scale the gradients to at most `clip_norm`; returns the norm before (a scalar, may be non-finite)."""
    return nn.utils.clip_grad_norm_(model.parameters(), section.clip_norm)


def moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[int, dict[str, Tensor]]:
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


def set_moments(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, saved: dict[str, Tensor]
) -> None:
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
