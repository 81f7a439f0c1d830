"""Muon: momentum, orthogonalised, for the matrices inside the model; AdamW for all else.

Jordan 2024 (kellerjordan.github.io/posts/muon), with the scale of 2502.16982, whose updates are as large as
AdamW's, so that learning rate and weight decay mean the same for both. Where bf16 is fast, bit for bit
`torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`, which needs torch 2.9 and imports torch's compiler, as
AdamW's class does. Elsewhere matrices are orthogonalised in fp32: with no more than AVX2, bf16 takes a
processor 16 times as long (`scripts/bench/study/bench_muon.py`).
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from typing import Any

import torch
from torch import Tensor, nn

from p2pdiloco.learner.device import multiplies_bf16
from p2pdiloco.learner.parallel.sharding import own, own_rows, whole

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5
EPSILON = 1e-7
RMS_OF_ADAMW = 0.2


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
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, own(parameter.grad), group["lr"], group["weight_decay"])

    def _update(self, parameter: Tensor, gradient: Tensor, rate: float, weight_decay: float) -> None:
        state = self.state.setdefault(parameter, {})
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        momentum = state["momentum_buffer"].lerp_(gradient, 1 - self._momentum)
        # Nesterov's. A matrix that is shared out among processes is whole here, one at a time.
        update = orthogonal(whole(gradient.lerp(momentum, self._momentum), parameter))
        mine = own(parameter)
        mine.mul_(1 - rate * weight_decay)
        mine.add_(own_rows(update, parameter), alpha=-rate * (RMS_OF_ADAMW * math.sqrt(max(parameter.shape))))


def orthogonal(matrix: Tensor) -> Tensor:
    """The nearest semi-orthogonal matrix, about: singular values between 0.5 and 1.5. Same shape, new memory;
    bf16, or fp32 where that is faster (`device.multiplies_bf16`)."""
    a, b, c = NEWTON_SCHULZ
    tall = matrix.size(0) > matrix.size(1)
    x = matrix.to(torch.bfloat16 if multiplies_bf16(matrix.device.type) else torch.float32, copy=True)
    x = x.T if tall else x
    x.div_(x.norm().clamp(min=EPSILON))
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if tall else x


def hidden_matrices(model: nn.Module) -> list[Tensor]:
    """Two-dimensional parameters of the model's blocks (what is inside an `nn.ModuleList`), which are no
    embeddings. A model without such a list: all but embeddings and the last `nn.Linear`, its head."""
    apart = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    blocks: list[nn.Module] = [block for block in model.modules() if isinstance(block, nn.ModuleList)]
    if not blocks:
        apart |= {id(head.weight) for head in [m for m in model.modules() if isinstance(m, nn.Linear)][-1:]}
    inside = {id(p) for block in (blocks or [model]) for p in block.parameters()} - apart
    return [p for p in model.parameters() if p.dim() == 2 and id(p) in inside]
