"""Payloads that may lie elsewhere than in memory, and reading them tile by tile."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.hashing import Hash, content_digest
from p2pdiloco.tensors.codec_base import Codec
from p2pdiloco.tensors.digest import Buffer
from p2pdiloco.tensors.merging.merge import MAX_MAGNITUDE
from p2pdiloco.tensors.unsound import Unsound

READ_TILE = 1 << 20
"""Elements of a stored payload in memory at one time; a multiple of every codec's block."""
_READ_BYTES = 1 << 20


class Stored(Protocol):
    """Payload that is not in memory (`adapters.disk.spool`)."""

    @property
    def nbytes(self) -> int:
        """Size of the payload."""

    def read(self, offset: int, into: memoryview) -> None:
        """Fill `into` from this offset on, from any thread. Raises: StorageError."""


Payload = Buffer | Stored


def size_of(payload: Payload) -> int:
    """Bytes of a payload, wherever it is."""
    return memoryview(payload).nbytes if isinstance(payload, Buffer) else payload.nbytes


def memory_bytes(payload: Payload) -> int:
    """Bytes of the payload that are in memory."""
    return memoryview(payload).nbytes if isinstance(payload, Buffer) else 0


def digest_of(payload: Payload) -> bytes:
    """Digest of a payload. Raises: StorageError."""
    if isinstance(payload, Buffer):
        return content_digest(payload)
    found, room = Hash(), memoryview(bytearray(_READ_BYTES))
    for start in range(0, payload.nbytes, _READ_BYTES):
        part = room[: payload.nbytes - start]
        payload.read(start, part)
        found.update(part)
    return found.digest()


def parts_of(chosen: Codec, payload: Payload, numel: int) -> Iterator[tuple[Buffer, int, int]]:
    """Parts of a payload of numel elements: (payload of elements start to stop, start, stop).

    A payload in memory is one part. Another one comes in tiles, each valid until the next.

    Raises:
        Unsound: "wrong-size". StorageError.
    """
    if isinstance(payload, Buffer):
        yield payload, 0, numel
        return
    size = chosen.encoded_bytes(numel)
    if payload.nbytes != size:
        raise Unsound(Verdict.WRONG_SIZE, f"{payload.nbytes} bytes of {chosen.name}, expected {size}")
    room = memoryview(bytearray(chosen.encoded_bytes(min(numel, READ_TILE))))
    for start in range(0, numel, READ_TILE):
        stop = min(start + READ_TILE, numel)
        have = 0
        for offset, length in chosen.spans(start, stop, numel):
            payload.read(offset, room[have : have + length])
            have += length
        yield room[:have], start, stop


def check_magnitude(chosen: Codec, payload: Buffer, numel: int, limit: float = MAX_MAGNITUDE) -> None:
    """Judge an encoding of `numel` values by its largest.

    Raises:
        Unsound: "out-of-range", and as `Codec.peak`.
    """
    peak = chosen.peak(payload, numel)
    if peak > 1.01 * limit:  # int8's bound is looser than its values, 128 for 127 parts
        raise Unsound(Verdict.OUT_OF_RANGE, f"a magnitude of {peak:.3g}")
