"""Whatever happened to a file: never a crash, never wrong content, always a word about it."""

from __future__ import annotations

import errno
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
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
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.adapters.run_store import RunStore
from p2pdiloco.core.api.config import Timing
from p2pdiloco.core.api.events import VoteRecord
from p2pdiloco.daemon.payloads import SYNC_EVERY_S
from p2pdiloco.errors import StorageError

VOTES = [VoteRecord(0, 1, "ann"), VoteRecord(1, 1, "bob"), VoteRecord(0, 2, "cy"), VoteRecord(0, 4, "ann")]
FINAL_VOTES = {0: VOTES[3], 1: VOTES[1]}
edits = st.lists(
    st.tuples(st.integers(0, 1 << 20), st.integers(0, 255), st.sampled_from(["set", "insert", "delete"])),
    min_size=1,
    max_size=4,
)


def edited(data: bytes, changes: list[tuple[int, int, str]]) -> bytes:
    content = bytearray(data)
    for place, value, what in changes:
        place %= max(1, len(content))
        if what == "insert":
            content.insert(place, value)
        elif what == "delete":
            del content[place : place + 1 + value % 8]
        elif content:
            content[place] = value
    return bytes(content)


@contextmanager
def fresh_store() -> Iterator[tuple[Path, RunStore]]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder), RunStore(Path(folder), RUN, QuickDisk())


def corrupt_files(store: RunStore) -> list[Path]:
    return [path for path in store.folder.rglob("*") if ".corrupt" in path.name]


def check_checkpoint(data_dir: Path, path: Path, content: bytes) -> None:
    path.write_bytes(content)
    store = RunStore(data_dir, RUN, QuickDisk())
    number = loaded_number(store)
    problems = store.take_problems()
    if number == 2:  # the change was of no consequence (white space in the header, for example)
        assert problems == []
        return
    assert number == 1
    assert len(problems) == 1 and str(path) in problems[0]
    assert not path.exists() and len(corrupt_files(store)) == 1
    assert loaded_number(store) == 1 and store.take_problems() == []


def test_checkpoint_cut_anywhere_falls_back_to_the_older_one() -> None:
    with fresh_store() as (data_dir, store):
        save(store, 1)
        save(store, 2)
        path = checkpoint_path(store, 2)
        whole = path.read_bytes()
        for length in range(len(whole)):
            check_checkpoint(data_dir, path, whole[:length])
            assert not path.exists(), length


@settings(max_examples=150, deadline=None)
@given(edits)
def test_checkpoint_with_changed_bytes(changes: list[tuple[int, int, str]]) -> None:
    with fresh_store() as (data_dir, store):
        save(store, 1)
        save(store, 2)
        path = checkpoint_path(store, 2)
        check_checkpoint(data_dir, path, edited(path.read_bytes(), changes))


def test_checkpoint_under_another_name_is_not_taken(tmp_path: Path) -> None:
    store = RunStore(tmp_path, RUN)
    save(store, 1)
    checkpoint_path(store, 1).rename(checkpoint_path(store, 8))
    assert store.load_checkpoint(0) is None
    assert "version 1" in store.take_problems()[0]


def test_damaged_files_do_not_pile_up(tmp_path: Path) -> None:
    store = RunStore(tmp_path, RUN)
    for number in range(1, 9):
        save(store, number)
        checkpoint_path(store, number).write_bytes(b"garbage")
        store.load_checkpoint(0)
    assert sorted(path.name for path in corrupt_files(store)) == [
        "checkpoint-7.safetensors.corrupt",
        "checkpoint-8.safetensors.corrupt",
    ]


def check_updates(data_dir: Path, path: Path, content: bytes) -> None:
    first, second, third = chain(1, 3)
    path.write_bytes(content)
    store = RunStore(data_dir, RUN, QuickDisk())
    loaded = store.load_updates(0, 0)
    if len(loaded) == 3:
        assert loaded == [(update, payload_of(update.header.number)) for update in (first, second, third)]
    else:
        assert loaded == [(first, payload_of(1))]
        assert len(store.take_problems()) == 1 and not path.exists()
        assert store.load_updates(0, 0) == loaded


