"""A node's data folder and the lock that gives it to one running node.

<data_dir>/identity.key                      the node's Ed25519 key
           lock                              flock held while a node runs here
           events.jsonl                      adapters.disk.events_log
           joined.txt                        daemon.run_files.joined
           runs/<first 16 of run id>/        adapters.disk.run_store, learner.safetensors

Listed in docs/reference/disk.md, section 1.
"""

from __future__ import annotations

import fcntl
import logging
import os
import stat
from pathlib import Path

from p2pdiloco.adapters.disk.files import storage_error
from p2pdiloco.errors import StorageError, invariant

logger = logging.getLogger(__name__)


class DataDirInUse(StorageError):
    """Error of a data folder that another running node or bootstrap has."""


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
        """Keep others out of a folder that was there before; say so where that is not ours to do."""
        try:
            found = self.path.stat()
            mode = stat.S_IMODE(found.st_mode)
            if not mode & 0o077:
                return
            # A sticky bit is on folders that are everybody's, such as /tmp.
            if found.st_uid == os.geteuid() and not mode & stat.S_ISVTX:
                self.path.chmod(0o700)
                logger.info("the data folder %s had mode %04o, and is its owner's only now", self.path, mode)
                return
        except OSError as error:
            raise storage_error(error, "make private", self.path) from error
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
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise storage_error(error, "open", path) from error
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
    try:
        folder.lock()
    except DataDirInUse:
        return True
    folder.unlock()
    return False
