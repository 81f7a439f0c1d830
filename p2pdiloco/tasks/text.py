"""Text that fits into memory, for training and held out.

Sources. "embedded" is the source text of Python's own standard library, which lies on every machine that
can run this (without its tests, which many distributions leave out; another version's differs in part).
"files" is a file or a folder, every file a document; "jsonl" and "parquet" are such files
(`tasks.documents`), every line or row a document.

Split (`tasks.documents.pieces`). Files give up parts that their bytes say. A line or row is held out if the
hash of its text says so, a file of the standard library if that of its relative name does. So it is on every
peer that has it.

Samples. `Packer` joins the documents' tokens, and `Windows` cuts them: not padded, nothing lost.
"""

from __future__ import annotations

import codecs
import os
import sysconfig
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from p2pdiloco.config.manifest import DataSection
from p2pdiloco.errors import DataError, UserError
from p2pdiloco.tasks.documents import DocumentPiece, check_path, cut, is_heldout, pieces
from p2pdiloco.tasks.task import Data
from p2pdiloco.tasks.tokens import Tokenizer, Tokens

if TYPE_CHECKING:
    from p2pdiloco.tasks.task import Batch, Indices

EMBEDDED_MAX_BYTES = 30_000_000
EMBEDDED_MAX_FILE_BYTES = 1_000_000
MAX_BYTES = 4 << 30
_NOT_EMBEDDED = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3",
}  # fmt: skip
"""Folders of the standard library that are not on every machine, or not part of it. A person's data is never
left out for such a name."""
_SNIFF_BYTES = 65_536


def load_text(section: DataSection, path: str | None, context_tokens: int, tokenizer: Tokenizer) -> Data:
    """Read and tokenize all text of the manifest's source.

    Raises:
        UserError: no --data for another source than "embedded"; it does not exist, cannot be read, has no
            text, too much or too little, none that is held out; a package is missing.
    """
    left = _LeftOut()
    if section.source == "embedded":
        found = _embedded_files(section.heldout_percent)
    elif path is None:
        raise DataError("this run trains on each node's own files, and none are given", "add --data PATH")
    else:
        found = _some(_pieces(section, Path(path), left), path, left)
    train, heldout = Packer(tokenizer), Packer(tokenizer)
    for held, text, ends, begins in found:
        (heldout if held else train).add(text, ends, begins)
    trained, held_out = Windows(train.take(), context_tokens), heldout.take()
    if not len(held_out):
        raise DataError(
            f"there is too little text to hold out {section.heldout_percent} % of it: that came to none",
            "give more text with --data" + (f"; {left.words()}" if left else ""),
        )
    note = f"data: {left.words()}" if left else ""
    return Data(trained, Windows(held_out, context_tokens, "held-out"), note)


class _LeftOut:
    """Files of a folder that are left out, all for one reason."""

    def __init__(self) -> None:
        self._first: Path | None = None
        self._count = 0
        self._why = ""

    def __bool__(self) -> bool:
        return self._count > 0

    def add(self, path: Path, why: str) -> None:
        """Count a file."""
        self._first, self._why = self._first or path, why
        self._count += 1

    def words(self) -> str:
        """Say how many, why, and which is the first."""
        files = f"{self._count} files are" if self._count > 1 else "1 file is"
        return f"{files} {self._why} and left out, such as {self._first}"


def _pieces(section: DataSection, root: Path, left: _LeftOut) -> Iterator[DocumentPiece]:
    """What is no text is added to `left`."""
    check_path(root)
    try:
        if section.source == "files":
            for text in _user_files(root, left):
                yield from pieces(text, section.heldout_percent)
        else:
            from p2pdiloco.tasks.documents import SUFFIXES, rows

            files = [root] if root.is_file() else _with_endings(root, SUFFIXES[section.source], left)
            left_bytes = MAX_BYTES
            for file in files:
                for row in rows(file, section):
                    encoded = row.encode(errors="replace")
                    left_bytes -= len(encoded)
                    if left_bytes < 0:
                        raise _too_much(root)
                    yield DocumentPiece(is_heldout(row, section.heldout_percent), encoded)
    except OSError as error:
        raise UserError(
            f"cannot read the data path {error.filename or root}: {error.strerror or error}", "check --data"
        ) from error


def _with_endings(root: Path, endings: tuple[str, ...], left: _LeftOut) -> list[Path]:
    found = []
    for path in _walk(root):
        if path.name.lower().endswith(endings):
            found.append(path)
        else:
            left.add(path, f"not called {' or '.join('*' + ending for ending in endings)}")
    return found


def _some(found: Iterator[DocumentPiece], root: str, left: _LeftOut) -> Iterator[DocumentPiece]:
    is_any = False
    for piece in found:
        is_any = is_any or bool(piece.text)
        yield piece
    if not is_any and left:
        raise DataError(
            f"there is no text in {root}: {left.words()}",
            "other encodings have to be converted, for instance with iconv; .gz files to be unpacked",
        )
    if not is_any:
        raise DataError(f"there is no text in {root}", "check --data")


def _too_much(root: Path) -> UserError:
    return DataError(
        f"{root} has more than {MAX_BYTES >> 30} GiB of text",
        'give a smaller part, or stream it: data.source = "hub"',
    )


