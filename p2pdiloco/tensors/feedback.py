"""Error feedback: what a lossy encoding leaves out of one contribution goes into the next one."""

from __future__ import annotations

import torch
from torch import Tensor

from p2pdiloco.errors import invariant


class Residual:
    """Error feedback of one fragment: the part that encodings left out, committed, and pending for the one in
    flight.

    A contribution may be lost for good, so its residual counts only once it is known to be merged.
    Memory: two fp32 fragments.
    """

    def __init__(self, numel: int) -> None:
        self._committed = torch.zeros(numel)
        self._next = torch.zeros(numel)
        self.pending = False

    def add_to(self, delta: Tensor) -> None:
        """Add what was left out to the pseudo-gradient that is about to be encoded, fp32 [numel]."""
        delta.add_(self._committed)

    def pend(self, delta: Tensor, decoded: Tensor) -> None:
        """Remember delta - decoded, both fp32 [numel], for when that contribution is merged."""
        torch.sub(delta, decoded, out=self._next)
        self.pending = True

    def commit(self) -> None:
        """Take over what the pending contribution left out: it was merged."""
        invariant(self.pending, "no encoded contribution is pending")
        self._committed, self._next = self._next, self._committed
        self.pending = False

    def discard(self) -> None:
        """Forget what the pending contribution left out: it will never be merged. Without a pending one
        nothing happens."""
        self.pending = False
