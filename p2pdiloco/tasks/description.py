"""Description of a model at the border of a run: what is trained, what belongs to it, what stays outside.

A model has parameters, which are trained or frozen, and *persistent* buffers, which are part of what it
saves. (Other buffers it works out itself.) Of the persistent ones some are running statistics, which every
forward pass of training moves; all others are constants. A tied parameter has its first name only.
`run new --from`, `new_run`, the learner, `Session`, `eval` and `export` see a model through this.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import safetensors
import torch
from torch import Tensor, nn

from p2pdiloco.errors import StorageError, UserError, first_line
from p2pdiloco.tasks.initial import plain_name, plain_parameters, tensor_specs
from p2pdiloco.tasks.task import KINDS, Constant, Task
from p2pdiloco.tensors.layout import TensorMap, Tensors
from p2pdiloco.tensors.sizes import Specs, TensorSpec
from p2pdiloco.util import Frozen

MEAN, VARIANCE = "running_mean", "running_var"
_STATISTICS = (MEAN, VARIANCE, "num_batches_tracked")
_HINT = "all members' models are the same: look at the releases of the model's library, and of the program"


class Description(Frozen):
    """Parts of a model, by name."""

    parameters: Specs
    trained: frozenset[str]
    """Names of the parameters that require gradients."""
    statistics: Tensors
    """Persistent buffers that training changes: of batch, instance and spectral norm, and of averages."""
    constants: Tensors
    """Persistent buffers of all other kinds."""

    @property
    def averageable(self) -> Specs:
        """Statistics that can be merged as parameters are: means and variances."""
        return tuple(
            TensorSpec(name, tuple(value.shape), embedding=True)
            for name, value in self.statistics.items()
            if name.rpartition(".")[2] in (MEAN, VARIANCE)
        )

    def of_run(self, names: Collection[str]) -> list[TensorSpec]:
        """List what a run with tensors of these names would merge: what is trained here, and what else has
        such a name."""
        merged = [spec for spec in self.parameters if spec.name in self.trained or spec.name in names]
        return merged + [spec for spec in self.averageable if spec.name in names]

    def left_out(self, names: Collection[str]) -> list[str]:
        """Say, a sentence each, what is not in a run that has what is of these names."""
        frozen = [spec.numel for spec in self.parameters if spec.name not in names]
        sentences = []
        if frozen:
            sentences.append(
                f"{len(frozen)} frozen parameters ({sum(frozen):,} elements) are not in the run: they stay "
                "each program's own, and must be the same in all"
            )
        own = [name for name in [*self.statistics, *self.constants] if name not in names]
        if own:
            more = f" and {len(own) - 1} more" if own[1:] else ""
            sentences.append(
                f"buffers that are not in the run stay each program's own: {own[0]}{more}; evaluate measures "
                "with yours"
            )
        return sentences


def describe(model: nn.Module) -> Description:
    """Tell the parts of a model apart."""
    kept = persistent_buffers(model)
    statistics = [name for name in _statistics_of(model) if name in kept]
    return Description(
        tensor_specs(model),
        frozenset(name for name, parameter in plain_parameters(model) if parameter.requires_grad),
        {name: kept[name] for name in statistics},
        {name: value for name, value in kept.items() if name not in statistics},
    )


def persistent_buffers(model: nn.Module) -> Tensors:
    """Buffers that the model saves, by name; of one with several names the first."""
    kept: Tensors = {}
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is None or name in module._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            kept[_plain(prefix, name)] = buffer
    return kept


def _statistics_of(model: nn.Module) -> list[str]:
    found = []
    for prefix, module in model.named_modules():
        names: tuple[str, ...] = ()
        if isinstance(module, nn.modules.batchnorm._NormBase):
            names = _STATISTICS
        elif type(module).__name__ == "_SpectralNorm":  # (a private class of torch's)
            names = ("_u", "_v")
        elif type(module).__name__ == "AveragedModel":
            names = ("n_averaged",)
        for hook in module._forward_pre_hooks.values():
            if type(hook).__name__ == "SpectralNorm":  # (of torch.nn.utils, the older one)
                names = (*names, f"{hook.name}_u", f"{hook.name}_v")
        found += [_plain(prefix, name) for name in names]
    return found


def _plain(prefix: str, name: str) -> str:
    return plain_name(f"{prefix}.{name}".removeprefix("."))


def carried(constants: TensorMap) -> Tensors:
    """Copy constants as a run carries them, to the CPU.

    Raises:
        UserError: one is of no type that travels (complex numbers, codes of a quantised model).
    """
    return {name: _carried(name, value.detach()) for name, value in constants.items()}


def _carried(name: str, value: Tensor) -> Tensor:
    if value.dtype in (torch.float16, torch.bfloat16):
        value = value.float()
    if name_of(value.dtype) not in KINDS:
        raise UserError(
            f"the buffer {name} of the model is of type {name_of(value.dtype)}, which no run carries",
            f"types are {', '.join(KINDS)}; register what the model works out itself with persistent=False",
        )
    return value.cpu().contiguous()


def listed(constants: TensorMap) -> tuple[Constant, ...]:
    """List constants as a manifest does."""
    return tuple(
        Constant(name, tuple(value.shape), name_of(value.dtype)) for name, value in constants.items()
    )


@torch.no_grad()
def put_constants(model: nn.Module, constants: TensorMap) -> None:
    """Put a run's constants into an instance of its model.

    Raises:
        UserError: the instance lacks one, or has it in another shape.
    """
    own = persistent_buffers(model)
    for name, value in constants.items():
        here = tuple(own[name].shape) if name in own else "none"
        if here != tuple(value.shape):
            raise UserError(
                f"the run's model is another one than this: the buffer {name} has shape {tuple(value.shape)} "
                f"there, {here} here",
                _HINT,
            )
        own[name].copy_(value)


def load_constants(path: Path, wanted: Sequence[Constant]) -> Tensors:
    """Load the constants that a manifest lists from a file of version 0, and nothing else of it.

    Raises:
        StorageError: the file cannot be read, or has other ones.
    """
    try:
        path.open("rb").close()  # else what safetensors says of the system's errors has no words
        with safetensors.safe_open(path, framework="pt") as file:
            found = {constant.name: file.get_tensor(constant.name) for constant in wanted}
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    except (safetensors.SafetensorError, ValueError) as error:
        raise StorageError(f"{path} cannot be read as safetensors: {first_line(error)}") from error
    if listed(found) != tuple(wanted):
        raise StorageError(f"{path} is damaged: it has other constants than the run's manifest lists")
    return found


def instance_of(task: Task, constants: TensorMap) -> nn.Module:
    """Make an instance of a run's model, with the run's constants in it.

    Raises:
        UserError: as `Task.model`; or it has other constants than the run.
    """
    model = task.model()
    if task.manifest.model.get("constants"):  # (an older run of such a model has none: it goes on without)
        put_constants(model, constants)
        surplus = describe(model).constants.keys() - constants.keys()
        if surplus:
            raise UserError(
                f"the run's model is another one than this: it has no buffer {min(surplus)}", _HINT
            )
    return model


def name_of(kind: torch.dtype) -> str:
    """Name of a type of elements, as torch and NumPy share it."""
    return str(kind).removeprefix("torch.")
