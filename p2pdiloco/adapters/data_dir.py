"""A node's data folder: its lock, file operations, and small files in it.

    identity.key                      the node's Ed25519 key
    lock                              flock held while a node runs here
    events.jsonl                      `EventsLog`
    joined.json                       ways into runs (`daemon.run_files.known_runs`)
    runs/<first 16 of run id>/        `adapters.run_store`, learner.safetensors

`DataDir` gives the folder to one running node. `Files` writes durably. `Spool` is scratch for payloads that
find no place in memory. `try_file` and `try_folder` try places where somebody wants results, before the work
for them begins, and leave them as they were.

Listed in docs/reference/disk.md, section 1.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from p2pdiloco.errors import StorageError, invariant, json_line
from p2pdiloco.ports import Buffer
from p2pdiloco.util import Now, clear_folder_at

logger = logging.getLogger(__name__)


class DataDirInUse(StorageError):
    """Error of a data folder that another running node or bootstrap has."""


def own_peer(folder: Path, parents: bool = False) -> str:
    """Find the peer id of the node whose data folder this is; folder and identity are made where they are
    missing. `parents`: see `DataDir`.

    Raises: StorageError.
    """
    from p2pdiloco.identity import Identity  # --help needs none of it

    return Identity.load_or_create(DataDir(folder, parents=parents).path / "identity.key").peer_id


class DataDir:
    """A usable data folder: it exists, is a folder, and can be read and written."""

    def __init__(self, path: Path, *, create: bool = True, parents: bool = False) -> None:
        """
        Args:
            create: make the folder if it is missing (its parent must exist), and private if it is ours.
            parents: make missing parents too; for default locations. A folder that a person typed
                should have a parent, else it is more likely a typo or a disk that is not mounted.

        Raises:
            StorageError: missing, not a folder, or not readable and writable.
        """
        self.path = path
        self._lock: int | None = None
        try:
            if create:
                path.mkdir(mode=0o700, parents=parents, exist_ok=True)
            list(path.iterdir())
        except FileNotFoundError as error:
            missing = path.parent if create else path
            if missing.is_dir():  # /proc and the like
                hint = "choose another one with --data-dir"
                raise StorageError(
                    f"the data folder {path} cannot be made: {missing} takes no folders", hint
                ) from error
            hint = "check for a typo or a disk that is not mounted, or create the folder"
            raise StorageError(f"the data folder {path} does not exist: no {missing}", hint) from error
        except (NotADirectoryError, FileExistsError) as error:
            hint = "give a folder with --data-dir"
            raise StorageError(f"the data folder {path} is a file, not a folder", hint) from error
        except OSError as error:
            raise storage_error(error, "open", path) from error
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            hint = "check owner and permissions of the folder, or choose another one with --data-dir"
            raise StorageError(f"cannot write into the data folder {path}: permission denied", hint)
        if create:
            self._make_private()

    def _make_private(self) -> None:
        """A folder that was there before may not be ours to change: then it says so."""
        with storage_errors("make private", self.path):
            found = self.path.stat()
            mode = stat.S_IMODE(found.st_mode)
            if not mode & 0o077:
                return
            # A sticky bit is on folders that are everybody's, such as /tmp.
            if found.st_uid == os.geteuid() and not mode & stat.S_ISVTX:
                self.path.chmod(0o700)
                logger.info("the data folder %s had mode %04o, and is its owner's only now", self.path, mode)
                return
        logger.warning(
            "the data folder %s has mode %04o: others may see what is in it, and it is not ours to change",
            self.path,
            mode,
        )

    def lock(self) -> None:
        """Take the folder for this process, until `unlock` or the process ends, however it ends.

        The descriptor is closed in programs that we start (close-on-exec), so that a child that outlives
        us does not keep the lock; processes made by a bare fork do keep it.

        Raises:
            DataDirInUse: another running node or bootstrap has it (names its process).
            StorageError: it cannot be opened.
        """
        invariant(self._lock is None, "the data folder is locked twice")
        path = self.path / "lock"
        with storage_errors("open", path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        except BlockingIOError as error:
            owner = os.pread(descriptor, 20, 0).decode("ascii", "replace").strip()
            os.close(descriptor)
            who = f" (process {owner})" if owner else ""
            hint = "stop that one first, or give this one its own folder with --data-dir"
            message = f"the data folder {self.path} is in use by another running node or bootstrap{who}"
            raise DataDirInUse(message, hint) from error
        except OSError as error:
            os.close(descriptor)
            raise storage_error(error, "lock", path) from error
        self._lock = descriptor

    def unlock(self) -> None:
        """Give the folder back; without effect if it is not locked."""
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> DataDir:
        self.lock()
        return self

    def __exit__(self, *_: object) -> None:
        self.unlock()


def is_in_use(path: Path) -> bool:
    """Tell whether a running node or bootstrap has this folder. Raises: StorageError (it cannot be read)."""
    folder = DataDir(path, create=False)
    if not (path / "lock").exists():
        return False  # and nothing is left in a folder that is no node's
    try:
        folder.lock()
    except DataDirInUse:
        return True
    folder.unlock()
    return False


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


@contextmanager
def storage_errors(action: str, path: Path) -> Iterator[None]:
    """Context in which errors of the system become a `StorageError`, which says what cannot be done."""
    try:
        yield
    except OSError as error:
        raise storage_error(error, action, path) from error


class Files:
    """Durable writes. Primitives raise `OSError`, the composite operations `StorageError`.

    This is the seam for fault injection: tests override one primitive (`write`, `sync`, `replace`, ...) to
    raise ENOSPC or to "crash" there.
    """

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
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise storage_error(error, "save", path) from error

    def make_durable(self, path: Path) -> None:
        """Force the content of a file that was saved before to the disk; its name follows with its folder's.

        Raises: StorageError: perhaps nothing of it is there, whatever a later try says.
        """
        with storage_errors("save", path), path.open("rb", buffering=0) as file:
            self.sync(file)

    def make_names_durable(self, folder: Path) -> None:
        """Force a folder's entries to the disk. Raises: StorageError."""
        with storage_errors("save", folder):
            self.sync_folder(folder)

    def append(self, path: Path, data: bytes) -> None:
        """Append durably to an existing file.

        Raises:
            StorageError: what the file ends in is not known.
        """
        with storage_errors("save", path), path.open("ab", buffering=0) as file:
            self.write(file, data)
            self.sync(file)

    def read(self, path: Path) -> bytes:
        """Read the whole file. Raises: StorageError."""
        with storage_errors("read", path):
            return path.read_bytes()

    def delete(self, path: Path) -> None:
        """Delete a file; absent is fine. Raises: StorageError."""
        with storage_errors("delete", path):
            self.remove(path)

    def move(self, source: Path, target: Path) -> None:
        """Rename a file atomically. Raises: StorageError."""
        with storage_errors("rename", source):
            self.replace(source, target)

    def make_folder(self, folder: Path, private: bool = True) -> None:
        """Create a folder and its parents durably; present is fine. `private`: for this user only.

        Raises: StorageError.
        """
        if folder.is_dir():
            return
        self.make_folder(folder.parent, private)
        with storage_errors("create", folder):
            folder.mkdir(mode=0o700 if private else 0o755, exist_ok=True)
            self.sync_folder(folder.parent)

    def list_folder(self, folder: Path) -> list[Path]:
        """List the folder's entries, sorted by name. Raises: StorageError."""
        with storage_errors("list", folder):
            return sorted(folder.iterdir())


