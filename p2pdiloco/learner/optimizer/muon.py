"""Muon: momentum, orthogonalised, for the matrices inside the model; AdamW for all else.

Jordan 2024 (kellerjordan.github.io/posts/muon), with the scale of 2502.16982, whose updates are as large as
AdamW's, so that learning rate and weight decay mean the same for both. Where bf16 is fast, bit for bit
`torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`, which needs torch 2.9 and imports torch's compiler, as
AdamW's class does. Elsewhere matrices are orthogonalised in fp32: with no more than AVX2, bf16 takes a
processor 16 times as long (`scripts/bench/study/bench_muon.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from p2pdiloco.learner.device import multiplies_bf16
from p2pdiloco.learner.parallel.sharding import is_shared_out, own, own_rows, whole

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
EPSILON = 1e-7
RMS_OF_ADAMW = 0.2
STACK_NUMEL = 1 << 24
"""Numbers in matrices that are orthogonalised together, at most: 64 MiB in fp32."""


class Muon:
    """Muon for two-dimensional parameters. `state` holds "momentum_buffer" for each."""

    def __init__(self, params: list[Tensor], lr: float, weight_decay: float, momentum: float) -> None:
        self.param_groups: list[dict[str, Any]] = [{"params": params, "lr": lr, "weight_decay": weight_decay}]
        self.state: MutableMapping[Tensor, dict[str, Tensor]] = {}
        self._momentum = momentum

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters that have a gradient, once."""
        for group in self.param_groups:
            given = [parameter for parameter in group["params"] if parameter.grad is not None]
            for alike in stacks(given):
                self._update(alike, group["lr"], group["weight_decay"])

    def _update(self, alike: list[Tensor], rate: float | Tensor, weight_decay: float) -> None:
        """Update matrices of one shape together: few launches on a GPU, where small ones wait for those."""
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
        rows = [own_rows(update, parameter) for update, parameter in zip(updates, alike, strict=True)]
        torch._foreach_mul_(mine, 1 - rate * weight_decay)
        step = -rate * (RMS_OF_ADAMW * math.sqrt(max(alike[0].shape)))
        if isinstance(step, Tensor):
            torch._foreach_add_(mine, torch._foreach_mul(rows, step))
        else:
            torch._foreach_add_(mine, rows, alpha=step)


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
    and 1.5. Same shape, new memory; bf16, or fp32 where that is faster (`device.multiplies_bf16`)."""
    a, b, c = NEWTON_SCHULZ
    tall = matrices.size(-2) > matrices.size(-1)
    x = matrices.to(torch.bfloat16 if multiplies_bf16(matrices.device.type) else torch.float32, copy=True)
    x = x.mT if tall else x
    x.div_(x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPSILON))
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
