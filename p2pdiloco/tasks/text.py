"""Text as bytes: what a language model trains on, and what nobody trains on.

Sources. "embedded" is the source text of Python's own standard library, which lies on every machine that
can run this (without its tests, which many distributions leave out). "files" is a file or a folder.

Split. A file is held out if the hash of its relative name says so, on every peer alike; if that leaves
one side empty (a single file), the end of the text is held out instead.

Samples. The text is cut into windows of context + 1 bytes, of which the next one begins with the last.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from p2pdiloco.config.manifest import DataSection
from p2pdiloco.errors import ConfigError, UserError
from p2pdiloco.tasks.split import is_heldout
from p2pdiloco.tasks.task import Data

if TYPE_CHECKING:
    from p2pdiloco.tasks.task import Batch, Indices

EMBEDDED_MAX_BYTES = 30_000_000
EMBEDDED_MAX_FILE_BYTES = 1_000_000
FILES_MAX_BYTES = 4 << 30
_SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3",
}  # fmt: skip
_SNIFF_BYTES = 65_536
_SEPARATOR = b"\n"

Text = NDArray[Any]
"""uint8."""


class Windows:
    """Windows of a text: `tasks.task.Samples`. A batch is one tensor, int64 (n, context + 1)."""

    def __init__(self, text: Text, context_tokens: int, name: str = "training") -> None:
        """`name`: whose text it is, for a sentence.

        Raises:
            UserError: the text is shorter than one window.
        """
        self.text = text
        self._context = context_tokens
        self._count = (len(text) - 1) // context_tokens
        if self._count < 1:
            raise UserError(
                f"the {name} text has {len(text)} bytes, the context needs {context_tokens + 1}",
                "give more text with --data",
            )

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: Indices) -> Batch:
        """The windows with these indices."""
        places = indices[:, None] * self._context + np.arange(self._context + 1)
        return (torch.from_numpy(self.text[places].astype(np.int64)),)


def load_text(section: DataSection, path: str | None, context_tokens: int) -> Data:
    """Read all text of the manifest's source into memory.

    Raises:
        UserError: no --data for source "files"; it does not exist, cannot be read, has no text or too little.
        ConfigError: an unknown source.
    """
    if section.source == "embedded":
        files = _embedded_files()
    elif section.source != "files":
        raise ConfigError(f'data.source "{section.source}" is unknown', "it is embedded or files")
    elif path is None:
        raise UserError("this run trains on each node's own files, and none are given", "add --data PATH")
    else:
        files = _user_files(Path(path))
    train, heldout = _split(files, section)
    return Data(Windows(train, context_tokens), Windows(heldout, context_tokens, "held-out"))


def _split(files: Iterator[tuple[str, bytes]], section: DataSection) -> tuple[Text, Text]:
    """Training and held-out text, by the files' names; the end of the text if one side stays empty."""
    train, heldout = bytearray(), bytearray()
    for name, text in files:
        side = heldout if is_heldout(name, section.heldout_percent) else train
        side += text + _SEPARATOR
    if not train or not heldout:
        whole = train or heldout
        cut = len(whole) * section.heldout_percent // 100
        train, heldout = whole[: len(whole) - cut], whole[len(whole) - cut :]
    return np.frombuffer(bytes(train), dtype=np.uint8), np.frombuffer(bytes(heldout), dtype=np.uint8)


def _embedded_files() -> Iterator[tuple[str, bytes]]:
    root = Path(sysconfig.get_paths()["stdlib"])
    total = 0
    for path in _walk(root):
        if path.suffix != ".py" or path.stat().st_size > EMBEDDED_MAX_FILE_BYTES:
            continue
        text = path.read_bytes()
        if not _is_text(text):
            continue
        total += len(text)
        if total > EMBEDDED_MAX_BYTES:
            return
        yield path.relative_to(root).as_posix(), text


def _user_files(root: Path) -> Iterator[tuple[str, bytes]]:
    total = 0
    try:
        if not root.exists():
            raise UserError(f"the data path {root} does not exist", "check --data")
        for path in [root] if root.is_file() else _walk(root):
            text = path.read_bytes()
            if not text or not _is_text(text[:_SNIFF_BYTES]):
                continue
            total += len(text)
            if total > FILES_MAX_BYTES:
                raise UserError(
                    f"{root} has more than {FILES_MAX_BYTES >> 30} GiB of text", "give a smaller part"
                )
            yield path.name if root.is_file() else path.relative_to(root).as_posix(), text
    except OSError as error:
        raise UserError(
            f"cannot read the data path {error.filename}: {error.strerror}", "check --data"
        ) from error
    if not total:
        raise UserError(f"there is no text file in {root}", "check --data")


def _walk(root: Path) -> list[Path]:
    """Regular files below root, sorted by relative name; no hidden ones, links not followed into folders."""

    def fail(error: OSError) -> None:
        raise error

    found = []
    for folder, subfolders, names in os.walk(root, onerror=fail):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS and name[0] != "."]
        paths = (Path(folder, name) for name in names if name[0] != ".")
        found += [path for path in paths if path.is_file()]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _is_text(start: bytes) -> bool:
    """UTF-8 without NUL; a character that the sniffed part cuts in two is no objection."""
    if b"\0" in start:
        return False
    try:
        start.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and error.start >= len(start) - 3
    return True
