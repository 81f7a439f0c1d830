"""A model's parameters by name, in the order that all peers agree on."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn

from p2pdiloco.tensors.spec import TensorSpec


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that was given to `torch.compile`, if this is what that made of one: parameters are the
    same, and have the names that they have elsewhere."""
    # By its name: importing its class would import torch's compiler, which takes as long as torch.
    if type(model).__name__ != "OptimizedModule":
        return model
    return cast(nn.Module, getattr(model, "_orig_mod", model))


def named_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Name -> the parameter's tensor itself. A parameter with two names (a tied one) has its first."""
    return {name: parameter.data for name, parameter in model.named_parameters()}


def tensor_specs(model: nn.Module) -> tuple[TensorSpec, ...]:
    """Name and shape of every parameter, for `tensors.layout.plan_fragments`; weights of `nn.Embedding` are
    embeddings."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return tuple(
        TensorSpec(name, tuple(parameter.shape), embedding=id(parameter) in tables)
        for name, parameter in model.named_parameters()
    )
