"""Places where somebody wants results: tried before the work for them begins, and left as they were."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path

from p2pdiloco.errors import StorageError

PREFIX = ".p2pdiloco-"


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
            with contextlib.suppress(OSError):  # never made
                place.rmdir()


def _write_into(folder: Path) -> None:
    """Write a file there, and delete it. Raises: OSError."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=PREFIX) as file:
        file.write(PREFIX.encode())


def _cannot(error: OSError, path: Path, flag: str) -> StorageError:
    return StorageError(
        f"{flag} {path} cannot be written: {error.strerror}",
        f"give a place that this user may write to with {flag}",
    )