DISK_BLOCK_BYTES = 512
"""Bytes of a block of `st_blocks`, on every system."""


TRIAL_PREFIX = ".p2pdiloco-"


def try_file(path: Path, flag: str) -> None:
    """Try whether a file can be written there. Raises: StorageError (names the flag)."""
    if path.is_dir():
        raise StorageError(f"{flag} {path} is a folder", f"name a file with {flag}")
    try:
        if path.exists():
            path.open("ab").close()
        _write_into(path.parent)
    except OSError as error:
        raise _cannot(error, path, flag) from error


def try_folder(folder: Path, flag: str) -> None:
    """Try whether files can be written into a folder, missing or not. Raises: StorageError."""
    missing = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _write_into(folder)
    except OSError as error:
        raise _cannot(error, folder, flag) from error
    finally:
        for place in missing:
            with suppress(OSError):  # never made
                place.rmdir()


def _write_into(folder: Path) -> None:
    """Raises: OSError."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=TRIAL_PREFIX) as file:
        file.write(TRIAL_PREFIX.encode())


def _cannot(error: OSError, path: Path, flag: str) -> StorageError:
    return StorageError(
        f"{flag} {path} cannot be written: {error.strerror}",
        f"give a place that this user may write to with {flag}",
    )


FieldValue = str | int | float | bool | dict[str, float] | None
MAX_TEXT = 500
"""Characters of one text value; a peer's words are in here."""
OWN_KEYS = frozenset({"t", "mono", "kind", "fragment", "reason"})
ROTATED_SUFFIX = ".1"


