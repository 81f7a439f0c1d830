"""A power cut at any moment: what comes back is never behind what others count as safe."""

from __future__ import annotations

import errno
import random
from pathlib import Path
from typing import BinaryIO

import pytest
from disk_kit import RUN, QuickDisk, chain, payload_of, save

from p2pdiloco.adapters.run_store import RunStore
from p2pdiloco.core.api.config import Timing
from p2pdiloco.daemon.payloads import SYNC_EVERY_S
from p2pdiloco.errors import StorageError

DURABLE_S = Timing().durable_s


class Recording(QuickDisk):
    """A disk that knows which contents and names a power cut would take: all that was never synced."""

    def __init__(self) -> None:
        self.content: set[Path] = set()
        self.names: set[Path] = set()
        self.fails = False

    def replace(self, source: Path, target: Path) -> None:
        super().replace(source, target)
        if source in self.content:
            self.content.discard(source)
            self.content.add(target)
        self.names.add(target)

    def write(self, file: BinaryIO, data: bytes | bytearray | memoryview) -> None:
        super().write(file, data)
        self.content.add(Path(file.name))

    def sync(self, file: BinaryIO) -> None:
        if self.fails:
            self.fails = False  # as Linux: the next sync of that file succeeds, and its pages are lost
            raise OSError(errno.EIO, "Input/output error")
        self.content.discard(Path(file.name))

    def sync_folder(self, folder: Path) -> None:
        self.names -= {path for path in self.names if path.parent == folder}

    def cut(self) -> None:
        for path in self.content & self.names:
            path.unlink(missing_ok=True)
        for path in self.content - self.names:
            path.write_bytes(b"")
        for path in self.names - self.content:
            path.unlink(missing_ok=True)


def sync_all(store: RunStore) -> int:
    return sum(store.unsynced.sync(fragment) for fragment in store.unsynced.fragments())


def head_after_cut(store: RunStore, disk: Recording, folder: Path) -> int:
    disk.cut()
    found = RunStore(folder, RUN).load_updates(0, 1)
    return found[-1][0].header.number if found else 1


def test_the_disk_has_time_enough_to_sync_what_others_count_on() -> None:
    assert 2 * SYNC_EVERY_S <= DURABLE_S, "an interval, and as long for writing and syncing"


@pytest.mark.parametrize("seed", range(12))
def test_what_comes_back_is_not_behind_what_others_count_as_safe(tmp_path: Path, seed: int) -> None:
    chance, disk = random.Random(seed), Recording()
    store = RunStore(tmp_path, RUN, disk)
    save(store, 1)
    cut_s, every_s = chance.uniform(1.0, 100.0), chance.choice((0.5, 2.0, 7.0, 15.0))
    saved: list[tuple[float, int]] = []
    own = 1
    now, next_sync_s = 0.0, SYNC_EVERY_S
    for version in chain(2, 300):
        now += every_s
        while next_sync_s <= min(now, cut_s):
            sync_all(store)
            next_sync_s += SYNC_EVERY_S
        if now > cut_s:
            break
        number = version.header.number
        is_own = chance.random() < 0.1
        store.save_update(version, payload_of(number), durable=is_own)
        saved.append((now, number))
        own = number if is_own else own
    safe = max((number for at, number in saved if at <= cut_s - DURABLE_S), default=1)
    back = head_after_cut(store, disk, tmp_path)
    assert back >= safe and back >= own, "neither what others count on, nor a version of our own, is lost"


def test_what_a_sync_failed_for_counts_as_lost_until_a_checkpoint_has_it(tmp_path: Path) -> None:
    disk = Recording()
    store = RunStore(tmp_path, RUN, disk)
    save(store, 1)
    for version in chain(2, 4):
        store.save_update(version, payload_of(version.header.number), durable=False)
    assert store.unsynced.first(0) == 2
    disk.fails = True
    with pytest.raises(StorageError, match="Input/output error"):
        sync_all(store)
    assert sync_all(store) == 0 and store.unsynced.first(0) == 2, "a second try says nothing"
    save(store, 3)
    assert store.unsynced.first(0) == 4
    store.prune_updates(0, 5)
    assert store.unsynced.first(0) is None and store.unsynced.fragments() == []
