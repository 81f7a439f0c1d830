"""Error feedback: what a lossy encoding leaves out of one contribution goes into the next one."""

from __future__ import annotations

import torch
from torch import Tensor

from p2pdiloco.errors import invariant


class Residual:
    """What the encodings of one fragment have left out so far: committed, and pending for the one in flight.

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
        """The pending contribution was merged."""
        invariant(self.pending, "no encoded contribution is pending")
        self._committed, self._next = self._next, self._committed
        self.pending = False

    def discard(self) -> None:
        """The pending contribution will never be merged. Nothing happens where none is pending."""
        self.pending = False
