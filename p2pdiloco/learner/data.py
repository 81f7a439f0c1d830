"""Text as bytes: what a learner trains on, and what nobody trains on.

Sources. "embedded" is the source text of Python's own standard library, which lies on every machine that
can run this (without its tests, which many distributions leave out). "files" is a file or a folder.

Split. A file is held out if the hash of its relative name says so, on every peer alike; if that leaves
one side empty (a single file), the end of the text is held out instead.

Streams. The training text is cut into windows of context + 1 bytes. Every epoch all windows are put into
an order that is a pseudo-random permutation keyed by (run seed, epoch). A peer walks along that endless
sequence from a start that is the hash of its id, and nobody has to know who else is there: two peers see the
same window only when one has walked to where the other began. Starts are random, so two may lie close
together. The permutation is a Feistel network: position -> window in O(1), nothing stored, so a stream goes
on at any position at once.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from msgspec import Struct
from numpy.typing import NDArray
from torch import Tensor

from p2pdiloco.config.manifest import DataSection, Manifest
from p2pdiloco.errors import ConfigError, UserError

EMBEDDED_MAX_BYTES = 30_000_000
EMBEDDED_MAX_FILE_BYTES = 1_000_000
FILES_MAX_BYTES = 4 << 30
_SKIPPED_FOLDERS = {
    "site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3",
}  # fmt: skip
_SNIFF_BYTES = 65_536
_SEPARATOR = b"\n"
_ROUNDS = 4


Array = NDArray[Any]


class Corpus(Struct, frozen=True):
    """Training and held-out text: uint8 arrays."""

    train: Array
    heldout: Array


class Stream:
    """A learner's endless sequence of training windows (module docstring)."""

    def __init__(self, corpus: Corpus, context_tokens: int, seed: int, peer: str, position: int = 0) -> None:
        """`position`: windows that this peer has taken before.

        Raises:
            UserError: the training text is shorter than one window.
        """
        self._text = corpus.train
        self._context = context_tokens
        self._windows = (len(self._text) - 1) // context_tokens
        if self._windows < 1:
            raise UserError(
                f"the training text has {len(self._text)} bytes, the context needs {context_tokens + 1}",
                "give more text with --data",
            )
        self._seed = seed
        self._start = _hash64(f"stream/{seed}/{peer}") % self._windows
        self.position = position

    def take(self, windows: int) -> Tensor:
        """The next windows: int64 (windows, context + 1)."""
        at = self._start + self.position + np.arange(windows)
        self.position += windows
        epochs, places = np.divmod(at, self._windows)
        indices = np.empty(windows, dtype=np.int64)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            indices[chosen] = permuted(places[chosen], self._windows, f"{self._seed}/{epoch}")
        return _cut(self._text, indices * self._context, self._context)


def heldout_windows(corpus: Corpus, context_tokens: int, tokens: int) -> Tensor:
    """Fixed held-out windows, evenly spread, about `tokens` of them in all: int64 (n, context + 1).

    Raises:
        UserError: the held-out text is shorter than one window.
    """
    available = (len(corpus.heldout) - 1) // context_tokens
    if available < 1:
        raise UserError(
            f"the held-out text has {len(corpus.heldout)} bytes, the context needs {context_tokens + 1}",
            "give more text with --data, or raise data.heldout_percent in the manifest",
        )
    count = min(available, max(1, tokens // context_tokens))
    return _cut(corpus.heldout, np.arange(count) * available // count * context_tokens, context_tokens)


def load_corpus(manifest: Manifest, data_path: str | None) -> Corpus:
    """Read all text of the manifest's source into memory.

    Raises:
        UserError: no --data for source "files"; it does not exist, cannot be read, or has no text.
        ConfigError: an unknown source, or a vocabulary that cannot hold bytes.
    """
    if manifest.model.vocabulary < 256:
        raise ConfigError(f"model.vocabulary is {manifest.model.vocabulary}, but text is bytes: at least 256")
    section = manifest.data
    if section.source == "embedded":
        return _split(_embedded_files(), section)
    if section.source != "files":
        raise ConfigError(f'data.source "{section.source}" is unknown', "it is embedded or files")
    if data_path is None:
        raise UserError("this run trains on each node's own files, and none are given", "add --data PATH")
    return _split(_user_files(Path(data_path)), section)


def permuted(places: Array, size: int, key: str) -> Array:
    """A keyed pseudo-random permutation of range(size), at these places: int64, same shape.

    A balanced Feistel network over the next even power of two; results beyond `size` walk on along their
    cycle until they are inside it (at most 4 tries on average).
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    keys = [np.uint64(_hash64(f"permutation/{key}/{i}")) for i in range(_ROUNDS)]
    values = _feistel(places.astype(np.uint64), half_bits, keys)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], half_bits, keys)
    return values.astype(np.int64)


def _feistel(values: Array, half_bits: int, keys: list[np.uint64]) -> Array:
    mask, shift = np.uint64((1 << half_bits) - 1), np.uint64(half_bits)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mixed(right ^ key) & mask)
    return (left << shift) | right


def _mixed(values: Array) -> Array:
    """The finaliser of splitmix64: every bit of the result depends on every bit of the value."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return cast(Array, values ^ (values >> np.uint64(31)))


def _hash64(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def _cut(text: Array, starts: Array, context_tokens: int) -> Tensor:
    return torch.from_numpy(text[starts[:, None] + np.arange(context_tokens + 1)].astype(np.int64))


def _split(files: Iterator[tuple[str, bytes]], section: DataSection) -> Corpus:
    """Files by the hash of their names; the end of the text if one side stays empty."""
    train, heldout = bytearray(), bytearray()
    for name, text in files:
        held = _hash64(f"heldout/{name}") % 100 < section.heldout_percent
        side = heldout if held else train
        side += text + _SEPARATOR
    if not train or not heldout:
        whole = train or heldout
        cut = len(whole) * section.heldout_percent // 100
        train, heldout = whole[: len(whole) - cut], whole[len(whole) - cut :]
    return Corpus(np.frombuffer(bytes(train), dtype=np.uint8), np.frombuffer(bytes(heldout), dtype=np.uint8))


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
