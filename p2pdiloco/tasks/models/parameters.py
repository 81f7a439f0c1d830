"""A model's parameters by name, in the order that all peers agree on."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from p2pdiloco.config.manifest import Dtype
from p2pdiloco.errors import UserError
from p2pdiloco.tensors.sizes import TensorSpec

WRAPPERS = {"OptimizedModule": "_orig_mod", "DistributedDataParallel": "module", "DataParallel": "module"}
"""Classes that take a module in, and where they have it. By name: importing the first one imports torch's
compiler, which takes as long as torch."""
WITHIN = re.compile(r"\b(_orig_mod|_checkpoint_wrapped_module)\.")
"""Words that wrappers of modules inside a model put into names."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The module that was given to `torch.compile`, DistributedDataParallel, or both, if this is what they
    made of one: parameters are the same, and have the names that they have elsewhere."""
    while (inside := WRAPPERS.get(type(model).__name__)) and isinstance(
        getattr(model, inside, None), nn.Module
    ):
        model = getattr(model, inside)
    return model


def plain_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters, as `nn.Module.named_parameters` gives them of the model before modules in it were
    compiled or wrapped."""
    return ((plain_name(name), parameter) for name, parameter in model.named_parameters())


def plain_name(name: str) -> str:
    """Name of a parameter, buffer or module as it was before modules were compiled or wrapped. The wrapper
    and what it took in have one name; of modules the latter comes last."""
    return WITHIN.sub("", f"{name}.")[:-1]


def named_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Name -> the parameter's tensor itself. A parameter with two names (a tied one) has its first."""
    return {name: parameter.data for name, parameter in plain_parameters(model)}


_DTYPES: dict[Dtype, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def rounded(name: str, value: Tensor, dtype: Dtype) -> Tensor:
    """The parameter's values, in fp32 as they were, rounded to what this type holds.

    Raises:
        UserError: it holds no number as large as one of them.
    """
    if dtype == "fp32":
        return value
    found = value.to(_DTYPES[dtype]).float()
    if not bool(found.isfinite().all()) and bool(value.isfinite().all()):
        raise UserError(f"{name} has values beyond what {dtype} holds", "--dtype bf16 or fp32")
    return found


def tensor_specs(model: nn.Module) -> tuple[TensorSpec, ...]:
    """Name and shape of every parameter, for `tensors.layout.plan_fragments`; weights of `nn.Embedding` are
    embeddings."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return tuple(
        TensorSpec(name, tuple(parameter.shape), embedding=id(parameter) in tables)
        for name, parameter in plain_parameters(model)
    )
