"""Version 0, and a model's parameters by name, in the order that all peers agree on.

A DiLoCo whose workers start from different weights does not converge. So version 0 is the same bytes on every
peer, whatever its platform and library versions. It comes from no torch generator and no transcendental
function: raw Philox integers, taken to floats by exact arithmetic.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from p2pdiloco.config.manifest import Dtype
from p2pdiloco.errors import UserError
from p2pdiloco.tensors.layout import Tensors
from p2pdiloco.tensors.sizes import Specs, TensorSpec

EMBEDDING_STD = 0.02
_DRAW_CHUNK = 1 << 20
_HALF_RANGE = 1 << 23


def uniform(seed: int, spec: TensorSpec, std: float) -> Tensor:
    """A fp32 tensor of uniform values with this standard deviation, a function of seed and name alone.

    The upper 23 bits k of a raw Philox word give the odd integer 2k + 1 - 2^23, exact in fp32; it is
    multiplied once (one IEEE rounding) by a scale that is computed in double and rounded to fp32.
    """
    text = f"p2pdiloco/init/{seed}/{spec.name}"
    generator = np.random.Philox(key=int.from_bytes(hashlib.sha256(text.encode()).digest()[:16], "little"))
    scale = np.float32(std * math.sqrt(3) / _HALF_RANGE)
    values = np.empty(spec.numel, dtype=np.float32)
    for start in range(0, spec.numel, _DRAW_CHUNK):
        part = values[start : start + _DRAW_CHUNK]
        k = (generator.random_raw(part.size) >> np.uint64(41)).astype(np.int64)
        part[:] = (2 * k + 1 - _HALF_RANGE).astype(np.float32) * scale
    return torch.from_numpy(values).view(spec.shape)


def plain_start(seed: int, spec: TensorSpec) -> Tensor:
    """Draw a matrix, embedding or vector in a way that suits most models
    (`tasks.task.Task.initial_parameters`)."""
    if len(spec.shape) > 1:
        inputs = spec.numel // spec.rows
        return uniform(seed, spec, EMBEDDING_STD if spec.embedding else 1 / math.sqrt(inputs))
    is_norm = "norm" in spec.name.lower() and spec.name.endswith("weight")
    return torch.ones(spec.shape) if is_norm else torch.zeros(spec.shape)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Context in which the model does nothing that it does in training only."""
    trained = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in trained:
            module.training = True


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


def named_parameters(model: nn.Module) -> Tensors:
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


def tensor_specs(model: nn.Module) -> Specs:
    """Name and shape of every parameter, for `tensors.layout.plan_fragments`; weights of `nn.Embedding` are
    embeddings."""
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    return tuple(
        TensorSpec(name, tuple(parameter.shape), embedding=id(parameter) in tables)
        for name, parameter in plain_parameters(model)
    )
