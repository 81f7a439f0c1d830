"""The inner optimizer, its learning rate, and the parameters that it trains.

AdamW (`FusedAdamW`), or `Muon` with AdamW for what is no hidden matrix. Moments belong to this learner alone;
they are never averaged nor touched by an outer update.
`shard` cuts a model up among a learner's processes (FSDP2); `HeldParameters` and its subclasses copy
fragments out of the parameters and back, whether they are in one process, copies, or shards.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast, get_args

import torch
from torch import Tensor, nn

from p2pdiloco.config.manifest import InnerSection
from p2pdiloco.config.settings import Shard
from p2pdiloco.errors import UserError, invariant
from p2pdiloco.learner.ranks import free_bytes, multiplies_bf16, passes_in_bf16
from p2pdiloco.tensors.layout import FragmentLayout, Piece, TensorMap, Tensors, gather, rows_of_piece, scatter
from p2pdiloco.util import Frozen, Values

if TYPE_CHECKING:
    from p2pdiloco.learner.ranks import Distributed


Moments = MutableMapping[Tensor, Tensors]
"""Moments of every parameter, by name."""


class Optimizer(Protocol):
    """Interface of an optimizer, as the inner loop and its checkpoint need it."""

    @property
    def param_groups(self) -> list[Values]:
        """Dicts with "params", "lr" and "weight_decay"."""

    state: Moments
    """Moments; of AdamW "step", "exp_avg" and "exp_avg_sq"."""

    def step(self) -> object:
        """Update all parameters that have a gradient, once."""


class Together:
    """Muon, and AdamW for all other parameters, as one optimizer."""

    kind = "muon"

    def __init__(self, *parts: Optimizer) -> None:
        self._parts = parts
        self.state: Moments = parts[0].state
        for part in parts[1:]:
            part.state = self.state  # one mapping for all: parameters are different ones

    @property
    def param_groups(self) -> list[Values]:
        """Groups of all parts."""
        return [group for part in self._parts for group in part.param_groups]

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
    return Together(_adamw(others, section), muon)


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


def clip_gradients(model: nn.Module, section: InnerSection) -> Tensor:
    """Scale the gradients to at most `clip_norm`; returns the norm before (a scalar, may be non-finite)."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), section.clip_norm)
    return cast(Tensor, norm.full_tensor()) if is_shared_out(norm) else norm  # type: ignore[attr-defined]


def optimizer_kind(optimizer: Optimizer) -> str:
    """Name of the optimizer whose moments they are: "adamw", "muon", or that of somebody else's class."""
    return str(getattr(optimizer, "kind", type(optimizer).__name__.lower()))


def moments(model: nn.Module, optimizer: Optimizer) -> Tensors:
    """Moments of every parameter: MOMENT/PARAMETER -> tensor; {} at first. A parameter that is shared out
    among processes has this one's rows here."""
    found: Tensors = {}
    for name, parameter in model.named_parameters():
        for moment, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                found[f"{moment}/{name}"] = value
    return found


def set_moments(model: nn.Module, optimizer: Optimizer, saved: TensorMap) -> None:
    """Put back what `moments` gave. Raises: ValueError (other names or shapes); then nothing is changed."""
    parameters = dict(model.named_parameters())
    restored: dict[Tensor, Tensors] = {}
    for key, value in saved.items():
        moment, _, name = key.partition("/")
        parameter = parameters.get(name)
        if parameter is None or (value.dim() and value.shape != parameter.shape):
            raise ValueError(f"{moment} of {name} has shape {tuple(value.shape)}")
        device = parameter.device if value.dim() else step_device(parameter)
        mine = own_rows(value, parameter) if value.dim() else value
        restored.setdefault(parameter, {})[moment] = mine.to(device, copy=True)
    optimizer.state.update(restored)


EPSILON = 1e-8


