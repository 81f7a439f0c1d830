"""File of what a learner process appraises, as its daemon gives it: parameters and two contributions.

    start    fp32 [numel]: the fragment's parameters that the version was made from
    theirs, ours   contributions as their codec encodes them

Rules: docs/protocol/loss-audits.md, section 2.
"""

from __future__ import annotations

from pathlib import Path

import torch
from msgspec import Struct
from torch import Tensor

from p2pdiloco.errors import StorageError
from p2pdiloco.tensors.codec import codec
from p2pdiloco.tensors.digest import Buffer, bytes_of

FP32_BYTES = 4


class Appraisable(Struct, frozen=True):
    """Content of the file, decoded."""

    start: Tensor
    theirs: Tensor
    ours: Tensor


def start_of(result: Tensor, update: Buffer, codec_name: str, rate: float) -> Tensor:
    """Go back from a version without look-ahead (`Vault.result`), which is changed, by its update: an outer
    step of that rate."""
    delta = torch.empty_like(result)
    codec(codec_name).decode(update, delta)
    return result.add_(delta, alpha=rate)


def file_bytes(codec_name: str, numel: int) -> int:
    """Return the size of the file."""
    return FP32_BYTES * numel + 2 * codec(codec_name).encoded_bytes(numel)


def begin(path: Path, start: Tensor) -> None:
    """Begin the file. Raises: StorageError."""
    _write(path, "wb", bytes_of(start))


def add(path: Path, theirs: Buffer, ours: Buffer) -> None:
    """Write the rest of the file. Raises: StorageError."""
    _write(path, "ab", theirs, ours)


def read(path: Path, codec_name: str, numel: int) -> Appraisable:
    """Read the file. Raises: StorageError (it is not there, or not whole)."""
    try:
        content = bytearray(path.read_bytes())
    except OSError as error:
        raise StorageError(f"cannot read {path.name}: {error.strerror}") from error
    if len(content) != file_bytes(codec_name, numel):
        raise StorageError(f"{path.name} is not whole")
    chosen = codec(codec_name)
    first, size = FP32_BYTES * numel, chosen.encoded_bytes(numel)
    start = torch.frombuffer(content, dtype=torch.float32, count=numel)
    theirs, ours = torch.empty(numel), torch.empty(numel)
    rest = memoryview(content)[first:]  # no copies (`tensors.sizes.appraisal_bytes`)
    chosen.decode(rest[:size], theirs)
    chosen.decode(rest[size:], ours)
    return Appraisable(start, theirs, ours)


def _write(path: Path, mode: str, *parts: Buffer) -> None:
    try:
        with path.open(mode) as file:
            for part in parts:
                file.write(part)
    except OSError as error:
        raise StorageError(f"cannot write {path.name}: {error.strerror}") from error
