"""Payloads of merged contributions that wait on the disk in case they must be sent again.

Scratch: of use to the running process only, so written without a sync and cleared at every start. Each file
begins with the digest of the rest. Synchronous, for one I/O thread; `load` may come from another.
"""

from __future__ import annotations

from pathlib import Path

from p2pdiloco.adapters.disk.files import Files
from p2pdiloco.errors import StorageError
from p2pdiloco.hashing import DIGEST_BYTES, content_digest
from p2pdiloco.ports import Buffer


class KeptFiles:
    """A folder of payloads, by ticket."""

    def __init__(self, folder: Path, files: Files | None = None) -> None:
        """Open an empty folder: what an earlier process left in it goes.

        Raises:
            StorageError: it cannot be created or cleared.
        """
        self._folder = folder
        self._files = files or Files()
        self._files.make_folder(folder)
        self.clear()

    def _path(self, ticket: int) -> Path:
        return self._folder / f"{ticket}.payload"

    def save(self, ticket: int, payload: Buffer) -> None:
        """Write a payload. Raises: StorageError."""
        self._files.save(self._path(ticket), (content_digest(payload), payload), durable=False)

    def load(self, ticket: int) -> bytearray:
        """Read a payload back. Raises: StorageError, also when it is damaged."""
        content = memoryview(self._files.read(self._path(ticket)))
        if content_digest(content[DIGEST_BYTES:]) != content[:DIGEST_BYTES]:
            raise StorageError(f"{self._path(ticket)} is damaged")
        return bytearray(content[DIGEST_BYTES:])

    def remove(self, ticket: int) -> None:
        """Forget a payload; absent is fine. Raises: StorageError."""
        self._files.delete(self._path(ticket))

    def clear(self) -> None:
        """Forget all. Raises: StorageError."""
        for path in self._files.list_folder(self._folder):
            self._files.delete(path)
