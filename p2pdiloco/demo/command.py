"""Frame of the commands demo and chaos: their folder, signals, files that can be written."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from p2pdiloco.errors import StorageError, UserError


class Interrupted(BaseException):
    """The person wants to stop. Not an `Exception`: no handler on the way may take it for a failure."""


def write(path: Path, data: bytes) -> None:
    """Raises: StorageError."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error


@contextmanager
def demo_folder(keep: Path | None) -> Iterator[Path]:
    """The folder of all processes: the one to keep, or a temporary one."""
    if keep is None:
        folder = Path(tempfile.mkdtemp(prefix="p2pdiloco-demo-"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise UserError(f"{keep} is not empty", "give --keep a new folder")
    except OSError as error:
        raise StorageError(f"{keep}: cannot be used: {error.strerror}") from error
    yield keep.resolve()


@contextmanager
def stop_signals() -> Iterator[threading.Event]:
    """Set by Ctrl-C, SIGTERM and a closed terminal."""
    stop = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda *_: stop.set()) for number in numbers}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