def updates_store(store: RunStore) -> Path:
    for update in chain(1, 3):
        store.save_update(update, payload_of(update.header.number), durable=False)
    return store.folder / "updates" / "000" / "2.update"


def test_update_cut_anywhere_ends_the_chain() -> None:
    with fresh_store() as (data_dir, store):
        path = updates_store(store)
        whole = path.read_bytes()
        for length in range(len(whole)):
            check_updates(data_dir, path, whole[:length])
            assert not path.exists(), length


@settings(max_examples=150, deadline=None)
@given(edits)
def test_update_with_changed_bytes(changes: list[tuple[int, int, str]]) -> None:
    with fresh_store() as (data_dir, store):
        path = updates_store(store)
        check_updates(data_dir, path, edited(path.read_bytes(), changes))


def test_votes_log_cut_anywhere_is_a_prefix_of_what_was_saved() -> None:
    with fresh_store() as (data_dir, store):
        for vote in VOTES:
            store.save_vote(vote)
        log = store.folder / "votes.log"
        whole = log.read_bytes()
        for length in range(len(whole) + 1):
            log.write_bytes(whole[:length])
            complete = (whole[:length] + b"\n").count(b"}\n")
            expected = {vote.fragment: vote for vote in VOTES[:complete]}
            reopened = RunStore(data_dir, RUN, QuickDisk())
            assert votes(reopened) == expected
            tail = whole[:length].rpartition(b"\n")[2]
            assert bool(reopened.take_problems()) == (tail != b"" and not tail.endswith(b"}")), length
            assert corrupt_files(reopened) == []
            reopened.save_vote(VoteRecord(2, 9, "new"))
            again = RunStore(data_dir, RUN, QuickDisk())
            assert votes(again) == {**expected, 2: VoteRecord(2, 9, "new")} and again.take_problems() == []


@settings(max_examples=150, deadline=None)
@given(edits)
def test_votes_log_with_changed_bytes_never_invents_and_never_forgets_silently(
    changes: list[tuple[int, int, str]],
) -> None:
    with fresh_store() as (data_dir, store):
        for vote in VOTES:
            store.save_vote(vote)
        log = store.folder / "votes.log"
        log.write_bytes(edited(log.read_bytes(), changes))
        reopened = RunStore(data_dir, RUN, QuickDisk())
        assert all(vote in VOTES for vote in votes(reopened).values())
        assert votes(reopened) == FINAL_VOTES or reopened.take_problems() or whole_lines_gone(log)
        again = RunStore(data_dir, RUN, QuickDisk())
        assert votes(again) == votes(reopened) and again.take_problems() == []


def whole_lines_gone(log: Path) -> bool:
    """Cutting exactly whole lines off leaves a sound, shorter log: no file can tell."""
    return log.read_bytes().count(b"\n") < len(VOTES)


def test_a_damaged_line_costs_only_its_own_vote_and_the_file_is_kept(tmp_path: Path) -> None:
    store = RunStore(tmp_path, RUN)
    for vote in VOTES:
        store.save_vote(vote)
    log = store.folder / "votes.log"
    for turn in range(1, 8):
        log.write_bytes(b"garbage\n" + log.read_bytes())
        reopened = RunStore(tmp_path, RUN)
        assert votes(reopened) == FINAL_VOTES
        assert len(reopened.take_problems()) == 1
        assert log.with_name(f"votes.log.corrupt-{turn}").exists()
    assert len(corrupt_files(store)) == 5


@pytest.mark.parametrize("name", ["checkpoint-5.safetensors", "notes.txt", "checkpoint-x.safetensors.tmp"])
def test_foreign_files_do_no_harm(tmp_path: Path, name: str) -> None:
    store = RunStore(tmp_path, RUN)
    save(store, 2)
    (checkpoint_path(store, 0).parent / name).write_bytes(b"\x80\x04}.")
    assert loaded_number(RunStore(tmp_path, RUN)) == 2


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


# A power cut at any moment: what comes back is never behind what others count as safe.

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
