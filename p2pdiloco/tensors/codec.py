"""How a flat fp32 fragment becomes bytes, and back. Little-endian, no header: sizes follow from numel.

Decoding is the same on every machine, bit for bit: it is a copy (fp32), a shift (bf16), or one fp32
multiplication per element (int8). Encoding need not be: only its bytes are shared. A payload's values are
judged before they are decoded, from `peak`, so that nothing non-finite ever reaches a merge.
"""

from __future__ import annotations

import math
from types import MappingProxyType

import torch
from torch import Tensor

from p2pdiloco.errors import RemoteError, invariant
from p2pdiloco.tensors.digest import Buffer

BLOCK = 1024
"""Elements that share one int8 scale: 0.4 % overhead."""
_TILE = 64 * BLOCK
"""Elements worked on at a time, so that the passes over a tile find it in cache."""
_FP32_MAX = torch.finfo(torch.float32).max
_BF16_MAX = torch.finfo(torch.bfloat16).max
_INT8_MAX_SCALE = _FP32_MAX / 128
"""Even -128 times this is finite."""
_INT8_MIN_PEAK = 2.0**-100
"""A block whose magnitudes are all below this is sent as zeros: products stay clear of denormals."""


class Codec:
    """One encoding. Stateless, so that any thread may use the one instance in `CODECS`."""

    name: str

    def encoded_bytes(self, numel: int) -> int:
        """Exact payload size of numel elements."""
        raise NotImplementedError

    def encode(self, source: Tensor, out: bytearray | None = None) -> bytearray:
        """The payload of `source` (fp32 [numel], contiguous), in `out` (of exactly the right size) or new.

        Raises:
            ValueError: source holds a non-finite value.
        """
        _check_flat(source)
        peak = _peak(source)
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
            RemoteError: "wrong-size", "non-finite"; `out` is then untouched.
        """
        _check_flat(out)
        self.peak(payload, out.numel())
        if out.numel():
            self._decode(_writable(payload), out)

    def peak(self, payload: Buffer, numel: int) -> float:
        """An upper bound of the magnitudes in a payload of numel elements, without decoding it.

        Raises:
            RemoteError: "wrong-size", "non-finite" (also where decoding would overflow).
        """
        size, expected = memoryview(payload).nbytes, self.encoded_bytes(numel)
        if size != expected:
            raise RemoteError("wrong-size", f"{size} bytes of {self.name}, expected {expected}")
        peak = self._payload_peak(_writable(payload), numel) if numel else 0.0
        if not peak <= _FP32_MAX:
            raise RemoteError("non-finite", f"a value of {peak} in a {self.name} payload")
        return peak

    def _encode(self, source: Tensor, peak: float, payload: bytearray) -> None:
        raise NotImplementedError

    def _decode(self, payload: Buffer, out: Tensor) -> None:
        raise NotImplementedError

    def _payload_peak(self, payload: Buffer, numel: int) -> float:
        raise NotImplementedError


class Fp32(Codec):
    """The bits themselves, 4 bytes per element."""

    name = "fp32"

    def encoded_bytes(self, numel: int) -> int:
        return 4 * numel

    def _encode(self, source: Tensor, peak: float, payload: bytearray) -> None:
        torch.frombuffer(payload, dtype=torch.float32).copy_(source)

    def _decode(self, payload: Buffer, out: Tensor) -> None:
        out.copy_(torch.frombuffer(payload, dtype=torch.float32))

    def _payload_peak(self, payload: Buffer, numel: int) -> float:
        return _peak(torch.frombuffer(payload, dtype=torch.float32))


class Bf16(Codec):
    """The upper half of the bits, rounded to nearest even; what would become infinite is the largest bf16."""

    name = "bf16"

    def encoded_bytes(self, numel: int) -> int:
        return 2 * numel

    def _encode(self, source: Tensor, peak: float, payload: bytearray) -> None:
        if peak > _BF16_MAX:
            source = source.clamp(-_BF16_MAX, _BF16_MAX)
        torch.frombuffer(payload, dtype=torch.bfloat16).copy_(source)

    def _decode(self, payload: Buffer, out: Tensor) -> None:
        out.copy_(torch.frombuffer(payload, dtype=torch.bfloat16))

    def _payload_peak(self, payload: Buffer, numel: int) -> float:
        return _peak(torch.frombuffer(payload, dtype=torch.bfloat16))


class Int8(Codec):
    """Blockwise absmax: all fp32 scales (absmax / 127 of each block of 1024), then all int8 values.

    Values are rounded to nearest even; the last block may be short.
    """

    name = "int8"

    def encoded_bytes(self, numel: int) -> int:
        return 4 * _blocks(numel) + numel

    def _encode(self, source: Tensor, peak: float, payload: bytearray) -> None:
        numel = source.numel()
        scales, values = _int8_views(payload, numel)
        scratch = torch.empty(min(numel, _TILE), dtype=torch.float32)
        for start, stop, block in _tiles(numel):
            tile, work, width = source[start:stop], scratch[: stop - start], min(BLOCK, stop - start)
            torch.abs(tile, out=work)
            tops = work.view(-1, width).amax(dim=1)
            scale = (tops / 127).clamp_(max=_INT8_MAX_SCALE).masked_fill_(tops < _INT8_MIN_PEAK, 0.0)
            scales[block : block + len(scale)] = scale
            divisor = scale.masked_fill(scale == 0.0, math.inf)  # x / inf is 0
            torch.div(tile.view(-1, width), divisor.unsqueeze(1), out=work.view(-1, width))
            values[start:stop] = work.round_().clamp_(-127, 127)

    def _decode(self, payload: Buffer, out: Tensor) -> None:
        scales, values = _int8_views(payload, out.numel())
        for start, stop, block in _tiles(out.numel()):
            tile = out[start:stop]
            tile.copy_(values[start:stop])
            rows = tile.view(-1, min(BLOCK, stop - start))
            rows.mul_(scales[block : block + len(rows)].unsqueeze(1))

    def _payload_peak(self, payload: Buffer, numel: int) -> float:
        scales, _ = _int8_views(payload, numel)
        return 128 * _peak(scales)


CODECS = MappingProxyType({made.name: made for made in (Fp32(), Bf16(), Int8())})
"""Every codec that a manifest may name."""


def codec(name: str) -> Codec:
    """The codec of that name; names come from a checked manifest."""
    invariant(name in CODECS, f"no codec is called {name!r}")
    return CODECS[name]


def _blocks(numel: int) -> int:
    return -(-numel // BLOCK)


def _tiles(numel: int) -> list[tuple[int, int, int]]:
    """(start, stop, first block) of runs of whole blocks; a short last block is a run of its own."""
    whole = numel - numel % BLOCK
    tiles = [(at, min(at + _TILE, whole), at // BLOCK) for at in range(0, whole, _TILE)]
    return tiles if whole == numel else [*tiles, (whole, numel, whole // BLOCK)]


def _int8_views(payload: Buffer, numel: int) -> tuple[Tensor, Tensor]:
    scales = torch.frombuffer(payload, dtype=torch.float32, count=_blocks(numel))
    return scales, torch.frombuffer(payload, dtype=torch.int8, offset=4 * len(scales))


def _peak(values: Tensor) -> float:
    """The largest magnitude; NaN where there is one. One pass, no temporary."""
    if not values.numel():
        return 0.0
    low, high = torch.aminmax(values)
    return max(-low.item(), high.item()) if high == high else math.nan


def _writable(payload: Buffer) -> Buffer:
    """torch warns of read-only memory; payloads from the network are bytearrays, others are copied."""
    view = memoryview(payload)
    return bytearray(view) if view.readonly else view.cast("B")


def _check_flat(tensor: Tensor) -> None:
    flat = tensor.dim() == 1 and tensor.is_contiguous() and tensor.dtype == torch.float32
    invariant(flat and tensor.device.type == "cpu", "codecs work on flat fp32 tensors in host memory")
