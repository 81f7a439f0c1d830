"""State of one fragment in one version, and the right to read it undisturbed."""

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
    """Function that ends the reading; idempotent, from any thread."""


class Loan(Struct, frozen=True):
    """Right to write a state that comes from peers into the spare (`Vault.lend_spare`)."""

    buffers: tuple[memoryview, memoryview]
    """Theta, then momentum: to be filled with fp32 little-endian bytes."""
    state: FragmentState
    uses: int

    def write(self, offset: int, data: memoryview) -> None:
        """Write bytes of the state at this offset; Theta comes first."""
        first, second = self.buffers
        here = data[: max(0, first.nbytes - offset)]
        first[offset : offset + here.nbytes] = here
        rest = data[here.nbytes :]
        if rest.nbytes:
            at = offset + here.nbytes - first.nbytes
            second[at : at + rest.nbytes] = rest


class FragmentState:
    """Theta and momentum of one fragment in one version; 8 bytes per parameter."""

    def __init__(self, numel: int) -> None:
        self.theta = torch.zeros(numel)
        self.momentum = torch.zeros(numel)
        self.number = EMPTY
        self.digest = b""
        self.pins = 0
        self.uses = 0
        """Number of times that something began to be made in this state."""

    def begin(self) -> None:
        """Begin to make something else in it."""
        self.empty()
        self.uses += 1

    def empty(self) -> None:
        """Declare that it holds no version."""
        self.number = EMPTY

    def pin(self) -> None:
        """Count a reader more: what it holds stays."""
        self.pins += 1

    def unpin(self) -> None:
        """Count a reader less."""
        self.pins -= 1

    def seal(self, number: int) -> bytes:
        """Declare that the state holds this version; returns its state digest."""
        self.number, self.digest = number, state_digest(number, self.theta, self.momentum)
        return self.digest

    def buffers(self) -> list[memoryview]:
        """Theta, then momentum: shared, read-only bytes."""
        return [bytes_of(self.theta).toreadonly(), bytes_of(self.momentum).toreadonly()]
