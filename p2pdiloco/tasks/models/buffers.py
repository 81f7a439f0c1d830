"""Buffers of a model at the border: which belong to it, which of these training changes, and putting them in.

A module's *persistent* buffers are part of what it saves; others it works out itself. Of the persistent ones
some are running statistics that every forward pass of training moves; all others are constants of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import safetensors
import torch
from torch import Tensor, nn

from p2pdiloco.errors import StorageError, UserError, first_line
from p2pdiloco.tasks.constants import KINDS, Constant, constants_of
from p2pdiloco.tasks.task import Task


def persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Buffers that the model saves, by name; of one with several names the first."""
    kept: dict[str, Tensor] = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            kept[f"{prefix}.{name}" if prefix else name] = buffer
    return kept


def running_statistics(model: nn.Module) -> list[str]:
    """Names of the persistent buffers that forward passes in training change: those of batch norm, of
    instance norm, and of spectral norm."""
    found = []
    for prefix, module in model.named_modules():
        names: tuple[str, ...]
        if isinstance(module, nn.modules.batchnorm._NormBase):
            names = ("running_mean", "running_var", "num_batches_tracked")
        elif type(module).__name__ == "_SpectralNorm":  # (a private class of torch's)
            names = ("_u", "_v")
        else:
            continue
        found += [f"{prefix}.{name}" if prefix else name for name in names]
    kept = persistent_buffers(model)
    return [name for name in found if name in kept]


def constant_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Constants of the model, by name, of a type that a run carries, on the CPU.

    Raises:
        UserError: one is of no such type (complex numbers, codes of a quantised model).
    """
    moving = set(running_statistics(model))
    found = {name: value for name, value in persistent_buffers(model).items() if name not in moving}
    return {name: _carried(name, value.detach()) for name, value in found.items()}


def _carried(name: str, value: Tensor) -> Tensor:
    if value.dtype in (torch.float16, torch.bfloat16):
        value = value.float()
    if _kind(value) not in KINDS:
        raise UserError(
            f"the buffer {name} of the model is of type {_kind(value)}, which no run carries",
            f"types are {', '.join(KINDS)}; register what the model works out itself with persistent=False",
        )
    return value.cpu().contiguous()


def described(constants: Mapping[str, Tensor]) -> tuple[Constant, ...]:
    """Describe constants for a manifest's list."""
    return tuple(Constant(name, tuple(value.shape), _kind(value)) for name, value in constants.items())


@torch.no_grad()
def put_constants(model: nn.Module, constants: Mapping[str, Tensor]) -> None:
    """Put a run's constants into an instance of its model.

    Raises:
        UserError: the instance has other ones, by name or shape.
    """
    moving = set(running_statistics(model))
    own = {name: value for name, value in persistent_buffers(model).items() if name not in moving}
    for name in [*constants, *own]:
        here, there = _shape(own.get(name)), _shape(constants.get(name))
        if here != there:
            raise UserError(
                f"the run's model has other constants: the buffer {name} has shape {there} there, "
                f"{here} here",
                "install the release of the model's library that the run's owner has",
            )
    for name, value in constants.items():
        own[name].copy_(value)


def load_constants(path: Path, listed: Sequence[Constant]) -> dict[str, Tensor]:
    """Load the constants that a manifest lists from a file of version 0, and nothing else of it.

    Raises:
        StorageError: the file cannot be read, or has other ones.
    """
    try:
        path.open("rb").close()  # else what safetensors says of the system's errors has no words
        with safetensors.safe_open(path, framework="pt") as file:
            found = {constant.name: file.get_tensor(constant.name) for constant in listed}
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    except (safetensors.SafetensorError, ValueError) as error:
        raise StorageError(f"{path} cannot be read as safetensors: {first_line(error)}") from error
    if described(found) != tuple(listed):
        raise StorageError(f"{path} is damaged: it has other constants than the run's manifest lists")
    return found


def instance_of(task: Task, constants: Mapping[str, Tensor]) -> nn.Module:
    """Make an instance of a run's model, with the run's constants in it.

    Raises:
        UserError: as `Task.model`, and as `put_constants`.
    """
    model = task.model()
    if constants or constants_of(task.manifest.model):
        put_constants(model, constants)
    return model


def _shape(value: Tensor | None) -> tuple[int, ...] | str:
    return "none" if value is None else tuple(value.shape)


def _kind(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")
