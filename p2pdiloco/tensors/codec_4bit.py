"""Four bits an element, with a bf16 scale for every 64: 0.53 bytes a parameter.

`int4` has evenly spaced levels, `e3m0` powers of two (a sign and three bits of exponent), which fit the long
tails of pseudo-gradients better (Streaming DiLoCo, arXiv 2501.18512). A payload is all scales, then 32 bytes
for every block: byte i has the codes of elements i (lower half) and i + 32. A short last block is filled up.
"""

from __future__ import annotations

import torch
from torch import Tensor

from p2pdiloco.tensors.codec_base import (
    BF16_MAX,
    FP32_MAX,
    Codec,
    blocks_of,
    largest,
    reciprocal_safe,
    scaled,
    tiles,
)
from p2pdiloco.tensors.digest import Buffer

BLOCK = 64
_HALF = BLOCK // 2
_BLOCK_BYTES = 2 + _HALF
DECODE_TILE = 256 * 1024
"""Elements decoded at a time, more than the other codecs': each tile costs a dozen small operations."""
_FP16_SIGN_AND_LOW_EXPONENT = 0x9C00 - 0x10000
"""Bits 15 and 12 to 10 of a half-precision number, as int16."""


class FourBit(Codec):
    """Codec of four bits: codes 0 to 15, each of which stands for a level, times the block's scale."""

    block, sections = BLOCK, (2, _HALF)
    top: float
    """The largest level, which a block's largest magnitude gets."""
    unit = 1.0
    """Power of two of which `_levels` are multiples."""

    def encoded_bytes(self, numel: int) -> int:
        return _BLOCK_BYTES * blocks_of(numel, BLOCK)

    def _encode(self, source: Tensor, peak: float, payload: bytearray) -> None:
        scales, packed = _views(payload, source.numel())
        for rows, block, _ in tiles(source, BLOCK):
            scale = scaled(rows.abs().amax(dim=1), self.top, BF16_MAX / self.top).bfloat16()
            codes = self._codes(rows / reciprocal_safe(scale.float()))
            scales[block : block + len(rows)].copy_(scale)
            codes[:, :_HALF].bitwise_or_(codes[:, _HALF:].bitwise_left_shift_(4))
            packed[block : block + len(rows)].copy_(codes[:, :_HALF])

    def _codes(self, rows: Tensor) -> Tensor:
        """Codes (uint8) of values that are scaled already."""
        raise NotImplementedError

    def _levels(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """Levels that the codes in the lower and in the upper halves of bytes (uint8) stand for, in `unit`.
        They have any type whose conversion to fp32 is exact. Arithmetic on small integers, several times
        faster than a table."""
        raise NotImplementedError

    def _decode(self, payload: Buffer, out: Tensor) -> None:
        scales, packed = _views(payload, out.numel())
        factors = scales.to(out.device, torch.float32).unsqueeze(1)
        fits = largest(factors) * self.unit <= FP32_MAX
        if fits:
            factors.mul_(self.unit)
        for rows, block, real in tiles(out, BLOCK, DECODE_TILE):
            part = slice(block, block + len(rows))
            lower, upper = self._levels(packed[part].to(out.device))
            rows[:, :_HALF].copy_(lower)
            rows[:, _HALF:].copy_(upper)
            if not fits:
                rows.mul_(self.unit)  # powers of two: the bits are the same either way
            rows.mul_(factors[part])
            if real < rows.numel():
                out[-real:] = rows[0, :real]

    def _payload_peak(self, payload: Buffer, numel: int) -> float:
        scales, _ = _views(payload, numel)
        return self.top * largest(scales.float())


class Int4(FourBit):
    """Codec int4: levels from -7 to 7 (codes 1 to 15), evenly spaced, rounded to nearest even.

    Code 0, never written, is -7 too.
    """

    name = "int4"
    top = 7.0

    def _codes(self, rows: Tensor) -> Tensor:
        return rows.round_().clamp_(-7, 7).add_(8).to(torch.uint8)

    def _levels(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        lower, upper = packed.bitwise_and(15).view(torch.int8), packed.bitwise_right_shift(4).view(torch.int8)
        return lower.sub_(8).clamp_(min=-7), upper.sub_(8).clamp_(min=-7)


class E3M0(FourBit):
    """Codec e3m0: levels 0, and 2^-6 to 1 of both signs, powers of two.

    Values are rounded to the nearest level, below 1.5 * 2^-7 to zero.
    """

    name = "e3m0"
    top = 1.0
    unit = 2.0**8

    def _codes(self, rows: Tensor) -> Tensor:
        bits = rows.view(torch.int32)
        # Half a unit of the exponent's last place: what has a mantissa of 1.5 or more goes up.
        exponents = (bits & 0x7FFFFFFF).add_(0x400000).bitwise_right_shift_(23).sub_(127 - 7).clamp_(0, 7)
        return exponents.bitwise_or_(bits.bitwise_right_shift_(31).bitwise_and_(8)).to(torch.uint8)

    def _levels(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        # Bits of fp16: a code's exponent e as the lowest three of fp16's five, where 0 is zero and any other
        # 2^(e - 15). A shift to the right that copies the sign moves the one and leaves the other in place.
        wide = packed.to(torch.int16)
        lower = wide.bitwise_left_shift(12).bitwise_right_shift_(2).bitwise_and_(_FP16_SIGN_AND_LOW_EXPONENT)
        upper = wide.bitwise_left_shift_(8).bitwise_right_shift_(2).bitwise_and_(_FP16_SIGN_AND_LOW_EXPONENT)
        return lower.view(torch.float16), upper.view(torch.float16)


def _views(payload: Buffer, numel: int) -> tuple[Tensor, Tensor]:
    """Views of a payload: scales, bf16 [blocks], and codes, uint8 [blocks, 32]."""
    scales = torch.frombuffer(payload, dtype=torch.bfloat16, count=blocks_of(numel, BLOCK))
    packed = torch.frombuffer(payload, dtype=torch.uint8, offset=2 * len(scales))
    return scales, packed.view(-1, _HALF)
