"""The inner optimizer: AdamW, or Muon with AdamW for what is no hidden matrix.

Its moments belong to this learner alone; they are never averaged nor touched by an outer update.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn

from p2pdiloco.config.manifest import InnerSection
from p2pdiloco.errors import UserError
from p2pdiloco.learner.optimizer.adamw import EPSILON, FusedAdamW, step_device
from p2pdiloco.learner.optimizer.muon import Muon, hidden_matrices
from p2pdiloco.learner.parallel.sharding import is_shared_out, own_rows


class Optimizer(Protocol):
    """Interface of an optimizer, as the inner loop and its checkpoint need it."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Dicts with "params", "lr" and "weight_decay"."""

    state: MutableMapping[Tensor, dict[str, Tensor]]
    """Moments of every parameter, by name; of AdamW "step", "exp_avg" and "exp_avg_sq"."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""

    def step(self) -> object:
        """Update all parameters that have a gradient, once."""


class Together:
    """Several optimizers, each for its own parameters, as one."""

    def __init__(self, kind: str, *parts: Optimizer) -> None:
        self.kind = kind
        self._parts = parts
        self.state: MutableMapping[Tensor, dict[str, Tensor]] = parts[0].state
        for part in parts[1:]:
            part.state = self.state  # one mapping for all: parameters are different ones

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Groups of all parts."""
        return [group for part in self._parts for group in part.param_groups]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for part in self._parts:
            part.zero_grad(set_to_none)

    def step(self) -> None:
        """Update all parameters that have a gradient, once."""
        for part in self._parts:
            part.step()


def make_optimizer(model: nn.Module, section: InnerSection) -> Optimizer:
    """Make the manifest's optimizer. Matrices and embeddings decay, norms do not.

    Raises:
        UserError: Muon for a model that has no matrices for it.
    """
    if section.optimizer == "adamw":
        return _adamw(list(model.parameters()), section)
    hidden = hidden_matrices(model)
    if not hidden:
        raise UserError('inner.optimizer is "muon", but the model has no hidden matrices', 'use "adamw"')
    theirs = {id(parameter) for parameter in hidden}
    others = [parameter for parameter in model.parameters() if id(parameter) not in theirs]
    muon = Muon(hidden, section.learning_rate, section.weight_decay, section.muon_momentum)
    return Together("muon", _adamw(others, section), muon)


def _adamw(parameters: Sequence[Tensor], section: InnerSection) -> Optimizer:
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": section.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas = (section.beta1, section.beta2)
    if all(parameter.device.type in ("cpu", "cuda") for parameter in parameters):
        return FusedAdamW(groups, section.learning_rate, betas)
    return torch.optim.AdamW(groups, lr=section.learning_rate, betas=betas, eps=EPSILON)  # type: ignore[return-value]


def set_learning_rate(optimizer: Optimizer, rate: float | Tensor) -> None:
    """Set the learning rate of the next optimizer step: a number, or a scalar on the device, for a step that
    is recorded."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip(model: nn.Module, section: InnerSection) -> Tensor:
    """Scale the gradients to at most `clip_norm`; returns the norm before (a scalar, may be non-finite)."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), section.clip_norm)
    return cast(Tensor, norm.full_tensor()) if is_shared_out(norm) else norm  # type: ignore[attr-defined]


def kind(optimizer: Optimizer) -> str:
    """Name of the optimizer whose moments they are: "adamw", "muon", or that of somebody else's class."""
    return str(getattr(optimizer, "kind", type(optimizer).__name__.lower()))


def moments(model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """Moments of every parameter: MOMENT/PARAMETER -> tensor; {} at first. A parameter that is shared out
    among processes has this one's rows here."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        for moment, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"{moment}/{name}"] = value
    return found


def set_moments(model: nn.Module, optimizer: Optimizer, saved: Mapping[str, Tensor]) -> None:
    """Put back what `moments` gave. Raises: ValueError (other names or shapes); then nothing is changed."""
    parameters = dict(model.named_parameters())
    restored: dict[Tensor, dict[str, Tensor]] = {}
    for key, value in saved.items():
        moment, _, name = key.partition("/")
        parameter = parameters.get(name)
        if parameter is None or (value.dim() and value.shape != parameter.shape):
            raise ValueError(f"{moment} of {name} has shape {tuple(value.shape)}")
        device = parameter.device if value.dim() else step_device(parameter)
        mine = own_rows(value, parameter) if value.dim() else value
        restored.setdefault(parameter, {})[moment] = mine.to(device, copy=True)
    optimizer.state.update(restored)
