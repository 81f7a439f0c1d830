"""Base of all codecs: a flat fp32 fragment becomes bytes, and a fragment again.

Little-endian, no header: sizes follow from numel. Both ways are the same on every CPU, bit for bit; decoding
is so on accelerators, too, while what they encode is compared with nothing. So a codec copies, compares,
finds largest values, and calculates element by element, but makes no sum in an order that is left open. A
payload's values are judged before they are decoded, from `peak`, so that nothing non-finite ever reaches a
merge.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.errors import invariant
from p2pdiloco.tensors.digest import Buffer
from p2pdiloco.tensors.unsound import Unsound

TILE = 64 * 1024
"""Elements worked on at a time, so that the passes over a tile find it in cache."""
DEVICE_TILE = 4 * 1024 * 1024
"""Elements worked on at a time on an accelerator. Starting a kernel for so many costs nothing worth
mentioning, and they fit into its memory."""
FP32_MAX = torch.finfo(torch.float32).max
BF16_MAX = torch.finfo(torch.bfloat16).max
MIN_PEAK = 2.0**-100
"""Least magnitude that is sent: a block wholly below it is sent as zeros, so that products stay clear of
denormals."""


class Codec:
    """An encoding. Stateless, so that any thread may use the one instance in `CODECS`.

    Tensors may be on any device; payloads are host memory. A new encoding is one subclass with the four
    underscored methods, `encoded_bytes`, `block` and `sections`, and one entry in `CODECS`.
    """

    name: str
    block: int
    """Elements that are encoded together."""
    sections: tuple[int, ...]
    """Bytes of every block in each section; a payload is its sections, one after the other."""
    feedback = True
    """True: error feedback adds what an encoding leaves out to the next one (`Residual`)."""
    sparse = False
    """True: most elements of a payload are zero, so what is left out matters, whoever encodes."""

    def encoded_bytes(self, numel: int) -> int:
        """Exact payload size of numel elements."""
        raise NotImplementedError

    def spans(self, start: int, stop: int, numel: int) -> list[tuple[int, int]]:
        """Places, (offset, size), of the bytes of elements start (a multiple of `block`) to stop in a payload
        of numel elements: one after the other they are the payload of these elements alone."""
        found, base, total = [], 0, self.encoded_bytes(numel)
        for size in self.sections:
            first = base + size * (start // self.block)
            last = min(base + size * blocks_of(stop, self.block), total)
            found.append((first, last - first))
            base += size * blocks_of(numel, self.block)
        return found

    def encode(self, source: Tensor, out: bytearray | None = None) -> bytearray:
        """Encode `source` (fp32 [numel], contiguous) into `out` (of exactly the right size) or new memory.

        Raises:
            ValueError: source holds a non-finite value.
        """
        check_flat(source)
        peak = largest(source)
        if not math.isfinite(peak):
            raise ValueError("cannot encode a non-finite value")
        size = self.encoded_bytes(source.numel())
        payload = bytearray(size) if out is None else out
        invariant(len(payload) == size, f"{self.name} needs {size} bytes, got a buffer of {len(payload)}")
        if size:
            self._encode(source, peak, payload)
        return payload

    def decode(self, payload: Buffer, out: Tensor) -> None:
        """Fill `out` (fp32 [numel], contiguous) from the payload.

        Raises:
            RemoteError: see `peak`; `out` is then untouched.
        """
        check_flat(out)
        self.peak(payload, out.numel())
        if out.numel():
            self._decode(writable(payload), out)

    def peak(self, payload: Buffer, numel: int) -> float:
        """Find an upper bound of the magnitudes in a payload of numel elements, without decoding it.

        Raises:
            Unsound: "wrong-size", "non-finite" (also where decoding would overflow), "out-of-range"
                (bytes that no encoder writes).
        """
        size, expected = memoryview(payload).nbytes, self.encoded_bytes(numel)
        if size != expected:
            raise Unsound(Verdict.WRONG_SIZE, f"{size} bytes of {self.name}, expected {expected}")
        peak = self._payload_peak(writable(payload), numel) if numel else 0.0
        if not peak <= FP32_MAX:
            raise Unsound(Verdict.NON_FINITE, f"a value of {peak} in a {self.name} payload")
        return peak

    def _encode(self, source: Tensor, peak: float, payload: bytearray) -> None:
        raise NotImplementedError

    def _decode(self, payload: Buffer, out: Tensor) -> None:
        raise NotImplementedError

    def _payload_peak(self, payload: Buffer, numel: int) -> float:
        raise NotImplementedError


def tiles(source: Tensor, block: int, tile: int = TILE) -> Iterator[tuple[Tensor, int, int]]:
    """Cut a flat fp32 tensor into (rows of `block` elements, first row's number, elements that are real).

    A short last block comes as a row of its own: a copy, filled up with zeros; all other rows are views.
    """
    numel = source.numel()
    whole = numel - numel % block
    step = max(1, (tile if source.device.type == "cpu" else DEVICE_TILE) // block) * block
    for at in range(0, whole, step):
        rows = source[at : min(at + step, whole)].view(-1, block)
        yield rows, at // block, rows.numel()
    if whole < numel:
        row = torch.zeros(1, block, device=source.device)
        row[0, : numel - whole] = source[whole:]
        yield row, whole // block, numel - whole


def scaled(tops: Tensor, divisor: float, most: float) -> Tensor:
    """Scales of blocks from their largest magnitudes; 0 where a block is to be sent as zeros."""
    return (tops / divisor).clamp_(max=most).masked_fill_(tops < MIN_PEAK, 0.0)


def reciprocal_safe(scale: Tensor) -> Tensor:
    """Divisors of the blocks: infinity where the scale is 0, since x / inf is 0."""
    return scale.masked_fill(scale == 0.0, math.inf).unsqueeze(1)


def blocks_of(numel: int, block: int) -> int:
    """Number of blocks that numel elements fill, the last perhaps in part."""
    return -(-numel // block)


def largest(values: Tensor) -> float:
    """The largest magnitude; NaN where there is one. One pass, no temporary."""
    if not values.numel():
        return 0.0
    low, high = torch.aminmax(values)
    return max(-low.item(), high.item()) if high == high else math.nan


def writable(payload: Buffer) -> Buffer:
    """Memory that torch may wrap without a warning: a payload from the network (a bytearray) itself, others
    copied."""
    view = memoryview(payload)
    return bytearray(view) if view.readonly else view.cast("B")


def check_flat(tensor: Tensor) -> None:
    """Raise InvariantViolation unless this is a contiguous fp32 vector."""
    flat = tensor.dim() == 1 and tensor.is_contiguous() and tensor.dtype == torch.float32
    invariant(flat, "codecs work on flat fp32 tensors")
