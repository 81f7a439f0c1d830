"""Header of a GGUF file: what it says of its model, and which tensors it has, read within bounds.

Libraries that read such files believe the counts in them. So this reads the header first, from a file that
may be anybody's: a count beyond what the file can hold, or any model has, is an error.
"""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

from msgspec import Struct

from p2pdiloco.errors import UserError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_MAX_ENTRIES = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_DIMENSIONS = 8
_MAX_TEXT_BYTES = 1 << 24
_MAX_ELEMENTS = 1 << 24
"""Elements of all arrays together: tokens, scores and merges of a vocabulary."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9


class GgufHeader(Struct, frozen=True):
    """Header of a file: entries, and tensors."""

    values: dict[str, Any]
    """Numbers and texts by key; of arrays their lengths."""
    tensors: dict[str, int]
    """Number of the type of each tensor, by name."""

    @property
    def architecture(self) -> str:
        """Name of the architecture, as llama.cpp calls it."""
        return str(self.values.get("general.architecture", ""))


def is_gguf(path: Path) -> bool:
    """Tell whether it is such a file, by its first bytes."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file.

    Raises:
        UserError: it cannot be read, is of another version, damaged or cut off.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _Walk(content).header()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (struct.error, ValueError) as error:  # (also of an empty file)
        raise UserError(f"{path} cannot be read as GGUF: {error}", "get the file again") from error


class _Walk:
    """Walk through the header's bytes. Its methods raise `ValueError` or `struct.error`."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._at = 0
        self._elements = _MAX_ELEMENTS

    def header(self) -> GgufHeader:
        if self._content[:4] != MAGIC:
            raise ValueError("its first bytes are another file's")
        self._at = 4
        version, tensors, entries = self._number("I"), self._number("Q"), self._number("Q")
        if version not in VERSIONS:
            raise ValueError(f"version {version} is none of {VERSIONS}")
        if tensors > _MAX_TENSORS or entries > _MAX_ENTRIES:
            raise ValueError(f"{tensors} tensors and {entries} entries are beyond any model")
        values = {}
        for _ in range(entries):
            key = self._text()
            values[key] = self._value(self._number("I"))
        return GgufHeader(values, dict(self._tensor() for _ in range(tensors)))

    def _number(self, form: str) -> Any:
        (found,) = struct.unpack_from("<" + form, self._content, self._at)
        self._at += struct.calcsize("<" + form)
        return found

    def _text(self) -> str:
        size = self._number("Q")
        if size > _MAX_TEXT_BYTES or self._at + size > len(self._content):
            raise ValueError(f"it ends within a text of {size} bytes")
        self._at += size
        return self._content[self._at - size : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            return self._number(_form(kind))
        kind, count = self._number("I"), self._number("Q")
        self._elements -= count
        if self._elements < 0:
            raise ValueError(f"an array of {count} elements is beyond any vocabulary")
        if kind == _TEXT:
            for _ in range(count):
                self._text()
        else:
            self._at += count * struct.calcsize("<" + _form(kind))
        return count

    def _tensor(self) -> tuple[str, int]:
        name, dimensions = self._text(), self._number("I")
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"a tensor of {dimensions} dimensions is beyond any model")
        self._at += 8 * dimensions
        kind = self._number("I")
        self._at += 8  # where it begins
        if self._at > len(self._content):
            raise ValueError("it ends within its list of tensors")
        return name, kind


def _form(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"type {kind} is none")
    return _SCALARS[kind]
