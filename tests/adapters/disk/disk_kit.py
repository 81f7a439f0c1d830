"""Builders and faulty disks for the persistence tests."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import BinaryIO

import numpy as np

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.adapters.run_store import RunStore
from p2pdiloco.core.api.events import VoteRecord
from p2pdiloco.core.api.types import WHOLE_RUN, Stamp, Watermark
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.hashing import content_digest

RUN = "5a" * 32
ROOT = b"r" * 32


def payload_of(number: int) -> bytes:
    """The update that version `number` names."""
    return b"payload %d" % number


def version(number: int, parent: bytes = ROOT, fragment: int = 0, run: str = RUN) -> SignedVersion:
    header = VersionHeader(
        run,
        "all",
        fragment,
        number,
        parent,
        3,
        "syncer",
        100 * number,
        b"s" * 32,
        content_digest(payload_of(number)),
        7,
        "int8",
        (),
    )
    return SignedVersion(header, b"signature")


def chain(first: int, last: int, parent: bytes = ROOT) -> list[SignedVersion]:
    versions: list[SignedVersion] = []
    for number in range(first, last + 1):
        versions.append(version(number, parent))
        parent = versions[-1].header.digest()
    return versions


def votes(store: RunStore) -> dict[int, VoteRecord]:
    """Fragment -> its newest vote in the group of the whole run."""
    return {vote.fragment: vote for vote in store.votes().values() if vote.group == WHOLE_RUN}


def vectors(number: int) -> tuple[np.ndarray, np.ndarray]:
    theta = np.arange(9, dtype=np.float32) + number
    return theta, -theta


def save(store: RunStore, number: int) -> None:
    theta, momentum = vectors(number)
    watermarks = (Watermark("learner", Stamp(1, number), number),)
    store.save_checkpoint(version(number), watermarks, theta, momentum)


def loaded_number(store: RunStore) -> int | None:
    """The number of the loaded checkpoint, whose whole content must be what was saved under it."""
    saved = store.load_checkpoint(0)
    if saved is None:
        return None
    number = saved.version.header.number
    theta, momentum = vectors(number)
    assert saved.version == version(number)
    assert saved.watermarks == (Watermark("learner", Stamp(1, number), number),)
    assert np.array_equal(saved.theta, theta) and np.array_equal(saved.momentum, momentum)
    return number


def checkpoint_path(store: RunStore, number: int) -> Path:
    return store.folder / "fragments" / "000" / f"checkpoint-{number}.safetensors"


class QuickDisk(Files):
    """Does not wait for the hardware: for tests that save thousands of files and cut no power."""

    def sync(self, file: BinaryIO) -> None:
        pass

    def sync_folder(self, folder: Path) -> None:
        pass


class FullDisk(Files):
    """Takes `room_bytes` more, then ENOSPC."""

    room_bytes = 1 << 60

    def write(self, file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
        view = memoryview(data).cast("B")
        fits = view[: self.room_bytes]
        super().write(file, fits)
        self.room_bytes -= fits.nbytes
        if fits.nbytes < view.nbytes:
            raise OSError(errno.ENOSPC, "No space left on device")


class Crash(BaseException):
    """The process ends here: nothing may be cleaned up after it."""


class CrashingDisk(QuickDisk):
    """Crashes in the `at`-th primitive: a write is half done, everything else not at all."""

    def __init__(self, at: int) -> None:
        self.left = at

    def _count(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Crash

    def write(self, file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
        try:
            self._count()
        except Crash:
            view = memoryview(data).cast("B")
            super().write(file, view[: view.nbytes // 2])
            raise
        super().write(file, data)

    def sync(self, file: BinaryIO) -> None:
        self._count()
        super().sync(file)

    def sync_folder(self, folder: Path) -> None:
        self._count()
        super().sync_folder(folder)

    def replace(self, source: Path, target: Path) -> None:
        self._count()
        super().replace(source, target)

    def remove(self, path: Path) -> None:
        self._count()
        super().remove(path)
