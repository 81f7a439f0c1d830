"""Whatever happened to a file: never a crash, never wrong content, always a word about it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from disk_kit import RUN, QuickDisk, chain, checkpoint_path, loaded_number, payload_of, save, votes
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdiloco.adapters.run_store import RunStore
from p2pdiloco.core.api.effects import VoteRecord

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
