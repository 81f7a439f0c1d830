"""File formats of a run's store, checkpoint and update. Every byte that matters is under a checksum.

Checkpoint: a safetensors file with the fp32 vectors `theta` and `momentum`. Its metadata holds the signed
version and the watermarks (base64 of their msgpack) and the checksum. It is read with the safetensors
library, but written here: the format is a length, a JSON header, and data. The library builds the whole file
in memory with the interpreter lock held (measured: 0.4 s for 240 MB, in which the daemon would be mute).

Update: magic, length of the signed version (4 bytes, little endian), its msgpack, the SHA-256 of all that,
and the payload. The payload's digest is in the version, and was compared before it came here.

Nothing is unpickled; `CorruptFile` is the only thing that decoding raises.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from typing import Any, Literal

import msgspec
import numpy as np
import safetensors
from msgspec import Struct
from numpy.typing import NDArray

from p2pdiloco.core.api.types import Watermark
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.errors import invariant
from p2pdiloco.hashing import content_digest
from p2pdiloco.ports import Buffer

UPDATE_MAGIC = b"p2pdiloco-update-2\n"
CHECKPOINT_FORMAT = "p2pdiloco-checkpoint-1"
_SHA256_BYTES = 32
_encoder = msgspec.msgpack.Encoder()
_version_decoder = msgspec.msgpack.Decoder(SignedVersion)
_watermarks_decoder = msgspec.msgpack.Decoder(tuple[Watermark, ...])


class CorruptFile(Exception):
    """Error: the bytes are not what was saved."""


class SavedFragment(Struct, frozen=True):
    """Fragment as it was saved. Theta and outer momentum are fp32 vectors of shape (numel,), read-only."""

    version: SignedVersion
    watermarks: tuple[Watermark, ...]
    theta: NDArray[np.float32]
    momentum: NDArray[np.float32]


class _Metadata(Struct, frozen=True):
    format: Literal["p2pdiloco-checkpoint-1"]
    version: str
    watermarks: str
    sha256: str


class _Header(Struct, frozen=True):
    metadata: _Metadata = msgspec.field(name="__metadata__")


def _checksum(version: bytes, watermarks: bytes, theta: Buffer, momentum: Buffer) -> str:
    digest = hashlib.sha256(CHECKPOINT_FORMAT.encode())
    for part in (version, watermarks, memoryview(theta).cast("B"), memoryview(momentum).cast("B")):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


def encode_checkpoint(
    version: SignedVersion, watermarks: tuple[Watermark, ...], theta: Buffer, momentum: Buffer
) -> list[Buffer]:
    """Encode a checkpoint as chunks of a file; theta and momentum (fp32, equal sizes) are not copied."""
    theta, momentum = memoryview(theta).cast("B"), memoryview(momentum).cast("B")
    size = theta.nbytes
    invariant(size == momentum.nbytes and size % 4 == 0, "theta and momentum must be fp32 of one size")
    version_bytes, watermark_bytes = _encoder.encode(version), _encoder.encode(watermarks)
    header = msgspec.json.encode(
        {
            "__metadata__": {
                "format": CHECKPOINT_FORMAT,
                "version": base64.b64encode(version_bytes).decode(),
                "watermarks": base64.b64encode(watermark_bytes).decode(),
                "sha256": _checksum(version_bytes, watermark_bytes, theta, momentum),
            },
            "theta": {"dtype": "F32", "shape": [size // 4], "data_offsets": [0, size]},
            "momentum": {"dtype": "F32", "shape": [size // 4], "data_offsets": [size, 2 * size]},
        }
    )
    header += b" " * (-len(header) % 8)
    return [len(header).to_bytes(8, "little") + header, theta, momentum]


def decode_checkpoint(data: bytes) -> SavedFragment:
    """Decode a checkpoint file. Raises: CorruptFile."""
    try:
        tensors: dict[str, Any] = dict(safetensors.deserialize(data))  # type: ignore[no-untyped-call]
        header_bytes = int.from_bytes(data[:8], "little")
        metadata = msgspec.json.decode(data[8 : 8 + header_bytes], type=_Header).metadata
        version_bytes = base64.b64decode(metadata.version, validate=True)
        watermark_bytes = base64.b64decode(metadata.watermarks, validate=True)
    except (safetensors.SafetensorError, msgspec.DecodeError, binascii.Error, ValueError) as error:
        raise CorruptFile(f"not a checkpoint ({error})") from error
    if set(tensors) != {"theta", "momentum"}:
        raise CorruptFile("theta or momentum is missing")
    theta, momentum = tensors["theta"], tensors["momentum"]
    if any(tensor["dtype"] not in ("F32", "float32") for tensor in (theta, momentum)):
        raise CorruptFile("theta or momentum is not fp32")
    if theta["shape"] != momentum["shape"] or len(theta["shape"]) != 1:
        raise CorruptFile("theta and momentum differ in shape")
    if _checksum(version_bytes, watermark_bytes, theta["data"], momentum["data"]) != metadata.sha256:
        raise CorruptFile("the checksum does not match")
    return SavedFragment(
        _decode_version(version_bytes),
        _decode_watermarks(watermark_bytes),
        np.frombuffer(theta["data"], dtype="<f4"),
        np.frombuffer(momentum["data"], dtype="<f4"),
    )


def encode_update(version: SignedVersion, payload: Buffer) -> list[Buffer]:
    """Encode an update as chunks of a file; the payload is not copied."""
    version_bytes = _encoder.encode(version)
    head = UPDATE_MAGIC + len(version_bytes).to_bytes(4, "little") + version_bytes
    return [head, hashlib.sha256(head).digest(), payload]


def decode_update(data: bytes) -> tuple[SignedVersion, bytes]:
    """Decode an update file. Raises: CorruptFile."""
    start = len(UPDATE_MAGIC) + 4
    if len(data) < start + _SHA256_BYTES or not data.startswith(UPDATE_MAGIC):
        raise CorruptFile("not an update")
    view = memoryview(data)
    version_end = start + int.from_bytes(data[start - 4 : start], "little")
    payload_start = version_end + _SHA256_BYTES
    if hashlib.sha256(view[:version_end]).digest() != view[version_end:payload_start]:
        raise CorruptFile("the checksum does not match")
    version, payload = _decode_version(data[start:version_end]), data[payload_start:]
    if content_digest(payload) != version.header.update_digest:
        raise CorruptFile("the update is not the one that its version names")
    return version, payload


def _decode_version(data: bytes) -> SignedVersion:
    try:
        return _version_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptFile(f"not a version ({error})") from error


def _decode_watermarks(data: bytes) -> tuple[Watermark, ...]:
    try:
        return _watermarks_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptFile(f"not watermarks ({error})") from error
