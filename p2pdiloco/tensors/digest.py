"""Digests over raw little-endian bytes: equal digests mean equal bits, on any machine."""

from __future__ import annotations

import struct
import sys

import torch
from torch import Tensor

from p2pdiloco.errors import invariant
from p2pdiloco.hashing import content_digest

Buffer = bytes | bytearray | memoryview


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared, not copied. Little-endian machines only."""
    invariant(sys.byteorder == "little", "the wire and digests are little-endian, this machine is not")
    invariant(tensor.is_contiguous() and tensor.device.type == "cpu", "only host memory has bytes to show")
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def state_digest(number: int, theta: Tensor, momentum: Tensor) -> bytes:
    """Digest of the version number (8 bytes), the fragment's Theta and its outer momentum (fp32)."""
    return content_digest(struct.pack("<Q", number), bytes_of(theta), bytes_of(momentum))
