"""Codecs that send every element: fp32, bf16, and int8 with a scale per block.

None has error feedback. What they leave out of a contribution is at most a hundredth of it: rounding that
differs from one to the next, and is averaged over the learners. The update leaves out as much again, and that
is not fed back either way. So without feedback all that was ever rounded grows by an eighth, with four
learners. Feedback would cost a third more time to encode, and eight bytes of memory a parameter.
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

BLOCK = 1024
"""Elements that share one int8 scale: 0.4 % overhead."""
ENCODE_TILE = 256 * 1024
"""Elements encoded at a time, more than the other codecs': each tile costs a dozen small operations."""
_INT8_MAX_SCALE = FP32_MAX / 128
"""Largest scale of a block: even -128 times this is finite."""


class Fp32(Codec):
    """Codec fp32: the bits themselves, 4 bytes per element."""

    name = "fp32"
    feedback = False
    block, sections = 1, (4,)

    def encoded_bytes(self, numel: int) -> int:
        return 4 * numel

    def _encode(self, source: Tensor, peak: float, payload: bytearray) -> None:
        torch.frombuffer(payload, dtype=torch.float32).copy_(source)

    def _decode(self, payload: Buffer, out: Tensor) -> None:
        out.copy_(torch.frombuffer(payload, dtype=torch.float32))

    def _payload_peak(self, payload: Buffer, numel: int) -> float:
        return largest(torch.frombuffer(payload, dtype=torch.float32))


class Bf16(Codec):
    """Codec bf16: the upper half of the bits, rounded to nearest even; what would become infinite is the
    largest bf16."""

    name = "bf16"
    feedback = False
    block, sections = 1, (2,)

    def encoded_bytes(self, numel: int) -> int:
        return 2 * numel

    def _encode(self, source: Tensor, peak: float, payload: bytearray) -> None:
        if peak > BF16_MAX:
            source = source.clamp(-BF16_MAX, BF16_MAX)
        torch.frombuffer(payload, dtype=torch.bfloat16).copy_(source)

    def _decode(self, payload: Buffer, out: Tensor) -> None:
        out.copy_(torch.frombuffer(payload, dtype=torch.bfloat16))

    def _payload_peak(self, payload: Buffer, numel: int) -> float:
        return largest(torch.frombuffer(payload, dtype=torch.bfloat16))


class Int8(Codec):
    """Codec int8: all fp32 scales (absmax / 127 of each block of 1024), then all int8 values.

    Values are rounded to nearest even; the last block may be short.
    """

    name = "int8"
    feedback = False
    block, sections = BLOCK, (4, BLOCK)

    def encoded_bytes(self, numel: int) -> int:
        return 4 * blocks_of(numel, BLOCK) + numel

    def _encode(self, source: Tensor, peak: float, payload: bytearray) -> None:
        scales, values = _int8_views(payload, source.numel())
        room = torch.empty(min(blocks_of(source.numel(), BLOCK) * BLOCK, ENCODE_TILE), device=source.device)
        for rows, block, real in tiles(source, BLOCK, ENCODE_TILE):
            tops = torch.maximum(rows.amax(dim=1), rows.amin(dim=1).neg_())
            scale = scaled(tops, 127, _INT8_MAX_SCALE)
            scales[block : block + len(scale)].copy_(scale)
            quants = torch.div(
                rows, reciprocal_safe(scale), out=room[: rows.numel()].view(-1, BLOCK)
            ).round_()
            if peak > 127 * _INT8_MAX_SCALE:  # else no quotient is above 127 by more than a rounding
                quants.clamp_(-127, 127)
            quants = quants.view(-1)[:real]
            values[block * BLOCK : block * BLOCK + real].copy_(quants)

    def _decode(self, payload: Buffer, out: Tensor) -> None:
        scales, values = _int8_views(payload, out.numel())
        for rows, block, real in tiles(out, BLOCK):
            rows.view(-1)[:real].copy_(values[block * BLOCK : block * BLOCK + real])
            rows.mul_(scales[block : block + len(rows)].to(out.device).unsqueeze(1))
            if real < rows.numel():
                out[-real:] = rows[0, :real]

    def _payload_peak(self, payload: Buffer, numel: int) -> float:
        scales, _ = _int8_views(payload, numel)
        return 128 * largest(scales)


def _int8_views(payload: Buffer, numel: int) -> tuple[Tensor, Tensor]:
    scales = torch.frombuffer(payload, dtype=torch.float32, count=blocks_of(numel, BLOCK))
    return scales, torch.frombuffer(payload, dtype=torch.int8, offset=4 * len(scales))
