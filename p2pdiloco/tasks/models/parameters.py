"""A model's parameters by name, in the order that all peers agree on."""

from __future__ import annotations

from torch import Tensor, nn

from p2pdiloco.tensors.spec import TensorSpec


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
