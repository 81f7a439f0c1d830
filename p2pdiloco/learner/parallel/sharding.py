"""Sharding of a model (FSDP2): parameters, gradients and moments among a learner's processes.

`torch.distributed.fsdp.fully_shard` cuts every parameter by rows (its first dimension): of R rows and N
ranks, each has ceil(R / N), the last ones fewer or none. A block's parameters are whole only while it
computes, and its gradients are summed as soon as they are there, so all ranks must make the same passes
(`learner.passes`). What the optimizer works on are plain tensors, a rank's own rows (`own`).

The parameters travel in fp32, or of blocks in bf16 where the device computes in it: autocast would keep a
cast copy of every block until the backward pass, and with that half the model. On CPUs blocks that are shared
out compute in fp32: norms there do not take weights in bf16 for what flows in fp32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast, get_args

import torch
from torch import Tensor, nn

from p2pdiloco.config.settings import Shard
from p2pdiloco.errors import UserError, invariant
from p2pdiloco.learner.device import free_bytes, passes_in_bf16

if TYPE_CHECKING:
    from p2pdiloco.learner.parallel.ranks import Distributed

WORDS_PER_PARAMETER = 4
"""Words of fp32 for each parameter: itself, its gradient, two moments. (Muon has one for its matrices: then
they are a bit too many.)"""
FOR_STATE = 0.75
"""Share of a device's memory for those; the rest is for activations, casts and buckets."""
TORCH = "2.8"


def wants_shards(wanted: Shard, numel: int, device: torch.device, samples: int, ranks: Distributed) -> bool:
    """Tell whether a model of `numel` parameters is to be cut up; all ranks come to the same answer.

    "auto" cuts it if the state of the whole does not fit into one of the devices. `samples`: of an inner
    step.

    Raises:
        UserError: "always", or necessary, and not possible.
    """
    invariant(wanted in get_args(Shard), f"shard {wanted}")
    if wanted == "never":
        return False
    if wanted == "auto":
        free = free_bytes(device, ranks.count)
        fits = free is None or numel * 4 * WORDS_PER_PARAMETER <= free * FOR_STATE
        if ranks.all_say(fits):
            return False
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"parameters cannot be sharded on {device.type}", "use --shard never")
    if samples < ranks.count:
        raise UserError(
            f"an inner step of {samples} samples is too small to be sharded over {ranks.count} processes",
            f"use --nproc {samples}" if samples > 1 else "use --shard never",
        )
    return True


def precision_of_shares(device: torch.device, precision: str) -> str:
    """Precision of a learner whose parameters are shared out, by `LearnerOptions.precision`."""
    return "fp32" if device.type == "cpu" else precision


def shard(model: nn.Module, device: torch.device, precision: str = "auto") -> None:
    """Cut the model's parameters up, in place: block by block (what is in its outermost module lists), and
    what is left as one. Blocks move to the device one at a time. Gradients become sums over all ranks.

    Raises:
        UserError: this torch is too old, or a parameter is a scalar.
    """
    try:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        known = hasattr(FSDPModule, "set_force_sum_reduction_for_comms")
    except ImportError:
        known = False
    if not known:
        raise UserError(f"sharding needs torch {TORCH}, this is {torch.__version__}", "use --shard never")
    for name, parameter in model.named_parameters():
        if not parameter.dim():
            raise UserError(f"the parameter {name} is a scalar, which cannot be sharded", "use --shard never")
    from torch import distributed

    mesh = init_device_mesh(device.type, (distributed.get_world_size(),))
    bf16 = passes_in_bf16(device, precision_of_shares(device, precision))
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if bf16 else None, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    parts: list[Any] = []
    for block in blocks_of(model):
        block.register_forward_hook(all_take_part)  # before FSDP's own, which lets go of the parameters
        parts.append(fully_shard(block, mesh=mesh, reshard_after_forward=True, mp_policy=policy))
    # Its own parameters (embedding, head) stay fp32: what flows between blocks is as it is without sharding.
    parts.append(fully_shard(model, mesh=mesh, reshard_after_forward=True))
    for part in parts:
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # gloo has no other


class _TakePart(torch.autograd.Function):
    """Function that returns its first argument and passes its gradient through; the others' gradient is 0."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *parameters: Tensor) -> Tensor:
        ctx.like = [(p.shape, p.dtype, p.device) for p in parameters]
        return output.clone()  # of a view, FSDP would warn: what is done to it in place is lost on it

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        zeros = (torch.zeros((), dtype=dtype, device=device) for _, dtype, device in ctx.like)
        return gradient, *[zero.expand(like[0]) for zero, like in zip(zeros, ctx.like, strict=True)]


def all_take_part(block: nn.Module, _arguments: Any, output: Any) -> Any:
    """Give every parameter of a block a gradient, if need be 0: FSDP packs those that have one, so where
    ranks' samples choose different experts they would add up gradients of different parameters, or stop."""
    first = output[0] if isinstance(output, tuple) and output else output
    if not (isinstance(first, Tensor) and first.requires_grad):
        return output
    take_part: Any = _TakePart.apply
    first = take_part(first, *[p for p in block.parameters() if p.requires_grad])
    return (first, *output[1:]) if isinstance(output, tuple) else first


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Modules in the outermost lists and sequences of modules that share parameters with nothing else. (A
    model that is a sequence itself is the outermost one.)"""
    found: list[nn.Module] = []

    def collect(module: nn.Module) -> None:
        listed = isinstance(module, nn.ModuleList | nn.Sequential)
        for child in module.children():
            if listed and not isinstance(child, nn.ModuleList | nn.ModuleDict):
                found.append(child)
            else:
                collect(child)

    collect(model)
    uses: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    return [
        block
        for block in found
        if any(True for _ in block.parameters())
        and all(
            uses[id(parameter)] == sum(p is parameter for m in block.modules() for p in m.parameters(False))
            for parameter in block.parameters()
        )
    ]


def is_shared_out(tensor: Tensor) -> bool:
    """Tell whether this process has only a part of the tensor, without importing what that takes."""
    return hasattr(tensor, "to_local")


@torch.no_grad()
def own(tensor: Tensor) -> Tensor:
    """The rows that this process has, sharing memory; a tensor that is not cut up, itself."""
    return cast(Tensor, tensor.to_local()) if is_shared_out(tensor) else tensor  # type: ignore[attr-defined]


def rows_of(rank: int, count: int, rows: int) -> tuple[int, int]:
    """First row of a rank, and the one behind its last."""
    each = -(-rows // count)
    return min(rows, rank * each), min(rows, (rank + 1) * each)


def own_rows(whole: Tensor, parameter: Tensor) -> Tensor:
    """Rows of a tensor, as large as the parameter, that belong to this process's rows of it."""
    if not is_shared_out(parameter):
        return whole
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    low, high = rows_of(mesh.get_local_rank(), mesh.size(), len(whole))
    return whole[low:high]


def whole(part: Tensor, parameter: Tensor) -> Tensor:
    """Join every rank's part, as large as its rows of the parameter, to the whole. All ranks get it, and must
    all ask for it."""
    if not is_shared_out(parameter):
        return part
    from torch.distributed.tensor import DTensor

    like: Any = parameter
    return DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    ).full_tensor()
