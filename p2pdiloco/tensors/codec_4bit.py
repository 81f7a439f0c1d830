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


class FourBit(Codec):
    """Codes 0 to 15 of a table of levels, times the block's scale."""

    levels: tuple[float, ...]
    """What a code stands for, before the scale."""
    top: float
    """The largest level, which a block's largest magnitude gets."""

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

    def _decode(self, payload: Buffer, out: Tensor) -> None:
        scales, packed = _views(payload, out.numel())
        table = torch.tensor(self.levels, device=out.device)
        for rows, block, real in tiles(out, BLOCK):
            part = slice(block, block + len(rows))
            both = packed[part].to(out.device, torch.int32)
            rows[:, :_HALF] = table[both & 15]
            rows[:, _HALF:] = table[both >> 4]
            rows.mul_(scales[part].to(out.device, torch.float32).unsqueeze(1))
            if real < rows.numel():
                out[-real:] = rows[0, :real]

    def _payload_peak(self, payload: Buffer, numel: int) -> float:
        scales, _ = _views(payload, numel)
        return self.top * largest(scales.float())


class Int4(FourBit):
    """Evenly spaced: -7 to 7 (codes 1 to 15), rounded to nearest even. Code 0, never written, is -7 too."""

    name = "int4"
    levels = tuple(float(max(code - 8, -7)) for code in range(16))
    top = 7.0

    def _codes(self, rows: Tensor) -> Tensor:
        return rows.round_().clamp_(-7, 7).add_(8).to(torch.uint8)


class E3M0(FourBit):
    """Powers of two: 0, and 2^-6 to 1 of both signs; rounded to the nearest, below 1.5 * 2^-7 to zero."""

    name = "e3m0"
    levels = tuple(
        (-1.0 if code & 8 else 1.0) * (2.0 ** ((code & 7) - 7) if code & 7 else 0.0) for code in range(16)
    )
    top = 1.0

    def _codes(self, rows: Tensor) -> Tensor:
        bits = rows.view(torch.int32)
        # Half a unit of the exponent's last place: what has a mantissa of 1.5 or more goes up.
        exponents = (bits & 0x7FFFFFFF).add_(0x400000).bitwise_right_shift_(23).sub_(127 - 7).clamp_(0, 7)
        return exponents.bitwise_or_(bits.bitwise_right_shift_(31).bitwise_and_(8)).to(torch.uint8)


def _views(payload: Buffer, numel: int) -> tuple[Tensor, Tensor]:
    """(scales bf16 [blocks], codes uint8 [blocks, 32])."""
    scales = torch.frombuffer(payload, dtype=torch.bfloat16, count=blocks_of(numel, BLOCK))
    packed = torch.frombuffer(payload, dtype=torch.uint8, offset=2 * len(scales))
    return scales, packed.view(-1, _HALF)