class EventsLog:
    """Diary of a node for people and scripts: one JSON object a line (schema: docs/reference/events.md).

    Each line is appended with one system call, so that a reader and a crash see whole lines.

    At `max_bytes` the file becomes `<name>.1` (replacing an older one): at most twice that is on disk.
    A line that cannot be written is dropped and counted in `dropped`: a diary never stops a node.
    """

    def __init__(
        self,
        path: Path,
        max_bytes: int = 64 << 20,
        *,
        wall_s: Now = time.time,
        monotonic_s: Now = time.monotonic,
        write: Callable[[int, bytes], int] = os.write,
    ) -> None:
        """
        Raises:
            StorageError: the file cannot be opened (a full disk is no reason: lines are dropped then).
        """
        self.path = path
        self.max_bytes = max_bytes
        self.dropped = 0
        self._wall_s = wall_s
        self._monotonic_s = monotonic_s
        self._write = write
        self._descriptor: int | None = None
        self._bytes = 0
        self._torn = False
        try:
            self._open()
        except OSError as error:
            if not is_full(error):
                raise storage_error(error, "open", path) from error

    def write(
        self,
        kind: str,
        fragment: int | None = None,
        reason: str = "",
        fields: Iterable[tuple[str, FieldValue]] = (),
    ) -> None:
        """Append one line. Never raises for the disk's sake."""
        entry: dict[str, FieldValue] = {
            "t": round(self._wall_s(), 6),
            "mono": round(self._monotonic_s(), 6),
            "kind": kind,
            "fragment": fragment,
            "reason": reason[:MAX_TEXT],
        }
        for key, value in fields:
            name = f"{key}_" if key in OWN_KEYS else key
            entry[name] = value[:MAX_TEXT] if isinstance(value, str) else value
        try:
            self._append(json_line(entry).encode() + b"\n")
        except OSError:
            self.dropped += 1

    def close(self) -> None:
        """Close the file; a later `write` opens it again."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _append(self, line: bytes) -> None:
        if self._bytes and self._bytes + len(line) > self.max_bytes:
            self.close()
            self.path.replace(self.path.with_name(self.path.name + ROTATED_SUFFIX))
        if self._descriptor is None:
            self._open()
        assert self._descriptor is not None
        content = b"\n" + line if self._torn else line
        written = self._write(self._descriptor, content)
        self._bytes += written
        if written:
            self._torn = content[written - 1 : written] != b"\n"
        if written < len(content):
            # The disk became full in mid-line. Not retried: the line is lost, the next one starts afresh.
            self.dropped += 1

    def _open(self) -> None:
        clear_folder_at(self.path)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o600)
        with suppress(OSError):  # not ours
            os.fchmod(self._descriptor, 0o600)  # of earlier versions
        self._bytes = os.fstat(self._descriptor).st_size
        self._torn = bool(self._bytes) and os.pread(self._descriptor, 1, self._bytes - 1) != b"\n"
