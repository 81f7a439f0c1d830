"""State of one fragment in one version, the right to read it undisturbed, and how long it may be.

Lengths (L2) are measured by that of version 0. What is far beyond it is no state of a run, not even an honest
one's: whoever finds such a state on its disk, or is given one, is better off with another.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from msgspec import Struct
from torch import Tensor

from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.tensors.digest import bytes_of, state_digest
from p2pdiloco.tensors.portable import norm, scale
from p2pdiloco.tensors.unsound import Unsound

EMPTY = -1
"""Version number of a state that holds none."""
MOST_LENGTHS = 1024
"""Limit of a state's length, as a multiple of version 0's."""
SMALL = 1 / 32
"""Least mean size that version 0's parameters are taken for: adapters begin with zeros."""
STATED = 0.01
"""Relative error allowed of a stated length: nodes of other releases sum in another order."""


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

    def is_whole(self) -> bool:
        """Tell whether what it holds still has its digest."""
        return state_digest(self.number, self.theta, self.momentum) == self.digest

    def buffers(self) -> list[memoryview]:
        """Theta, then momentum: shared, read-only bytes."""
        return [bytes_of(self.theta).toreadonly(), bytes_of(self.momentum).toreadonly()]


def first_length(theta: Tensor) -> float:
    """Length of version 0, rounded up to a power of two. It is in the header of version 0, which must be the
    same on all machines."""
    return float(2.0 ** math.ceil(math.log2(max(norm(theta), SMALL * math.sqrt(len(theta))))))


def shorten(update: Tensor, limit: float) -> None:
    """Cut an update to this length, in place."""
    length = norm(update)
    if length > limit:
        scale(update, limit / length, out=update)


def check_stated(update: Tensor, stated: float | None) -> None:
    """Compare an update's length with what its syncer says; None: it says nothing.

    Raises:
        Unsound: "out-of-range".
    """
    if stated is not None and not math.isclose(norm(update), stated, rel_tol=STATED):
        raise Unsound(Verdict.OUT_OF_RANGE, f"length {norm(update):.3g}, stated {stated:.3g}")


class FirstLengths:
    """Lengths of every fragment's version 0; infinite where it is not known."""

    def __init__(self, fragments: int) -> None:
        self._known = [math.inf] * fragments

    def note(self, fragment: int, theta: Tensor) -> None:
        """Take in version 0."""
        self._known[fragment] = first_length(theta)

    def of(self, fragment: int) -> float:
        """Length of version 0, about."""
        return self._known[fragment]

    def check(self, fragment: int, *parts: Tensor) -> None:
        """Judge parameters and momentum.

        Raises:
            Unsound: "out-of-range".
        """
        limit = MOST_LENGTHS * self._known[fragment]
        for values in parts:
            length = norm(values)
            if length > limit:
                raise Unsound(Verdict.OUT_OF_RANGE, f"a state of length {length:.3g}, at most {limit:.3g}")
