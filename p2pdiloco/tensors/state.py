"""One version of one fragment in memory, and the right to read it undisturbed."""

from __future__ import annotations

from collections.abc import Callable

import torch
from msgspec import Struct

from p2pdiloco.tensors.digest import bytes_of, state_digest

EMPTY = -1
"""Version number of a state that holds none."""


class Pin(Struct, frozen=True):
    """A committed version that is being read, for example by a transfer: not overwritten until released."""

    number: int
    state_digest: bytes
    buffers: list[memoryview]
    """Theta, then momentum: fp32 little-endian bytes."""
    release: Callable[[], None]
    """Idempotent, from any thread."""


class FragmentState:
    """Theta and momentum of one fragment in one version; 8 bytes per parameter."""

    def __init__(self, numel: int) -> None:
        self.theta = torch.zeros(numel)
        self.momentum = torch.zeros(numel)
        self.number = EMPTY
        self.digest = b""
        self.pins = 0

    def seal(self, number: int) -> bytes:
        """It holds this version now; its state digest."""
        self.number, self.digest = number, state_digest(number, self.theta, self.momentum)
        return self.digest

    def buffers(self) -> list[memoryview]:
        """Theta, then momentum: shared, read-only bytes."""
        return [bytes_of(self.theta).toreadonly(), bytes_of(self.momentum).toreadonly()]
