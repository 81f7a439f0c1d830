from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest
from deadlines import within_s
from disk_kit import (
    RUN,
    Crash,
    CrashingDisk,
    FullDisk,
    QuickDisk,
    chain,
    checkpoint_path,
    loaded_number,
    payload_of,
    save,
    votes,
)

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.adapters.run_store import RunStore
from p2pdiloco.core.api.effects import VoteRecord
from p2pdiloco.errors import StorageError


def life(store: RunStore, done: list[str]) -> None:
    """Some minutes of a node; `done` is what it could rely on having saved."""
    for number, update in enumerate(chain(1, 3), start=1):
        store.save_vote(VoteRecord(0, number, f"candidate {number}"))
        done.append("vote")
        store.save_update(update, payload_of(number), durable=True)
        done.append("update")
        save(store, number)
        done.append("checkpoint")


def test_a_crash_at_any_operation_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    for at in range(1000):
        data_dir = tmp_path / str(at)
        data_dir.mkdir()
        done: list[str] = []
        try:
            life(RunStore(data_dir, RUN, CrashingDisk(at)), done)
        except Crash:
            pass
        else:
            break
        store = RunStore(data_dir, RUN, QuickDisk())
        saved = {name: done.count(name) for name in ("vote", "update", "checkpoint")}
        # What was under way may or may not have made it; nothing else may differ.
        vote = votes(store).get(0, VoteRecord(0, 0, ""))
        assert vote.term in (saved["vote"], saved["vote"] + 1)
        assert len(store.load_updates(0, 0)) in (saved["update"], saved["update"] + 1)
        assert (loaded_number(store) or 0) in (saved["checkpoint"], saved["checkpoint"] + 1)
        assert list(store.folder.rglob("*.tmp")) == []
        assert all("unfinished line" in problem for problem in store.take_problems())
        save(store, 4)
        assert loaded_number(store) == 4
    assert at > 30


@pytest.mark.parametrize("room_bytes", [0, 1, 300, 560])
def test_full_disk_while_saving_a_checkpoint(tmp_path: Path, room_bytes: int) -> None:
    disk = FullDisk()
    store = RunStore(tmp_path, RUN, disk)
    save(store, 1)
    disk.room_bytes = room_bytes
    with pytest.raises(StorageError, match=r"checkpoint-2\.safetensors: the disk is full") as caught:
        save(store, 2)
    assert "intact" in caught.value.hint
    assert [path.name for path in checkpoint_path(store, 0).parent.iterdir()] == ["checkpoint-1.safetensors"]
    assert loaded_number(store) == 1
    disk.room_bytes = 1 << 20
    save(store, 2)
    assert loaded_number(store) == 2


@pytest.mark.parametrize("room_bytes", [0, 1, 40])
def test_full_disk_while_voting_then_room_again(tmp_path: Path, room_bytes: int) -> None:
    disk = FullDisk()
    store = RunStore(tmp_path, RUN, disk)
    store.save_vote(VoteRecord(0, 1, "ann"))
    disk.room_bytes = room_bytes
    with pytest.raises(StorageError, match="the disk is full"):
        store.save_vote(VoteRecord(0, 2, "bob"))
    assert votes(store) == {0: VoteRecord(0, 1, "ann")}
    disk.room_bytes = 1 << 20
    store.save_vote(VoteRecord(0, 2, "cy"))  # the vote for bob was never sent
    reopened = RunStore(tmp_path, RUN)
    assert votes(reopened) == votes(store) == {0: VoteRecord(0, 2, "cy")}
    assert reopened.take_problems() == []


def test_full_disk_while_saving_an_update(tmp_path: Path) -> None:
    disk = FullDisk()
    store = RunStore(tmp_path, RUN, disk)
    first, second = chain(1, 2)
    store.save_update(first, payload_of(1), durable=True)
    disk.room_bytes = 10
    for durable in (True, False):
        with pytest.raises(StorageError, match="the disk is full"):
            store.save_update(second, payload_of(2), durable=durable)
    assert store.load_updates(0, 0) == [(first, payload_of(1))]


FILE_SIZE_LIMIT = """
import resource, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from typing import BinaryIO
import numpy as np
from disk_kit import RUN, loaded_number, save, version
from p2pdiloco.adapters.run_store import RunStore
from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.errors import StorageError
store = RunStore(Path(sys.argv[1]), RUN)
save(store, 1)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
big = np.zeros(50_000, dtype=np.float32)
try:
    store.save_checkpoint(version(2), (), big, big)
except StorageError as error:
    print(error)
print(loaded_number(store), [path.name for path in store.folder.rglob("*.tmp")])
"""


@pytest.mark.process
def test_the_operating_systems_own_refusal_in_mid_write(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FILE_SIZE_LIMIT, str(tmp_path), str(Path(__file__).parent)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=within_s(60), check=True).stdout
    sentence, state = output.splitlines()
    assert "checkpoint-2.safetensors: the disk is full" in sentence
    assert state == "1 []"


class RecordingDisk(Files):
    """Writes down the order of what matters when the power is cut."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def sync(self, file: BinaryIO) -> None:
        super().sync(file)
        self.order.append(f"sync {Path(file.name).name}")

    def replace(self, source: Path, target: Path) -> None:
        super().replace(source, target)
        self.order.append(f"rename {target.name}")

    def sync_folder(self, folder: Path) -> None:
        super().sync_folder(folder)
        self.order.append(f"sync {folder.name}/")


def test_what_must_be_durable_is_on_the_disk_before_the_call_returns(tmp_path: Path) -> None:
    disk = RecordingDisk()
    store = RunStore(tmp_path, RUN, disk)
    store.save_update(chain(1, 1)[0], b"", durable=True)
    assert disk.order[-4:] == ["sync updates/", "sync 1.update.tmp", "rename 1.update", "sync 000/"]
    disk.order.clear()
    save(store, 1)
    name = "checkpoint-1.safetensors"
    assert disk.order == ["sync fragments/", f"sync {name}.tmp", f"rename {name}", "sync 000/"]
    store.save_vote(VoteRecord(0, 1, "ann"))
    disk.order.clear()
    store.save_vote(VoteRecord(0, 2, "ann"))
    assert disk.order == ["sync votes.log"]


def test_a_link_where_the_temporary_file_goes_is_not_followed(tmp_path: Path) -> None:
    victim, out = tmp_path / "victim", tmp_path / "view.json"
    victim.write_text("mine")
    out.with_name("view.json.tmp").symlink_to(victim)
    with pytest.raises(StorageError):
        Files().save(out, [b"x"], durable=False)
    assert victim.read_text() == "mine" and not out.exists()
    Files().save(out, [b"x"], durable=False)
    assert out.read_bytes() == b"x" and victim.read_text() == "mine"