def _embedded_files(heldout_percent: int) -> Iterator[DocumentPiece]:
    root = Path(sysconfig.get_paths()["stdlib"])
    total = 0
    for path in _walk(root, _NOT_EMBEDDED):
        if path.suffix != ".py" or path.stat().st_size > EMBEDDED_MAX_FILE_BYTES:
            continue
        text = path.read_bytes()
        if not _is_text(text):
            continue
        total += len(text)
        if total > EMBEDDED_MAX_BYTES:
            return
        yield DocumentPiece(is_heldout(path.relative_to(root).as_posix(), heldout_percent), text)


def _user_files(root: Path, left: _LeftOut) -> Iterator[bytes]:
    """Read the text files below `root`. No file that is no text, or is larger than the bytes that are left,
    is read whole."""
    left_bytes = MAX_BYTES
    for path in [root] if root.is_file() else _walk(root):
        with path.open("rb") as file:
            start = file.read(_SNIFF_BYTES)
            if not start:
                continue
            if not _is_text(start):
                left.add(path, "not UTF-8 text")
                continue
            size = max(len(start), os.fstat(file.fileno()).st_size)
            if size > left_bytes:
                raise _too_much(root)
            file.seek(0)
            text = file.read(size)
        left_bytes -= len(text)
        yield text.removeprefix(codecs.BOM_UTF8)


def _walk(root: Path, left_out: Collection[str] = ()) -> list[Path]:
    """Regular files below root, sorted by relative name; no hidden ones, links not followed into folders.
    `left_out`: names of folders, at any depth."""

    def fail(error: OSError) -> None:
        raise error

    found = []
    for folder, subfolders, names in os.walk(root, onerror=fail):
        subfolders[:] = [name for name in subfolders if name not in left_out and name[0] != "."]
        paths = (Path(folder, name) for name in names if name[0] != ".")
        found += [path for path in paths if path.is_file()]
    return sorted(found, key=lambda path: path.relative_to(root).as_posix())


def _is_text(start: bytes) -> bool:
    """Tell whether the bytes are UTF-8 without NUL; a character that the sniffed part cuts in two is no
    objection."""
    if b"\0" in start:
        return False
    try:
        start.decode()
    except UnicodeDecodeError as error:
        return error.reason == "unexpected end of data" and error.start >= len(start) - 3
    return True


ENCODED_TOGETHER_BYTES = 1 << 20
"""Bytes of text that go through the tokenizer at one go, which takes its memory for each of them
(`tasks.tokenizer_process`); a longer document is cut at the end of a line."""


class Windows:
    """Windows of a text: `tasks.task.Samples`. The next one begins with the last token of the one before, so
    that every token is predicted once. A batch is one tensor, int64 (n, context + 1)."""

    def __init__(self, text: Tokens, context_tokens: int, name: str = "training") -> None:
        """`name`: whose text it is, for a sentence.

        Raises:
            UserError: the text is shorter than one window.
        """
        self.text = text
        self._context = context_tokens
        self._count = (len(text) - 1) // context_tokens
        if self._count < 1:
            raise DataError(
                f"the {name} text has {len(text)} tokens, the context needs {context_tokens + 1}",
                "give more text with --data",
            )

    def __len__(self) -> int:
        return self._count

    def batch(self, indices: Indices) -> Batch:
        """The windows with these indices."""
        places = indices[:, None] * self._context + np.arange(self._context + 1)
        return (torch.from_numpy(self.text[places].astype(np.int64)),)


class Packer:
    """Tokens of documents, each with the token that ends it behind, and in front the one that begins it, if
    there is one."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._waiting: list[tuple[bytes, bool, bool]] = []
        """Pieces of documents, and whether a document begins and ends with one."""
        # Where one token does both, the end of a document is the begin of the next.
        is_other = tokenizer.begin is not None and tokenizer.begin != tokenizer.end
        self._begin = [tokenizer.begin] if is_other else []
        self._waiting_bytes = 0
        self._parts: list[Tokens] = []

    def add(self, document: bytes, ends: bool = True, begins: bool = True) -> None:
        """Add the next document, UTF-8. `ends`: False, it is a part, and the document goes on behind it;
        `begins`: False, it is a part, and the document began before it."""
        stop, is_last = 0, False
        while not is_last:
            start, stop = stop, cut(document, stop, stop + ENCODED_TOGETHER_BYTES)
            is_last = stop == len(document)
            self._waiting.append((document[start:stop], begins and start == 0, is_last and ends))
            self._waiting_bytes += stop - start
            if self._waiting_bytes >= ENCODED_TOGETHER_BYTES:
                self._encode()

    def _encode(self) -> None:
        encoded = self._tokenizer.encode([piece for piece, _, _ in self._waiting])
        for tokens, (_, begins, ends) in zip(encoded, self._waiting, strict=True):
            if begins and self._begin:
                self._parts.append(np.array(self._begin, dtype=tokens.dtype))
            self._parts.append(tokens)
            if ends:
                self._parts.append(np.array([self._tokenizer.end], dtype=tokens.dtype))
        self._waiting, self._waiting_bytes = [], 0

    def take(self) -> Tokens:
        """Take all tokens since the last call."""
        self._encode()
        parts, self._parts = self._parts, []
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.uint8)
