"""Result files: the global parameters as safetensors, with a name for every parameter.

Any program that reads safetensors reads it, and `transformers` takes it for the weights of a model. What
`p2pdiloco` adds is one entry of the metadata: the signed manifest, the versions of the fragments, and a
SHA-256 over names, shapes and bytes. Nothing is unpickled.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import msgspec
import numpy as np
import safetensors
from msgspec import Meta, msgpack
from numpy.typing import NDArray

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.config.manifest import Dtype, SignedManifest, decode_signed, encode_signed
from p2pdiloco.errors import RemoteError, StorageError, first_line
from p2pdiloco.ports import Buffer
from p2pdiloco.util import DAMAGE, Frozen, Values

KEY = "p2pdiloco"
MAX_FRAGMENTS = 1024
MAX_HEADER_BYTES = 100_000_000
"""Largest header that such a file may have, in bytes."""
Arrays = dict[str, NDArray[Any]]
"""Arrays by name: parameters in fp32, constants in types of their own."""
_TYPES = {
    "F32": "<f4",
    "F64": "<f8",
    "I64": "<i8",
    "I32": "<i4",
    "I16": "<i2",
    "I8": "|i1",
    "U8": "|u1",
    "BOOL": "|b1",
}
"""NumPy's types of what is written, by their names in such files."""
_NAMES = {kind: name for name, kind in _TYPES.items()}
_LONG_NAMES = _TYPES | {np.dtype(kind).name: kind for kind in _TYPES.values()}
"""NumPy's types by these names, and by those of some releases of safetensors."""
Hex = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


class Label(Frozen, forbid_unknown_fields=True):
    """Label of a fragment: the version that is in the file."""

    number: Annotated[int, Meta(ge=0)]
    digest: Hex
    """SHA-256 of the version's header, which names its whole history."""
    tokens: Annotated[int, Meta(ge=0)]
    """Tokens merged into the version, all in all."""


class ResultFile(Frozen):
    """Content of a result file."""

    signed: SignedManifest
    labels: tuple[Label, ...]
    """Labels of the fragments, by index."""
    parameters: Arrays
    """Parameters, and the constants of the model (`tasks.task.Constant`)."""


class _Entry(Frozen, forbid_unknown_fields=True):
    format: Literal[1]
    manifest: str
    fragments: Annotated[tuple[Label, ...], Meta(max_length=MAX_FRAGMENTS)]
    sha256: Hex


class _ResultHeader(Frozen):
    metadata: dict[str, str] = msgspec.field(name="__metadata__", default_factory=dict)


def checksum(parameters: Mapping[str, NDArray[Any]]) -> str:
    """SHA-256 over names, shapes and bytes (little-endian, in the order of the names), as hexadecimal."""
    digest = hashlib.sha256()
    for name in sorted(parameters):
        array = parameters[name]
        digest.update(msgpack.encode((name, array.shape, array.dtype.str)))
        digest.update(_bytes(array))
    return digest.hexdigest()


def checksum_of(path: Path) -> str:
    """Checksum of a file that `save_tensors` wrote, as `checksum`, with one array in memory at a time.

    Raises:
        StorageError: there is no such file, or it is none.
    """
    try:
        path.open("rb").close()  # else what safetensors says of the system's errors has no words
        with safetensors.safe_open(path, framework="numpy") as file:
            return checksum(_Tensors(file))
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    except (safetensors.SafetensorError, TypeError, ValueError) as error:  # numpy's of absurd shapes
        raise StorageError(f"{path} cannot be read as safetensors: {error}") from error


