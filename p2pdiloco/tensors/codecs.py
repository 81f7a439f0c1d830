"""Codecs that a manifest may name, and arithmetic that has the same bits on every machine.

A codec makes bytes of a flat fp32 fragment, and a fragment again. `CODECS` has fp32, bf16, int8, int4, e3m0
and topk. `norm`, `add_scaled` and `scale` are portable: whatever a machine's vector instructions and threads,
they give the same bits. IEEE 754 fixes what one operation makes of one element, but not the order of a
reduction's additions, nor whether a multiplication is fused with the addition after it. So there are
elementwise operations only, each of which writes what it made to memory. Tiles stay in a cache from one
operation to the next. Digests are over raw little-endian bytes: equal digests mean equal bits, on any
machine.
"""

from __future__ import annotations

import ctypes
import math
import struct
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.errors import RemoteError, invariant
from p2pdiloco.hashing import content_digest

Buffer = bytes | bytearray | memoryview


class Unsound(RemoteError):
    """Error: a payload that a peer sent is not what it should be. Its sender hears the verdict."""

    def __init__(self, verdict: Verdict, detail: str = "") -> None:
        super().__init__(verdict.value, detail)
        self.verdict = verdict


class UnusableInputs(Unsound):
    """Error of a merge: inputs in which a fault was found, all of them, so that the others can be merged."""

    def __init__(self, faults: Mapping[int, Unsound]) -> None:
        """`faults`: by index among the inputs and, after these, the partials. At least one."""
        first = next(iter(faults.values()))
        super().__init__(first.verdict, f"{len(faults)} unusable, the first: {first}")
        self.faults = faults


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

    Payloads are little-endian, without a header: sizes follow from numel. Both ways are the same on every
    CPU, bit for bit; decoding is so on accelerators, too, while what they encode is compared with nothing. So
    a codec copies, compares, finds largest values, and calculates element by element, but makes no sum in an
    order that is left open. A payload's values are judged before they are decoded, from `peak`, so that
    nothing non-finite ever reaches a merge.

    Tensors may be on any device; payloads are host memory. A new encoding is one subclass with `_encode`,
    `_decode`, `name`, `block`, `sections` and `kinds`, and one entry in `CODECS`.
    """

    name: str
    block: int
    """Elements that are encoded together."""
    sections: tuple[int, ...]
    """Bytes of every block in each section; a payload is its sections, one after the other."""
    kinds: tuple[torch.dtype, ...]
    """Type of the numbers in each section."""
    top = 1.0
    """Largest magnitude of an element, as a multiple of what the first section says of its block."""
    feedback = True
    """True: error feedback adds what an encoding leaves out to the next one (`Residual`)."""
    sparse = False
    """True: most elements of a payload are zero, so what is left out matters, whoever encodes."""

    def encoded_bytes(self, numel: int) -> int:
        """Exact payload size of numel elements."""
        return sum(self.sections) * blocks_of(numel, self.block)

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
        return self.top * largest(self._views(payload, numel)[0])

    def _views(self, payload: Buffer, numel: int) -> list[Tensor]:
        """Numbers of each section, flat, in the payload's memory."""
        spans = zip(self.kinds, self.spans(0, numel, numel), strict=True)
        return [
            torch.frombuffer(payload, dtype=kind, offset=offset, count=size // kind.itemsize)
            for kind, (offset, size) in spans
        ]


def tiles(
    source: Tensor, block: int, tile: int = TILE, write: bool = False
) -> Iterator[tuple[Tensor, int, int]]:
    """Cut a flat fp32 tensor into (rows of `block` elements, first row's number, elements that are real).

    A short last block comes as a row of its own: a copy, filled up with zeros; all other rows are views.
    `write`: what is written to the copy goes into the tensor afterwards.
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
        if write:
            source[whole:] = row[0, : numel - whole]


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


# --- codecs that send every element: fp32, bf16, and int8 with a scale per block ---------------------
#
# None has error feedback. What they leave out of a contribution is at most a hundredth of it: rounding that
# differs from one to the next, and is averaged over the learners. The update leaves out as much again, and
# that is not fed back either way. So without feedback all that was ever rounded grows by an eighth, with four
# learners. Feedback would cost a third more time to encode, and eight bytes of memory a parameter.

INT8_BLOCK = 1024
"""Elements that share one int8 scale: 0.4 % overhead."""
INT8_TILE = 256 * 1024
"""Elements encoded at a time, more than the other codecs': each tile costs a dozen small operations."""
_INT8_MAX_SCALE = FP32_MAX / 128
"""Largest scale of a block: even -128 times this is finite."""


class Floats(Codec):
    """Codec of floats: fp32, the bits themselves; bf16, the upper half of the bits, rounded to nearest even,
    where what would become infinite is the largest bf16."""

    feedback = False
    block = 1

    def __init__(self, name: str, kind: torch.dtype) -> None:
        self.name, self.sections, self.kinds = name, (kind.itemsize,), (kind,)

    def _encode(self, source: Tensor, peak: float, payload: bytearray) -> None:
        (values,), most = self._views(payload, source.numel()), torch.finfo(self.kinds[0]).max
        values.copy_(source.clamp(-most, most) if peak > most else source)

    def _decode(self, payload: Buffer, out: Tensor) -> None:
        out.copy_(self._views(payload, out.numel())[0])


class Int8(Codec):
    """Codec int8: all fp32 scales (absmax / 127 of each block of 1024), then all int8 values.

    Values are rounded to nearest even; the last block may be short.
    """

    name = "int8"
    feedback = False
    block, sections, kinds = INT8_BLOCK, (4, INT8_BLOCK), (torch.float32, torch.int8)
    top = 128.0

    def encoded_bytes(self, numel: int) -> int:
        return 4 * blocks_of(numel, INT8_BLOCK) + numel

    def _encode(self, source: Tensor, peak: float, payload: bytearray) -> None:
        scales, values = self._views(payload, source.numel())
        room = torch.empty(
            min(blocks_of(source.numel(), INT8_BLOCK) * INT8_BLOCK, INT8_TILE), device=source.device
        )
        for rows, block, real in tiles(source, INT8_BLOCK, INT8_TILE):
            tops = torch.maximum(rows.amax(dim=1), rows.amin(dim=1).neg_())
            scale = scaled(tops, 127, _INT8_MAX_SCALE)
            scales[block : block + len(scale)].copy_(scale)
            quants = torch.div(
                rows, reciprocal_safe(scale), out=room[: rows.numel()].view(-1, INT8_BLOCK)
            ).round_()
            if peak > 127 * _INT8_MAX_SCALE:  # else no quotient is above 127 by more than a rounding
                quants.clamp_(-127, 127)
            quants = quants.view(-1)[:real]
            values[block * INT8_BLOCK : block * INT8_BLOCK + real].copy_(quants)

    def _decode(self, payload: Buffer, out: Tensor) -> None:
        scales, values = self._views(payload, out.numel())
        for rows, block, real in tiles(out, INT8_BLOCK, write=True):
            rows.view(-1)[:real].copy_(values[block * INT8_BLOCK : block * INT8_BLOCK + real])
            rows.mul_(scales[block : block + len(rows)].to(out.device).unsqueeze(1))


# --- four bits an element ----------------------------------------------------------------------------

FOUR_BIT_BLOCK = 64
_HALF = FOUR_BIT_BLOCK // 2
FOUR_BIT_TILE = 256 * 1024
"""Elements decoded at a time, more than the other codecs': each tile costs a dozen small operations."""
_FP16_SIGN_AND_LOW_EXPONENT = 0x9C00 - 0x10000
"""Bits 15 and 12 to 10 of a half-precision number, as int16."""


class FourBit(Codec):
    """Codec of four bits: codes 0 to 15, each of which stands for a level, times the block's scale.

    A bf16 scale for every 64 elements: 0.53 bytes a parameter. `int4` has evenly spaced levels, `e3m0` powers
    of two (a sign and three bits of exponent), which fit the long tails of pseudo-gradients better (Streaming
    DiLoCo, arXiv 2501.18512). A payload is all scales, then 32 bytes for every block: byte i has the codes of
    elements i (lower half) and i + 32. A short last block is filled up.
    """

    block, sections, kinds = FOUR_BIT_BLOCK, (2, _HALF), (torch.bfloat16, torch.uint8)
    unit = 1.0
    """Power of two of which `_levels` are multiples."""

    def _encode(self, source: Tensor, peak: float, payload: bytearray) -> None:
        scales, packed = self._views(payload, source.numel())
        packed = packed.view(-1, _HALF)
        for rows, block, _ in tiles(source, FOUR_BIT_BLOCK):
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
        scales, packed = self._views(payload, out.numel())
        packed = packed.view(-1, _HALF)
        factors = scales.to(out.device, torch.float32).unsqueeze(1)
        fits = largest(factors) * self.unit <= FP32_MAX
        if fits:
            factors.mul_(self.unit)
        for rows, block, _ in tiles(out, FOUR_BIT_BLOCK, FOUR_BIT_TILE, write=True):
            part = slice(block, block + len(rows))
            lower, upper = self._levels(packed[part].to(out.device))
            rows[:, :_HALF].copy_(lower)
            rows[:, _HALF:].copy_(upper)
            if not fits:
                rows.mul_(self.unit)  # powers of two: the bits are the same either way
            rows.mul_(factors[part])


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


# --- the largest elements only -----------------------------------------------------------------------

TOPK_CHUNK = 4096
TOPK_KEPT = 64
TOPK_TILE = 128 * TOPK_CHUNK
"""Elements worked on at a time, more than the other codecs': each tile costs sixteen small operations."""
_TOPK_HALF = TOPK_KEPT // 2
_GROUP = 8
_GROUPS = TOPK_CHUNK // _GROUP
_SIGN_BYTES = TOPK_KEPT // 8
_INDEX_BYTES = TOPK_KEPT * 3 // 2


class TopK(Codec):
    """Codec topk: 64 of every 4096 elements, the largest, with two bits each. 0.026 bytes a parameter.

    After SparseLoCo (arXiv 2508.15706): what is left out must go into the next contribution (`Residual`), or
    it is lost. An element's two bits are its sign, and whether it is among the chunk's larger 32 or its
    smaller 32: each half has one magnitude, its mean. Which half is told by the place in the list, larger
    ones first.

    A payload is, for all chunks: two bf16 magnitudes; 8 bytes of signs; 96 bytes of indices, 12 bits each.
    """

    name = "topk"
    block, sections = TOPK_CHUNK, (4, _SIGN_BYTES, _INDEX_BYTES)
    kinds = (torch.bfloat16, torch.uint8, torch.uint8)
    sparse = True

    def _encode(self, source: Tensor, peak: float, payload: bytearray) -> None:
        magnitudes, signs, indices = self._chunks(payload, source.numel())
        for rows, at, _ in tiles(source, TOPK_CHUNK, TOPK_TILE):
            part = slice(at, at + len(rows))
            tops, index = _largest(rows.abs())
            magnitudes[part].copy_(scaled(_half_means(tops), 1.0, BF16_MAX))
            signs[part].copy_(_pack_bits(rows.gather(1, index) < 0))
            indices[part].copy_(_pack_12(index))

    def _decode(self, payload: Buffer, out: Tensor) -> None:
        magnitudes, signs, indices = self._chunks(payload, out.numel())
        for rows, at, _ in tiles(out, TOPK_CHUNK, TOPK_TILE, write=True):
            part = slice(at, at + len(rows))
            sign = 1.0 - 2.0 * _unpack_bits(signs[part].to(out.device))
            values = (
                magnitudes[part].to(out.device, torch.float32).repeat_interleave(_TOPK_HALF, dim=1) * sign
            )
            rows.zero_().scatter_(1, _unpack_12(indices[part].to(out.device)), values)

    def _payload_peak(self, payload: Buffer, numel: int) -> float:
        _, _, indices = self._chunks(payload, numel)
        for at in range(0, len(indices), 1024):
            index = _unpack_12(indices[at : at + 1024]).sort(dim=1).values
            if bool((index[:, 1:] == index[:, :-1]).any()):
                # Which of two values counts would be up to the machine.
                raise Unsound(Verdict.OUT_OF_RANGE, "a topk payload names an element twice")
        return super()._payload_peak(payload, numel)

    def _chunks(self, payload: Buffer, numel: int) -> list[Tensor]:
        """Numbers of each section, a row for every chunk."""
        return [part.view(blocks_of(numel, TOPK_CHUNK), -1) for part in self._views(payload, numel)]


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
    tops, place = _top(candidates.view(-1, _GROUP * TOPK_KEPT), places.view(-1, _GROUP * TOPK_KEPT))
    return tops, place % _GROUP * _GROUPS + place // _GROUP


def _top(magnitudes: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
    """Find the 64 largest of each row of fp32 [n, m], in falling order, and their places (int64, below 4096),
    which decide between equal ones: the least first."""
    # The bits of what is not negative are in the order of the values.
    keys = magnitudes.view(torch.int32).to(torch.int64).bitwise_left_shift_(12).add_(TOPK_CHUNK - 1 - places)
    kept = keys.topk(TOPK_KEPT, dim=1).values
    tops = kept.bitwise_right_shift(12).to(torch.int32).view(torch.float32)
    return tops, TOPK_CHUNK - 1 - kept.bitwise_and_(TOPK_CHUNK - 1)


def _half_means(tops: Tensor) -> Tensor:
    """Means of either half of each row, fp32 [n, 64] to [n, 2], added in the same order everywhere."""
    # Divided first: a sum of the largest floats would be infinite.
    sums, left = tops.view(-1, 2, _TOPK_HALF) / _TOPK_HALF, _TOPK_HALF
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
    return (packed.unsqueeze(2) >> shifts & 1).view(-1, TOPK_KEPT).float()


def _pack_12(index: Tensor) -> Tensor:
    """Pack indices, int64 [n, 64] below 4096, into uint8 [n, 96]: two of them in three bytes."""
    index = index.to(torch.int32)
    first, second = index[:, 0::2], index[:, 1::2]
    three = (first & 255, first >> 8 | (second & 15) << 4, second >> 4)
    return torch.stack(three, dim=2).view(-1, _INDEX_BYTES).to(torch.uint8)


def _unpack_12(packed: Tensor) -> Tensor:
    """Unpack uint8 [n, 96] into indices, int64 [n, 64]."""
    low, middle, high = packed.to(torch.int64).view(-1, _TOPK_HALF, 3).unbind(dim=2)
    return torch.stack((low | (middle & 15) << 8, middle >> 4 | high << 4), dim=2).view(-1, TOPK_KEPT)


_ALL = Floats("fp32", torch.float32), Floats("bf16", torch.bfloat16), Int8(), Int4(), E3M0(), TopK()
CODECS = MappingProxyType({made.name: made for made in _ALL})
"""Codecs by name."""


def codec(name: str) -> Codec:
    """Find the codec of that name; names come from a checked manifest."""
    invariant(name in CODECS, f"no codec is called {name!r}")
    return CODECS[name]


# --- portable arithmetic -----------------------------------------------------------------------------

PORTABLE_TILE = 1 << 17
"""Elements scaled and added at a time: scratch of half a MiB."""
_WIDTH = 1 << 16
"""Number of sums of squares at most: with as much scratch, half a MiB in each thread."""
_FEW = 64
"""Number of sums, or of elements, that Python adds exactly. A power of two, as _WIDTH is."""
_FAINT = 2.0**-100
"""Beginning of every sum of squares. Beside it squares below fp32's normal numbers are nothing, whether a
processor keeps them or makes them zero."""
_LEAST = 2.0**-60
"""Sum of all squares, below which too much may have been lost in fp32."""


class _Room(threading.local):
    """Scratch of each thread, for `norm`."""

    def __init__(self) -> None:
        self.sums, self.squares = torch.empty(_WIDTH), torch.empty(_WIDTH)
        # Cutting a tensor costs as much as adding thousands of elements.
        self.halves = {
            width: (self.sums[: width // 2], self.sums[width // 2 : width], self.sums[:width])
            for width in (_FEW << i for i in range((_WIDTH // _FEW).bit_length()))
        }


_room = _Room()


def norm(values: Tensor) -> float:
    """Euclidean length of a flat fp32 tensor, within a few roundings of fp32, also where squares leave its
    range.

    With a width of 2^16, or the largest power of two that is no more than numel: sum i is of the squares of
    elements i, i + width, and so on, in this order. Then the latter half of the sums is added to the former
    until 64 are left, which are added exactly. Squares that are too large or too small for fp32 are made and
    added in fp64 instead, one after the other.
    """
    numel = len(values)
    if numel < _FEW:
        return whole_norm(values.tolist())
    width = min(1 << numel.bit_length() - 1, _WIDTH)
    sums, room = _room.halves[width][2], _room.squares[:width]
    first, *others = torch.split(values, width)
    torch.mul(first, first, out=sums).add_(_FAINT)
    for part in others:
        if len(part) < width:
            sums, room = sums[: len(part)], room[: len(part)]
        sums.add_(torch.mul(part, part, out=room))
    while width > _FEW:
        former, latter, _ = _room.halves[width]
        former.add_(latter)
        width //= 2
    total = math.fsum(_room.halves[_FEW][2].tolist())
    return math.sqrt(total) if _LEAST < total < math.inf else _wide_norm(values)


def _wide_norm(values: Tensor) -> float:
    """By squares in fp64, where squares of fp32 are exact."""
    low, high = torch.aminmax(values)
    if low == high == 0:  # as most pieces of a sparse contribution
        return 0.0
    width = min(1 << len(values).bit_length() - 1, _WIDTH // 4)
    sums = torch.zeros(width, dtype=torch.float64)
    for part in torch.split(values, width):
        sums[: len(part)].add_(part.double().square_())
    while width > _FEW:
        width //= 2
        sums = sums[:width].add_(sums[width:])
    return math.sqrt(math.fsum(sums.tolist()))


def whole_norm(lengths: Iterable[float]) -> float:
    """Length of what has parts of these lengths: exact but for two roundings."""
    return math.sqrt(math.fsum(length * length for length in lengths))


def scratch(numel: int) -> Tensor:
    """Make room for `add_scaled` of up to so many elements."""
    return torch.empty(min(numel, PORTABLE_TILE))


def add_scaled(total: Tensor, values: Tensor, factor: float, work: Tensor) -> None:
    """Add factor times values to total, all fp32 [numel], by way of `work` (`scratch`): each product is
    rounded, then each sum. The factor is rounded to fp32 before use."""
    factor = _rounded(factor)
    for part, sums in zip(torch.split(values, PORTABLE_TILE), torch.split(total, PORTABLE_TILE), strict=True):
        sums.add_(torch.mul(part, factor, out=work[: len(part)]))


def scale(values: Tensor, factor: float, out: Tensor) -> None:
    """Write factor times values into `out`, which may be `values`: fp32 [numel]. The factor is rounded to
    fp32 before use."""
    torch.mul(values, _rounded(factor), out=out)


def _rounded(factor: float) -> float:
    """A tensor would round to fp32 by itself."""
    return ctypes.c_float(factor).value


# --- digests -----------------------------------------------------------------------------------------


def bytes_of(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, shared, not copied. Little-endian machines only."""
    invariant(sys.byteorder == "little", "the wire and digests are little-endian, this machine is not")
    invariant(tensor.is_contiguous() and tensor.device.type == "cpu", "only host memory has bytes to show")
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


def state_digest(number: int, theta: Tensor, momentum: Tensor) -> bytes:
    """Digest of the version number (8 bytes), the fragment's Theta and its outer momentum (fp32)."""
    return content_digest(struct.pack("<Q", number), bytes_of(theta), bytes_of(momentum))
