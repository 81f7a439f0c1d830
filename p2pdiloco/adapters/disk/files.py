"""File operations that persistence is built from, and what goes wrong with them.

`Files` is the seam for fault injection: tests override one primitive (`write`, `sync`, `replace`, ...) to
raise ENOSPC or to "crash" there. All failures of the operating system leave as `StorageError`.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

from p2pdiloco.errors import StorageError
from p2pdiloco.ports import Buffer

TEMP_SUFFIX = ".tmp"
NO_LINK: int = getattr(os, "O_NOFOLLOW", 0)
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}


def is_full(error: OSError) -> bool:
    """Tell whether the disk, the quota or the file size limit is exhausted."""
    return error.errno in _FULL


def storage_error(error: OSError, action: str, path: Path) -> StorageError:
    """Put an operating-system error into one clear sentence. `action`: "save", "read", "open", ..."""
    if is_full(error):
        hint = "free some space there; what was saved before is intact"
        return StorageError(f"cannot {action} {path}: the disk is full", hint)
    if error.errno in _FORBIDDEN:
        hint = "check owner and permissions of the folder, or choose another one with --data-dir"
        return StorageError(f"cannot {action} {path}: permission denied", hint)
    return StorageError(f"cannot {action} {path}: {error.strerror or error}")


class Files:
    """Durable writes. Primitives raise `OSError`, the composite operations `StorageError`."""

    # --- primitives (overridden by tests) ----------------------------------------------------------

    def write(self, file: BinaryIO, data: Buffer) -> None:
        """Write all of `data` to an unbuffered file."""
        view = memoryview(data).cast("B")
        while view.nbytes:
            view = view[file.write(view) :]

    def sync(self, file: BinaryIO) -> None:
        """Force a file's content to the disk."""
        os.fsync(file.fileno())

    def sync_folder(self, folder: Path) -> None:
        """Force a folder's entries (creations, renames) to the disk."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def replace(self, source: Path, target: Path) -> None:
        """Rename a file atomically over whatever is there."""
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Delete a file; absent is fine."""
        path.unlink(missing_ok=True)

    # --- operations --------------------------------------------------------------------------------

    def save(self, path: Path, chunks: Iterable[Buffer], *, durable: bool, private: bool = False) -> None:
        """Make `path` hold exactly `chunks`: the old content or the new one is there, never a mixture.

        `durable`: it survives a power cut once this returns. Otherwise it survives the process only.
        `private`: whatever the umask, nobody but this user can read it.

        Raises:
            StorageError: the temporary file is gone again; `path` holds its old content (or the new one,
                complete, if only its durability could not be had).
        """
        temporary = path.with_name(path.name + TEMP_SUFFIX)
        try:
            mode = 0o600 if private else 0o666
            # A link that somebody laid there would let us write over a file elsewhere.
            with open(
                temporary, "wb", 0, opener=lambda name, flags: os.open(name, flags | NO_LINK, mode)
            ) as file:
                if private:  # a left-over file keeps the mode that it had
                    os.fchmod(file.fileno(), mode)
                for chunk in chunks:
                    self.write(file, chunk)
                if durable:
                    self.sync(file)
            self.replace(temporary, path)
            if durable:
                self.sync_folder(path.parent)
        except OSError as error:
            # The first error is the one to report; a left-over temporary file goes at the next open.
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise storage_error(error, "save", path) from error

    def make_durable(self, path: Path) -> None:
        """Force the content of a file that was saved before to the disk; its name follows with its folder's.

        Raises: StorageError: perhaps nothing of it is there, whatever a later try says.
        """
        try:
            with path.open("rb", buffering=0) as file:
                self.sync(file)
        except OSError as error:
            raise storage_error(error, "save", path) from error

    def make_names_durable(self, folder: Path) -> None:
        """Force a folder's entries to the disk. Raises: StorageError."""
        try:
            self.sync_folder(folder)
        except OSError as error:
            raise storage_error(error, "save", folder) from error

    def append(self, path: Path, data: bytes) -> None:
        """Append durably to an existing file.

        Raises:
            StorageError: what the file ends in is not known.
        """
        try:
            with path.open("ab", buffering=0) as file:
                self.write(file, data)
                self.sync(file)
        except OSError as error:
            raise storage_error(error, "save", path) from error

    def read(self, path: Path) -> bytes:
        """Read the whole file. Raises: StorageError."""
        try:
            return path.read_bytes()
        except OSError as error:
            raise storage_error(error, "read", path) from error

    def delete(self, path: Path) -> None:
        """Delete a file; absent is fine. Raises: StorageError."""
        try:
            self.remove(path)
        except OSError as error:
            raise storage_error(error, "delete", path) from error

    def move(self, source: Path, target: Path) -> None:
        """Rename a file atomically. Raises: StorageError."""
        try:
            self.replace(source, target)
        except OSError as error:
            raise storage_error(error, "rename", source) from error

    def make_folder(self, folder: Path, private: bool = True) -> None:
        """Create a folder and its parents durably; present is fine. `private`: for this user only.

        Raises: StorageError.
        """
        if folder.is_dir():
            return
        self.make_folder(folder.parent, private)
        try:
            folder.mkdir(mode=0o700 if private else 0o755, exist_ok=True)
            self.sync_folder(folder.parent)
        except OSError as error:
            raise storage_error(error, "create", folder) from error

    def list_folder(self, folder: Path) -> list[Path]:
        """List the folder's entries, sorted by name. Raises: StorageError."""
        try:
            return sorted(folder.iterdir())
        except OSError as error:
            raise storage_error(error, "list", folder) from error
