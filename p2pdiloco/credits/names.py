"""Names of learners, kept beside a history: those that have left are called as they called themselves."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from p2pdiloco.adapters.disk.files import Files
from p2pdiloco.notes import clear_folder_at, read_note

logger = logging.getLogger(__name__)
MAX_NAMES = 16384
MAX_FILE_BYTES = MAX_NAMES * 512
"""Limit of the file, whatever the names are: JSON writes a character in six bytes at most."""
_decoder = msgspec.json.Decoder(dict[str, str])


class NamesFile:
    """File of names by peer id."""

    def __init__(self, path: Path, known: Mapping[str, str], files: Files | None = None) -> None:
        """`known`: names of those that are here, as they were seen last."""
        self._path, self._known, self._files = path, known, files or Files()
        self._names = read_note(path, _decoder.decode, logger.warning, MAX_FILE_BYTES) or {}

    def get(self, peer: str) -> str:
        """Find a name; empty: none is known."""
        return self._known.get(peer) or self._names.get(peer, "")

    def save(self, peers: Iterable[str]) -> None:
        """Remember what these are called now. Raises: StorageError."""
        names = {peer: name for peer in list(peers)[:MAX_NAMES] if (name := self.get(peer))}
        if names != self._names:
            self._files.make_folder(self._path.parent)
            clear_folder_at(self._path)
            self._files.save(self._path, [msgspec.json.encode(names)], durable=False)
            self._names = names
