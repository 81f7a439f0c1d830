"""The outer optimizer: SGD with Nesterov momentum, the same bits on every machine.

Each multiplication and each addition is a torch operation of its own that writes fp32 to memory, so none
can be fused and each is rounded by IEEE 754, whatever the processor.
"""

from __future__ import annotations

import torch
from torch import Tensor

from p2pdiloco.errors import invariant

_TILE = 1 << 16
"""Elements per pass: so many that starting an operation costs little, so few that the next one finds what it
wrote in a cache."""


def momentum_at(number: int, momentum: float, warmup_merges: int) -> float:
    """Outer momentum of the merge that makes version `number` (from 1).

    Grows linearly from 0 (version 1) to `momentum` (version warmup_merges + 1): full Nesterov on a fragment's
    first few pseudo-gradients overshoots (Pier, 2511.17849).
    """
    invariant(number >= 1, "version 0 is not made by a merge")
    if number > warmup_merges:
        return momentum
    return momentum * ((number - 1) / warmup_merges)


@torch.no_grad()
def without_lookahead(
    theta: Tensor, momentum_buffer: Tensor, learning_rate: float, momentum: float
) -> Tensor:
    """Parameters without Nesterov's look-ahead, x = theta + eta mu m: fp32 [numel] in new memory, equal bits
    everywhere.

    x is the theta before minus eta times the last delta. Nesterov's theta is ahead of it by a step of
    momentum (-eta mu m), so that the next pseudo-gradients are measured where momentum leads; they correct
    what it overshoots, and for whoever takes the parameters away there are none. `momentum`: of the merge
    that made this theta. (Sutskever et al. 2013, section 2: their theta is our x, and their gradient is
    taken at our theta.)
    """
    return torch.mul(momentum_buffer, momentum).mul_(learning_rate).add_(theta)


@torch.no_grad()
def outer_step(
    theta: Tensor,
    momentum_buffer: Tensor,
    delta: Tensor,
    learning_rate: float,
    momentum: float,
    out_theta: Tensor,
    out_momentum: Tensor,
    share: float = 1.0,
) -> None:
    """Make the outer step of Decoupled DiLoCo, with delta = base - local.

        m' = mu m + delta;   theta' = theta - eta (delta + mu m')

    `share` f < 1: delta is of that part of an interval only (somebody leaves, or all have just begun). So
    momentum does that part of its work, with this version's mu throughout, also while it warms up:

        m' = (1 - f (1 - mu)) m + delta;   theta' = theta - eta (delta + mu m' - (1 - f) mu m)

    With f = 0 and no delta nothing changes. A whole step of momentum would lead everybody away from where the
    learners are, and so short a delta does not bring them back.

    All tensors fp32 [numel]; outputs do not overlap inputs. eta, mu and what is made of mu and f are rounded
    to fp32 before use.
    """
    numel = theta.numel()
    shapes = {t.shape for t in (theta, momentum_buffer, delta, out_theta, out_momentum)}
    invariant(shapes == {(numel,)}, "the outer step needs flat buffers of one size")
    scratch = torch.empty(min(numel, _TILE), dtype=torch.float32)
    decay = momentum if share == 1 else 1 - share * (1 - momentum)
    for start in range(0, numel, _TILE):
        tile = slice(start, min(start + _TILE, numel))
        change, work = delta[tile], scratch[: tile.stop - start]
        velocity = torch.mul(momentum_buffer[tile], decay, out=out_momentum[tile])
        velocity.add_(change)
        torch.mul(velocity, momentum, out=work)
        work.add_(change)
        if share < 1:
            work.sub_(torch.mul(momentum_buffer[tile], (1 - share) * momentum))
        work.mul_(learning_rate)
        torch.sub(theta[tile], work, out=out_theta[tile])
