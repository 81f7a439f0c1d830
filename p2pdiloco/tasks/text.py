"""Text that fits into memory: what a language model trains on, and what nobody trains on.

Sources. "embedded" is the source text of Python's own standard library, which lies on every machine that
can run this (without its tests, which many distributions leave out). "files" is a file or a folder, every
file a document; "jsonl" and "parquet" are such files (`tasks.documents`), every line or row a document.

Split. A file is held out if the hash of its relative name says so, a line or row if that of its text does:
on every peer alike. If that leaves one side empty (a single file), the end of the text is held out instead.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from p2pdiloco.config.manifest import DataSection
from p2pdiloco.errors import UserError
from p2pdiloco.tasks.packing import Packer, Windows
from p2pdiloco.tasks.split import is_heldout
from p2pdiloco.tasks.task import Data
from p2pdiloco.tasks.tokens import Tokenizer

EMBEDDED_MAX_BYTES = 30_000_000
EMBEDDED_MAX_FILE_BYTES = 1_000_000
MAX_BYTES = 4 << 30
_SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3",
}  # fmt: skip
_SNIFF_BYTES = 65_536


def load_text(section: DataSection, path: str | None, context_tokens: int, tokenizer: Tokenizer) -> Data:
    """Read and tokenize all text of the manifest's source.

    Raises:
        UserError: no --data for another source than "embedded"; it does not exist, cannot be read, has no
            text, too much or too little; a package is missing.
    """
    if section.source == "embedded":
        documents = _embedded_files()
    elif path is None:
        raise UserError("this run trains on each node's own files, and none are given", "add --data PATH")
    else:
        documents = _some(_documents(section, Path(path)), path)
    train, heldout = Packer(tokenizer), Packer(tokenizer)
    for name, text in documents:
        (heldout if is_heldout(name, section.heldout_percent) else train).add(text)
    sides = [train.take(), heldout.take()]
    if not all(len(side) for side in sides):
        whole = max(sides, key=len)
        cut = len(whole) - len(whole) * section.heldout_percent // 100
        sides = [whole[:cut], whole[cut:]]
    return Data(Windows(sides[0], context_tokens), Windows(sides[1], context_tokens, "held-out"))


def _documents(section: DataSection, root: Path) -> Iterator[tuple[str, bytes]]:
    """Every document, under the name by which it is held out or not."""
    if not root.exists():
        raise UserError(f"the data path {root} does not exist", "check --data")
    try:
        if section.source == "files":
            yield from _user_files(root)
        else:
            from p2pdiloco.tasks.documents import SUFFIXES, rows

            suffixes = SUFFIXES[section.source]
            files = [root] if root.is_file() else [p for p in _walk(root) if p.name.endswith(suffixes)]
            left_bytes = MAX_BYTES
            for file in files:
                for text in rows(file, section):
                    encoded = text.encode(errors="replace")
                    left_bytes -= len(encoded)
                    if left_bytes < 0:
                        raise _too_much(root)
                    yield text, encoded
    except OSError as error:
        raise UserError(
            f"cannot read the data path {error.filename or root}: {error.strerror or error}", "check --data"
        ) from error


def _some(documents: Iterator[tuple[str, bytes]], root: str) -> Iterator[tuple[str, bytes]]:
    found = False
    for name, text in documents:
        found = found or bool(text)
        yield name, text
    if not found:
        raise UserError(f"there is no text in {root}", "check --data")


def _too_much(root: Path) -> UserError:
    return UserError(
        f"{root} has more than {MAX_BYTES >> 30} GiB of text",
        'give a smaller part, or stream it: data.source = "hub"',
    )


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
    """Nothing is read whole that is no text, or more than the bytes that are left."""
    left_bytes = MAX_BYTES
    for path in [root] if root.is_file() else _walk(root):
        with path.open("rb") as file:
            start = file.read(_SNIFF_BYTES)
            if not start or not _is_text(start):
                continue
            size = max(len(start), os.fstat(file.fileno()).st_size)
            if size > left_bytes:
                raise _too_much(root)
            file.seek(0)
            text = file.read(size)
        left_bytes -= len(text)
        yield path.name if root.is_file() else path.relative_to(root).as_posix(), text


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