class _Tensors(Mapping[str, NDArray[Any]]):
    """Tensors of an open file, each loaded when it is asked for."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __getitem__(self, name: str) -> NDArray[Any]:
        kind = self._file.get_slice(name).get_dtype()
        if kind not in _TYPES:
            raise TypeError(f"{name} is of type {kind}")
        return cast(NDArray[Any], self._file.get_tensor(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._file.keys())

    def __len__(self) -> int:
        return len(self._file.keys())


def save_result_file(path: Path, content: ResultFile, dtypes: Mapping[str, Dtype] | None = None) -> None:
    """Write a result file, atomically and durably; `dtypes` as for `save_tensors`. Raises: StorageError."""
    entry = _Entry(
        1,
        base64.b64encode(encode_signed(content.signed)).decode(),
        content.labels,
        checksum(content.parameters),
    )
    save_tensors(path, content.parameters, {KEY: msgspec.json.encode(entry).decode()}, dtypes)


_SHORTER: dict[str, Callable[[NDArray[Any]], NDArray[Any]]] = {
    "bf16": lambda array: (array.view(np.uint32) >> 16).astype("<u2"),
    "fp16": lambda array: array.astype("<f2"),
}


def save_tensors(
    path: Path,
    parameters: Arrays,
    metadata: Mapping[str, str],
    dtypes: Mapping[str, Dtype] | None = None,
    durable: bool = True,
) -> None:
    """Write a safetensors file of arrays, without a second copy of them. Those in `dtypes`, of fp32, are
    written in a shorter type, to which they are rounded already. `durable`: on the disk once this returns.

    Raises: StorageError.
    """
    # transformers asks for the entry "format".
    header: Values = {"__metadata__": {"format": "pt", **metadata}}
    chunks: list[Buffer] = []
    at = 0
    for name, array in parameters.items():
        dtype = (dtypes or {}).get(name, "fp32")
        shorter = _SHORTER.get(dtype)
        content = _bytes(shorter(array) if shorter else array)
        kind = dtype.upper().replace("P", "") if shorter else _NAMES[array.dtype.newbyteorder("<").str]
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [at, at + content.nbytes]}
        chunks.append(content)
        at += content.nbytes
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)
    Files().save(path, [len(encoded).to_bytes(8, "little") + encoded, *chunks], durable=durable)


def load_result_file(path: Path) -> ResultFile:
    """Read and check a result file.

    Raises:
        StorageError: there is no such file, or it is not what was saved.
    """
    return checked_result_file(path, *load_tensors(path, exact=True))


def checked_result_file(path: Path, parameters: Arrays, metadata: Mapping[str, str]) -> ResultFile:
    """Check what `load_tensors` found at `path` against its label.

    Raises:
        StorageError: it has none, or is not what was saved.
    """
    if KEY not in metadata:
        raise StorageError(f"{path} is no checkpoint of a p2pdiloco run", "run new --from takes other models")
    try:
        entry = msgspec.json.decode(metadata[KEY], type=_Entry)
        signed = decode_signed(base64.b64decode(entry.manifest, validate=True))
    except (msgspec.MsgspecError, RemoteError, binascii.Error, RecursionError) as error:
        raise StorageError(f"{path} is damaged: its label is not readable ({error})") from error
    if checksum(parameters) != entry.sha256:
        raise StorageError(f"{path} is damaged: the checksum does not match")
    return ResultFile(signed, entry.fragments, parameters)


def load_metadata(path: Path) -> dict[str, str]:
    """Read the metadata of a safetensors file, without its tensors. Raises: StorageError."""
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            return msgspec.json.decode(file.read(min(size, MAX_HEADER_BYTES)), type=_ResultHeader).metadata
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    except DAMAGE as error:
        raise StorageError(f"{path} cannot be read as safetensors: {error}") from error


def tensor_types(path: Path) -> dict[str, str]:
    """Types of the tensors in a safetensors file, as it calls them ("F32"), by name. Raises: StorageError."""
    try:
        with safetensors.safe_open(path, framework="numpy") as opened:
            return {name: opened.get_slice(name).get_dtype() for name in list(opened.keys())}
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror or first_line(error)}") from error
    except safetensors.SafetensorError as error:
        raise StorageError(f"{path} cannot be read as safetensors: {first_line(error)}") from error


def load_tensors(
    path: Path, left_out: tuple[str, ...] = (), exact: bool = False
) -> tuple[Arrays, dict[str, str]]:
    """Read the tensors of a safetensors file as fp32, and its metadata. Tensors whose names end in one of
    `left_out`, of whatever type they are, are left out.

    Args:
        exact: integers, truth values and fp64 keep their types, as `save_tensors` wrote them.

    Raises:
        StorageError: there is no such file, it is none, or it has tensors of other types.
    """
    try:
        content = path.read_bytes()
        data: list[tuple[str, Values]] = safetensors.deserialize(content)  # type: ignore[no-untyped-call]
        header = msgspec.json.decode(
            content[8 : 8 + int.from_bytes(content[:8], "little")], type=_ResultHeader
        )
    except OSError as error:
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    except (safetensors.SafetensorError, msgspec.MsgspecError, ValueError) as error:
        raise StorageError(f"{path} cannot be read as safetensors: {error}") from error
    parameters = {}
    for name, tensor in data:
        if not name.endswith(left_out):
            parameters[name] = _array(path, name, tensor, exact)
    return parameters, header.metadata


def _array(path: Path, name: str, tensor: Values, exact: bool) -> NDArray[Any]:
    kind, raw = tensor["dtype"], tensor["data"]
    flat: NDArray[Any]
    if kind in ("F32", "float32"):
        flat = np.frombuffer(raw, dtype="<f4")
    elif kind in ("F16", "float16"):
        flat = np.frombuffer(raw, dtype="<f2").astype(np.float32)
    elif kind in ("BF16", "bfloat16"):
        flat = (np.frombuffer(raw, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    elif exact and kind in _LONG_NAMES:
        flat = np.frombuffer(raw, dtype=_LONG_NAMES[kind])
    else:
        raise StorageError(f"{path}: {name} is of type {kind}: only F32, F16 and BF16 are read")
    try:
        return flat.reshape(tensor["shape"])
    except ValueError as error:  # sizes without elements may be as absurd as they like
        raise StorageError(f"{path}: {name} has an impossible shape: {error}") from error


def _bytes(array: NDArray[Any]) -> memoryview:
    flat = np.ascontiguousarray(array).reshape(-1)
    return memoryview(flat.view(np.uint8).data) if math.prod(array.shape) else memoryview(b"")
