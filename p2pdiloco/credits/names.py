"""Names of learners, kept beside a history: those that have left are called as they called themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import msgspec

from p2pdiloco.adapters.disk.files import Files
from p2pdiloco.errors import StorageError

MAX_NAMES = 16384
MAX_FILE_BYTES = 4 * 1024 * 1024
_decoder = msgspec.json.Decoder(dict[str, str])


class NamesFile:
    """File of names by peer id."""

    def __init__(self, path: Path, known: Mapping[str, str], files: Files | None = None) -> None:
        """`known`: names of those that are here, as they were seen last."""
        self._path, self._known, self._files = path, known, files or Files()
        self._names = self._load()

    def _load(self) -> dict[str, str]:
        """Read the file; of a damaged one nothing: names come again with those that bear them."""
        try:
            if not self._path.is_file() or self._path.stat().st_size > MAX_FILE_BYTES:
                return {}
            return _decoder.decode(self._files.read(self._path))
        except (StorageError, OSError, msgspec.MsgspecError, UnicodeDecodeError):
            return {}

    def get(self, peer: str) -> str:
        """Find a name; empty: none is known."""
        return self._known.get(peer) or self._names.get(peer, "")

    def save(self, peers: Iterable[str]) -> None:
        """Remember what these are called now. Raises: StorageError."""
        names = {peer: name for peer in list(peers)[:MAX_NAMES] if (name := self.get(peer))}
        if names != self._names:
            self._files.make_folder(self._path.parent)
            self._files.save(self._path, [msgspec.json.encode(names)], durable=False)
            self._names = names