class FusedAdamW:
    """`torch.optim.AdamW(fused=True)`, bit for bit, for CPU and CUDA: one kernel over all tensors.

    torch's own class imports torch's compiler when it is made, which takes as long as torch itself: half of
    the time in which a learner is back after its death. `state` and `param_groups` are laid out as torch's.
    Of a parameter that is shared out among processes it works on this one's rows.
    """

    kind = "adamw"

    def __init__(self, groups: list[Values], lr: float, betas: tuple[float, float]) -> None:
        """Take groups of parameters: dicts with "params" and "weight_decay"."""
        self.param_groups = [{**group, "lr": lr} for group in groups]
        self.state: Moments = {}
        self._betas = betas

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters that have a gradient, once."""
        for group in self.param_groups:
            given = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.state.get(p) or self.state.setdefault(p, _fresh(own(p))) for p in given]
            if not given:
                continue
            steps = [state["step"] for state in states]
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                [own(parameter) for parameter in given],
                [own(parameter.grad) for parameter in given],
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


def _fresh(parameter: Tensor) -> Tensors:
    return {
        "step": torch.zeros((), device=step_device(parameter)),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }


def step_device(parameter: Tensor) -> torch.device:
    """Device on which fused AdamW keeps its step counter."""
    return parameter.device if parameter.is_cuda else torch.device("cpu")


NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
NORM_EPSILON = 1e-7
RMS_OF_ADAMW = 0.2
STACK_NUMEL = 1 << 24
"""Elements of matrices that are orthogonalised together, at most: 64 MiB in fp32."""


class Muon:
    """Muon for two-dimensional parameters: momentum, orthogonalised. `state` holds "momentum_buffer" for
    each.

    Jordan 2024 (kellerjordan.github.io/posts/muon), with the scale of 2502.16982, whose updates are as large
    as AdamW's, so that learning rate and weight decay mean the same for both. Where bf16 is fast, bit for bit
    `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`, which needs torch 2.9 and imports torch's compiler, as
    AdamW's class does. Elsewhere matrices are orthogonalised in fp32: with no more than AVX2, bf16 takes a
    processor 16 times as long (`scripts/bench/study/bench_muon.py`).
    """

    def __init__(self, params: list[Tensor], lr: float, weight_decay: float, momentum: float) -> None:
        self.param_groups: list[Values] = [{"params": params, "lr": lr, "weight_decay": weight_decay}]
        self.state: Moments = {}
        self._momentum = momentum

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters that have a gradient, once."""
        for group in self.param_groups:
            given = [parameter for parameter in group["params"] if parameter.grad is not None]
            for alike in stacks(given):
                self._update(alike, group["lr"], group["weight_decay"])

    def _update(self, alike: list[Tensor], rate: float | Tensor, weight_decay: float) -> None:
        """Update matrices of one shape: few launches on a GPU, where small ones wait for those."""
        gradients = [own(parameter.grad) for parameter in alike if parameter.grad is not None]
        for parameter, gradient in zip(alike, gradients, strict=True):
            if not self.state.setdefault(parameter, {}):
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(gradient)
        momenta = [self.state[parameter]["momentum_buffer"] for parameter in alike]
        torch._foreach_lerp_(momenta, gradients, 1 - self._momentum)
        nesterov = torch._foreach_lerp(gradients, momenta, self._momentum)
        # A matrix that is shared out among processes is whole here, one at a time.
        matrices = [whole(part, parameter) for part, parameter in zip(nesterov, alike, strict=True)]
        updates = orthogonal(torch.stack(matrices))
        updates = updates.to(torch.float32, memory_format=torch.contiguous_format)
        mine = [own(parameter) for parameter in alike]
        parts = [own_rows(update, parameter) for update, parameter in zip(updates, alike, strict=True)]
        torch._foreach_mul_(mine, 1 - rate * weight_decay)
        step = -rate * (RMS_OF_ADAMW * math.sqrt(max(alike[0].shape)))
        if isinstance(step, Tensor):
            torch._foreach_add_(mine, torch._foreach_mul(parts, step))
        else:
            torch._foreach_add_(mine, parts, alpha=step)


