"""Codec of the largest elements only: 64 of every 4096, with two bits each. 0.026 bytes a parameter.

After SparseLoCo (arXiv 2508.15706): what is left out must go into the next contribution (`Residual`), or it
is lost. An element's two bits are its sign, and whether it is among the chunk's larger 32 or its smaller 32:
each half has one magnitude, its mean. Which half is told by the place in the list, larger ones first.

A payload is, for all chunks: two bf16 magnitudes; 8 bytes of signs; 96 bytes of indices, 12 bits each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.tensors.codec_base import BF16_MAX, Codec, blocks_of, largest, scaled, tiles
from p2pdiloco.tensors.digest import Buffer
from p2pdiloco.tensors.unsound import Unsound

CHUNK = 4096
KEPT = 64
TILE = 128 * CHUNK
"""Elements worked on at a time, more than the other codecs': each tile costs sixteen small operations."""
_HALF = KEPT // 2
_GROUP = 8
_GROUPS = CHUNK // _GROUP
_SIGN_BYTES = KEPT // 8
_INDEX_BYTES = KEPT * 3 // 2
_CHUNK_BYTES = 4 + _SIGN_BYTES + _INDEX_BYTES


class TopK(Codec):
    """The codec topk."""

    name = "topk"
    block, sections = CHUNK, (4, _SIGN_BYTES, _INDEX_BYTES)
    sparse = True

    def encoded_bytes(self, numel: int) -> int:
        return _CHUNK_BYTES * blocks_of(numel, CHUNK)

    def _encode(self, source: Tensor, peak: float, payload: bytearray) -> None:
        magnitudes, signs, indices = _views(payload, source.numel())
        for rows, at, _ in tiles(source, CHUNK, TILE):
            part = slice(at, at + len(rows))
            tops, index = _largest(rows.abs())
            magnitudes[part].copy_(scaled(_means(tops), 1.0, BF16_MAX))
            signs[part].copy_(_pack_bits(rows.gather(1, index) < 0))
            indices[part].copy_(_pack_12(index))

    def _decode(self, payload: Buffer, out: Tensor) -> None:
        magnitudes, signs, indices = _views(payload, out.numel())
        for rows, at, real in tiles(out, CHUNK, TILE):
            part = slice(at, at + len(rows))
            sign = 1.0 - 2.0 * _unpack_bits(signs[part].to(out.device))
            values = magnitudes[part].to(out.device, torch.float32).repeat_interleave(_HALF, dim=1) * sign
            rows.zero_().scatter_(1, _unpack_12(indices[part].to(out.device)), values)
            if real < rows.numel():
                out[-real:] = rows[0, :real]

    def _payload_peak(self, payload: Buffer, numel: int) -> float:
        magnitudes, _, indices = _views(payload, numel)
        for at in range(0, len(indices), 1024):
            index = _unpack_12(indices[at : at + 1024]).sort(dim=1).values
            if bool((index[:, 1:] == index[:, :-1]).any()):
                # Which of two values counts would be up to the machine.
                raise Unsound(Verdict.OUT_OF_RANGE, "a topk payload names an element twice")
        return largest(magnitudes.float())


def _largest(magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    """Find the 64 largest of each row of fp32 [n, 4096], in falling order, and where they are. Of equal ones
    those come first whose place is less, modulo 512 and then as it is.

    Each of them is in one of the 64 groups (of eight elements, 512 apart) whose largest elements are the
    largest. Two small searches are cheaper than one over the whole row.
    """
    groups = magnitudes.view(-1, _GROUP, _GROUPS)
    columns = torch.arange(_GROUPS, device=magnitudes.device)
    _, best = _top(groups.amax(dim=1), columns)
    rows = torch.arange(_GROUP, device=magnitudes.device).view(1, _GROUP, 1)
    candidates = groups.gather(2, best.unsqueeze(1).expand(-1, _GROUP, -1))
    places = best.unsqueeze(1) * _GROUP + rows
    tops, place = _top(candidates.view(-1, _GROUP * KEPT), places.view(-1, _GROUP * KEPT))
    return tops, place % _GROUP * _GROUPS + place // _GROUP


def _top(magnitudes: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Find the 64 largest of each row of fp32 [n, m], in falling order, and their places (int64, below 4096),
    which decide between equal ones: the least first."""
    # The bits of what is not negative are in the order of the values.
    keys = magnitudes.view(torch.int32).to(torch.int64).bitwise_left_shift_(12).add_(CHUNK - 1 - places)
    kept = keys.topk(KEPT, dim=1).values
    tops = kept.bitwise_right_shift(12).to(torch.int32).view(torch.float32)
    return tops, CHUNK - 1 - kept.bitwise_and_(CHUNK - 1)


def _means(tops: Tensor) -> Tensor:
    """Means of either half of each row, fp32 [n, 64] to [n, 2], added in the same order everywhere."""
    # Divided first: a sum of the largest floats would be infinite.
    sums, left = tops.view(-1, 2, _HALF) / _HALF, _HALF
    while left > 1:
        left //= 2
        sums = sums[:, :, :left] + sums[:, :, left:]
    return sums.squeeze(2)


def _pack_bits(flags: Tensor) -> Tensor:
    """Pack flags, bool [n, 64], into bytes, uint8 [n, 8], the first flag in the lowest bit."""
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=flags.device)
    return (flags.view(-1, _SIGN_BYTES, 8) * weights).sum(dim=2, dtype=torch.uint8)


def _unpack_bits(packed: Tensor) -> Tensor:
    """Unpack bytes, uint8 [n, 8], into flags, fp32 [n, 64] of 0 and 1."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(2) >> shifts & 1).view(-1, KEPT).float()


def _pack_12(index: Tensor) -> Tensor:
    """Pack indices, int64 [n, 64] below 4096, into uint8 [n, 96]: two of them in three bytes."""
    index = index.to(torch.int32)
    first, second = index[:, 0::2], index[:, 1::2]
    three = (first & 255, first >> 8 | (second & 15) << 4, second >> 4)
    return torch.stack(three, dim=2).view(-1, _INDEX_BYTES).to(torch.uint8)


def _unpack_12(packed: Tensor) -> Tensor:
    """Unpack uint8 [n, 96] into indices, int64 [n, 64]."""
    low, middle, high = packed.to(torch.int64).view(-1, _HALF, 3).unbind(dim=2)
    return torch.stack((low | (middle & 15) << 8, middle >> 4 | high << 4), dim=2).view(-1, KEPT)


def _views(payload: Buffer, numel: int) -> tuple[Tensor, Tensor, Tensor]:
    """Views of a payload: magnitudes bf16 [chunks, 2], signs uint8 [chunks, 8], indices uint8 [chunks,
    96]."""
    chunks = blocks_of(numel, CHUNK)
    magnitudes = torch.frombuffer(payload, dtype=torch.bfloat16, count=2 * chunks).view(-1, 2)
    signs = torch.frombuffer(payload, dtype=torch.uint8, offset=4 * chunks, count=_SIGN_BYTES * chunks)
    indices = torch.frombuffer(payload, dtype=torch.uint8, offset=(4 + _SIGN_BYTES) * chunks)
    return magnitudes, signs.view(-1, _SIGN_BYTES), indices.view(-1, _INDEX_BYTES)