def stacks(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Matrices of one shape, together as long as they are not more than `STACK_NUMEL`; one that is shared out
    among processes is alone."""
    by_shape: dict[torch.Size, list[Tensor]] = {}
    for parameter in parameters:
        if is_shared_out(parameter):
            yield [parameter]
        else:
            by_shape.setdefault(parameter.shape, []).append(parameter)
    for shape, alike in by_shape.items():
        most = max(1, STACK_NUMEL // shape.numel())
        yield from (alike[start : start + most] for start in range(0, len(alike), most))


def orthogonal(matrices: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix, about, to each of a stack (or to one): singular values between 0.5
    and 1.5. Same shape, new memory; bf16, or fp32 where that is faster (`learner.ranks.multiplies_bf16`)."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.to(torch.bfloat16 if multiplies_bf16(matrices.device.type) else torch.float32, copy=True)
    x = x.mT if tall else x
    x.div_(x.norm(dim=(-2, -1), keepdim=True).clamp(min=NORM_EPSILON))
    multiplied = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = multiplied(x, multiplied(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def hidden_matrices(model: nn.Module) -> list[Tensor]:
    """Two-dimensional parameters of the model's blocks (what is inside an `nn.ModuleList`), which are no
    embeddings. A model without such a list: all but embeddings and the last `nn.Linear`, its head."""
    apart = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    blocks: list[nn.Module] = [block for block in model.modules() if isinstance(block, nn.ModuleList)]
    if not blocks:
        apart |= {id(head.weight) for head in [m for m in model.modules() if isinstance(m, nn.Linear)][-1:]}
    inside = {id(p) for block in (blocks or [model]) for p in block.parameters()} - apart
    return [p for p in model.parameters() if p.dim() == 2 and id(p) in inside]


WORDS_PER_PARAMETER = 4
"""Words of fp32 for each parameter: itself, its gradient, two moments. (Muon has one for its matrices: then
they are a bit too many.)"""
FOR_STATE = 0.75
"""Share of a device's memory for those; the rest is for activations, casts and buckets."""
SHARDING_TORCH = "2.8"
"""Oldest release of torch that shards as this module needs."""


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

    `torch.distributed.fsdp.fully_shard` cuts every parameter by rows (its first dimension): of R rows and N
    ranks, each has ceil(R / N), the last ones fewer or none. A block's parameters are whole only while it
    computes, and its gradients are summed as soon as they are there, so all ranks must make the same passes
    (`learner.inner_step`). The optimizer works on plain tensors, a rank's own rows (`own`).

    The parameters travel in fp32, or of blocks in bf16 where the device computes in it: autocast would keep a
    cast copy of every block until the backward pass, and with that half the model. On CPUs blocks that are
    shared out compute in fp32: norms there do not take weights in bf16 for what flows in fp32.

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
        raise UserError(
            f"sharding needs torch {SHARDING_TORCH}, this is {torch.__version__}", "use --shard never"
        )
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


class HeldParameters:
    """Parameters of a learner, all in this process.

    Fragments are copied out of them and put back through this class, in rank 0, which tells the others to do
    their part (`learner.ranks.Order`).
    """

    def __init__(self, params: TensorMap) -> None:
        """Take parameters, which are changed in place, on whatever device they are."""
        self._params = params
        self._stash: list[Tensor] = []
        self.on_cuda = any(parameter.is_cuda for parameter in params.values())

    def gather(self, layout: FragmentLayout, out: Tensor) -> None:
        """Copy a fragment into `out`: fp32 (layout.numel,), on the CPU."""
        gather(self._params, layout, out)

    def scatter(self, flat: Tensor, layout: FragmentLayout) -> None:
        """Copy a fragment, fp32 (layout.numel,), into the parameters."""
        scatter(flat, layout, self._params)

    def put(self, layout: FragmentLayout) -> None:
        """Do another rank's part of `scatter`."""

    def take(self, layout: FragmentLayout) -> None:
        """Do another rank's part of `gather`: none, where each has all."""

    @torch.no_grad()
    def set_aside(self) -> None:
        """Keep what this process has, in the machine's memory, until `bring_back`: others are put in their
        place."""
        self._stash = [own(parameter).to("cpu", copy=True) for parameter in self._params.values()]

    @torch.no_grad()
    def bring_back(self) -> None:
        """Undo `set_aside`."""
        for parameter, kept in zip(self._params.values(), self._stash, strict=True):
            own(parameter).copy_(kept)
        self._stash = []

    def moments(self, model: nn.Module, optimizer: Optimizer) -> Tensors:
        """Moments as the function `moments` gives them."""
        return moments(model, optimizer)


class HeldCopies(HeldParameters):
    """Parameters that are the same in every rank; rank 0 sends the others what it puts."""

    def __init__(self, params: TensorMap, ranks: Distributed) -> None:
        super().__init__(params)
        self._ranks = ranks

    def scatter(self, flat: Tensor, layout: FragmentLayout) -> None:
        super().scatter(flat, layout)
        self._ranks.order("put", layout.index)
        self.put(layout)

    @torch.no_grad()
    def put(self, layout: FragmentLayout) -> None:
        """Do every rank's part of `scatter`."""
        for piece in layout.pieces:
            self._ranks.broadcast(rows_of_piece(self._params, piece))


class RankSpan(Frozen):
    """A run of elements of a fragment that one rank has."""

    tensor: str
    local_offset: int
    """Offset in the rank's rows of the tensor, flat."""
    fragment_offset: int
    numel: int


class HeldShares(HeldParameters):
    """Parameters of which every rank has some rows (`shard`). One fragment at a time is whole, on the CPU,
    and one rank's part of it on rank 0's device."""

    def __init__(self, params: TensorMap, ranks: Distributed) -> None:
        super().__init__(params)
        self._ranks = ranks

    def numel(self) -> int:
        """Elements that this rank has."""
        return sum(own(parameter).numel() for parameter in self._params.values())

    def gather(self, layout: FragmentLayout, out: Tensor) -> None:
        self._ranks.order("take", layout.index)
        self.take(layout, out)

    def scatter(self, flat: Tensor, layout: FragmentLayout) -> None:
        self._ranks.order("put", layout.index)
        self.put(layout, flat)

    def moments(self, model: nn.Module, optimizer: Optimizer) -> Tensors:
        """Moments on the CPU, in rank 0; {} in the others, which ask too."""
        if self._ranks.rank == 0:
            self._ranks.order("moments")
        found = {}
        for key, value in moments(model, optimizer).items():
            name = key.partition("/")[2]
            parameter = self._params[name]
            if not value.dim():
                found[key] = value
                continue
            layout = FragmentLayout(0, parameter.numel(), (Piece(name, 0, 0, parameter.numel(), False),))
            flat = torch.empty(parameter.numel()) if self._ranks.rank == 0 else None
            self._take({name: own(value)}, layout, flat)
            if flat is not None:
                found[key] = flat.view(parameter.shape)
        return found

    def take(self, layout: FragmentLayout, out: Tensor | None = None) -> None:
        """Do every rank's part of `gather`; `out` is rank 0's."""
        names = {piece.tensor for piece in layout.pieces}
        self._take({name: own(self._params[name]) for name in names}, layout, out)

    @torch.no_grad()
    def put(self, layout: FragmentLayout, flat: Tensor | None = None) -> None:
        """Do every rank's part of `scatter`; `flat` is rank 0's."""
        me = self._ranks.rank
        for rank in range(self._ranks.count) if flat is not None else (me,):
            spans = list(self._spans(layout, rank))
            numel = sum(span.numel for span in spans)
            if not numel:
                continue
            if flat is None:
                packed = self._ranks.receive(0, numel)
            else:
                parts = [flat[span.fragment_offset :][: span.numel] for span in spans]
                packed = torch.cat(parts).to(own(self._params[spans[0].tensor]).device)
            if rank != me:
                self._ranks.send(rank, packed)
                continue
            for span, part in _parts(packed, spans):
                own(self._params[span.tensor]).view(-1)[span.local_offset :][: span.numel].copy_(part)

    @torch.no_grad()
    def _take(self, parts: TensorMap, layout: FragmentLayout, out: Tensor | None) -> None:
        me = self._ranks.rank
        for rank in range(self._ranks.count) if out is not None else (me,):
            spans = list(self._spans(layout, rank))
            if not spans:
                continue
            if rank == me:
                views = [parts[s.tensor].reshape(-1)[s.local_offset :][: s.numel] for s in spans]
                packed = torch.cat(views).float()
            else:
                packed = self._ranks.receive(rank, sum(span.numel for span in spans))
            if out is None:
                self._ranks.send(0, packed)
                continue
            for span, part in _parts(packed.cpu(), spans):
                out[span.fragment_offset :][: span.numel].copy_(part)

    def _spans(self, layout: FragmentLayout, rank: int) -> Iterator[RankSpan]:
        """In the fragment's order."""
        for piece in layout.pieces:
            parameter = self._params[piece.tensor]
            count = parameter.shape[0]
            row_numel = parameter.numel() // count
            low, high = (row * row_numel for row in rows_of(rank, self._ranks.count, count))
            start = max(low, piece.tensor_offset)
            end = min(high, piece.tensor_offset + piece.numel)
            if start < end:
                at = piece.fragment_offset + start - piece.tensor_offset
                yield RankSpan(piece.tensor, start - low, at, end - start)


def _parts(packed: Tensor, spans: Sequence[RankSpan]) -> Iterator[tuple[RankSpan, Tensor]]:
    return zip(spans, packed.split_with_sizes([span.numel for span in spans]), strict=True)
