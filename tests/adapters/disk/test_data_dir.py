from __future__ import annotations

import asyncio
import errno
import gc
import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from deadlines import within_s

from p2pdiloco.adapters.data_dir import DataDir, EventsLog, is_in_use, try_file, try_folder
from p2pdiloco.adapters.spool import Spool
from p2pdiloco.config.settings import DemoSettings, NodeSettings
from p2pdiloco.daemon.learner_host import try_socket
from p2pdiloco.daemon.start import try_paths
from p2pdiloco.demo import demo
from p2pdiloco.errors import InvariantViolation, StorageError, UserError

HOLD = """
import subprocess, sys
from pathlib import Path
from p2pdiloco.adapters.data_dir import DataDir
DataDir(Path(sys.argv[1])).lock()
print("locked,", end=" ", flush=True)
child = "print('child is up', flush=True); import sys; sys.stdin.read()"
subprocess.run([sys.executable, "-c", child], close_fds=False)
"""
OPEN_AS_NOBODY = """
import os, sys
from pathlib import Path
from p2pdiloco.adapters.data_dir import DataDir
from p2pdiloco.errors import StorageError
if os.geteuid() == 0:
    os.seteuid(65534)
try:
    DataDir(Path(sys.argv[1]))
except StorageError as error:
    print(error)
"""


@pytest.mark.process
def test_second_node_is_refused_until_the_first_is_dead_even_if_its_child_lives_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as first:
        assert first.stdin is not None and first.stdout is not None
        try:
            assert first.stdout.readline() == b"locked, child is up\n"
            folder = DataDir(tmp_path)
            with pytest.raises(
                StorageError, match=f"in use by another running node or bootstrap .process {first.pid}."
            ):
                folder.lock()
            first.kill()
            first.wait()
            with folder, pytest.raises(StorageError, match="in use"):
                DataDir(tmp_path).lock()
            with DataDir(tmp_path):
                pass
        finally:
            first.kill()
            first.stdin.close()  # ends the child
            assert first.stdout.read() == b""  # and now it is gone


def test_new_folder_is_made_private_but_only_in_an_existing_parent(tmp_path: Path) -> None:
    assert DataDir(tmp_path / "new").path.stat().st_mode & 0o777 == 0o700
    with pytest.raises(StorageError, match="does not exist") as caught:
        DataDir(tmp_path / "typo" / "node")
    assert str(tmp_path / "typo") in str(caught.value) and caught.value.hint
    with pytest.raises(StorageError, match="does not exist"):
        DataDir(tmp_path / "absent", create=False)
    assert DataDir(tmp_path / "deep" / "er", parents=True).path.is_dir()


def test_what_others_could_see_is_closed_to_them_or_it_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(0o755)
    DataDir(folder, create=False)
    assert folder.stat().st_mode & 0o777 == 0o755, "who only reads leaves it as it is"
    DataDir(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    caplog.clear()
    folder.chmod(0o1777)
    DataDir(folder)
    assert folder.stat().st_mode & 0o1777 == 0o1777, "such as /tmp"
    folder.chmod(0o755)
    monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)
    DataDir(folder)
    assert folder.stat().st_mode & 0o777 == 0o755
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 2
    assert all("not ours to change" in record.getMessage() for record in caplog.records)
    log = tmp_path / "events.jsonl"
    log.touch(mode=0o644)
    EventsLog(log).close()
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_parent_that_takes_no_folders_is_not_called_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def as_in_proc(path: Path, *_: object, **__: object) -> None:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))

    monkeypatch.setattr(Path, "mkdir", as_in_proc)
    with pytest.raises(StorageError, match=f"cannot be made: {tmp_path} takes no folders") as caught:
        DataDir(tmp_path / "x")
    assert "--data-dir" in caught.value.hint


def test_a_file_is_not_a_data_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageError, match="file"):
            DataDir(path)


@pytest.mark.process
@pytest.mark.parametrize("mode", [0o000, 0o500])
def test_a_folder_without_permission_is_named(tmp_path: Path, mode: int) -> None:
    folder = tmp_path / "private"
    folder.mkdir()
    tops = [tmp_path, *tmp_path.parents]
    opened = [(top, top.stat().st_mode) for top in tops if top.stat().st_uid == os.geteuid()]
    opened = [(top, top_mode) for top, top_mode in opened if not top_mode & 0o001]
    try:
        for top, top_mode in opened:
            top.chmod(top_mode | 0o011)
        folder.chmod(mode)
        command = [sys.executable, "-c", OPEN_AS_NOBODY, str(folder)]
        output = subprocess.run(
            command, capture_output=True, text=True, timeout=within_s(60), check=True
        ).stdout
    finally:
        folder.chmod(0o700)
        for top, top_mode in opened:
            top.chmod(top_mode)
    assert "permission denied" in output and str(folder) in output


# Scratch for payloads: what lies where, what goes back, and a disk that is full.


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    made = Spool(tmp_path, most_bytes=3000, spare_bytes=0)
    yield made
    made.close()


def content(scratch: object, size: int) -> bytes:
    out = bytearray(size)
    scratch.read(0, memoryview(out))  # type: ignore[attr-defined]
    return bytes(out)


def file_bytes(spool: Spool) -> int:
    assert spool.fits(0)  # what nobody refers to any more is given back
    spool._writer.submit(int).result()  # what was asked for before is done
    return os.fstat(spool._file.fileno()).st_size


async def test_payloads_lie_beside_each_other_and_give_their_place_and_the_files_end_back(
    spool: Spool,
) -> None:
    payloads = [bytes([i]) * 1000 for i in range(3)]
    held = [spool.take(1000) for _ in payloads]
    for scratch, payload in zip(held, payloads, strict=True):
        await scratch.write(500, memoryview(payload)[500:])
        await scratch.write(0, memoryview(payload)[:500])
    assert [content(scratch, 1000) for scratch in held] == payloads
    assert spool.held_bytes == 3000 and not spool.fits(1)
    del held[1]
    assert spool.held_bytes == 2000 and spool.fits(1000) and not spool.fits(1001)
    between = spool.take(1000)
    await between.write(0, memoryview(b"x" * 1000))
    assert content(held[0], 1000) == payloads[0] and content(held[1], 1000) == payloads[2]
    assert content(between, 1000) == b"x" * 1000
    assert file_bytes(spool) == 3000
    del scratch, between, held[1]
    assert file_bytes(spool) == 1000 and content(held[0], 1000) == payloads[0]
    held.clear()
    assert spool.held_bytes == 0 and file_bytes(spool) == 0


async def test_nobody_writes_into_another_payload_and_what_was_cut_off_is_told(spool: Spool) -> None:
    first, second = spool.take(1000), spool.take(1000)
    with pytest.raises(InvariantViolation):
        await first.write(999, memoryview(b"xx"))
    with pytest.raises(InvariantViolation):
        first.read(999, memoryview(bytearray(2)))
    await second.write(0, memoryview(b"x" * 10))
    with pytest.raises(StorageError, match="shorter"):
        second.read(0, memoryview(bytearray(11)))


async def test_a_full_disk_is_told_and_a_nearly_full_one_takes_nothing(
    spool: Spool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    scratch = spool.take(1000)
    monkeypatch.setattr(Spool, "_put", full)
    with pytest.raises(StorageError, match="the disk is full"):
        await scratch.write(0, memoryview(b"x"))
    careful = Spool(tmp_path, spare_bytes=1 << 60)
    assert not careful.fits(1)
    careful.close()


async def test_what_was_promised_to_others_is_not_promised_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spool, size = Spool(tmp_path, spare_bytes=0), 1 << 20
    written = lambda: 512 * os.fstat(spool._file.fileno()).st_blocks  # noqa: E731
    free = lambda _: SimpleNamespace(f_bavail=3 * size - written(), f_frsize=1)  # noqa: E731
    monkeypatch.setattr(os, "fstatvfs", free)
    assert spool.fits(3 * size) and not spool.fits(3 * size + 1)
    first, second = spool.take(size), spool.take(size)
    assert spool.fits(size) and not spool.fits(size + 1), "nothing is written, two thirds are promised"
    await first.write(0, memoryview(bytearray(size)))
    assert spool.fits(size) and not spool.fits(size + 1)
    del first
    assert spool.fits(2 * size) is False and spool.fits(size), "its place is used again, and takes no more"
    spool.close()
    del second


async def test_nothing_is_left_of_it(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    scratch = spool.take(10)
    await scratch.write(0, memoryview(b"0123456789"))
    assert not await asyncio.to_thread(os.listdir, tmp_path), "the file has no name: it goes with the process"
    spool.close()
    del scratch  # later than the spool: nothing happens


async def test_a_payload_that_the_collector_finds_waits_for_no_executor(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Executors hold locks in `submit` that are not reentrant: a finalizer that submits there hangs."""
    submit, depths = spool._writer.submit, [0]

    def collecting(*arguments: object) -> object:
        depths.append(depths[-1] + 1)
        gc.collect()
        depths.append(depths[-1] - 1)
        return submit(*arguments)  # type: ignore[arg-type]

    kept = spool.take(500)
    cycle: list[object] = [spool.take(1000)]
    cycle.append(cycle)
    monkeypatch.setattr(spool._writer, "submit", collecting)
    gc.disable()
    try:
        del cycle
        await kept.write(0, memoryview(bytes(500)))
    finally:
        gc.enable()
    assert depths == [0, 1, 0], "the collector ran inside of a submit, and nothing was submitted there"
    monkeypatch.undo()
    assert spool.held_bytes == 500 and file_bytes(spool) == 500


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_has_times_kind_fragment_reason_and_fields(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventsLog(path, wall_s=lambda: 1_700_000_000.25, monotonic_s=lambda: 12.5)
    log.write(
        "merge",
        7,
        "all in\n",
        (("number", 41), ("loss", float("nan")), ("kind", "twice"), ("who", "x" * 900)),
    )
    log.write("join")
    with pytest.raises(StorageError, match="cannot open"):
        EventsLog(tmp_path / "absent" / "events.jsonl")
    assert lines(path) == [  # readable before the log is closed
        {
            "t": 1_700_000_000.25, "mono": 12.5, "kind": "merge", "fragment": 7, "reason": "all in\n",
            "number": 41, "loss": None, "kind_": "twice", "who": "x" * 500,
        },
        {"t": 1_700_000_000.25, "mono": 12.5, "kind": "join", "fragment": None, "reason": ""},
    ]  # fmt: skip
    log.close()


def test_rotation_bounds_the_disk_and_keeps_one_old_file(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    log = EventsLog(path, max_bytes=1000)
    for number in range(100):
        log.write("round", 1, fields=[("number", number)])
    log.close()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["events.jsonl", "events.jsonl.1"]
    assert all(entry.stat().st_size <= 1000 for entry in tmp_path.iterdir())
    kept = [line["number"] for line in lines(tmp_path / "events.jsonl.1") + lines(path)]
    assert kept == list(range(100 - len(kept), 100)) and len(kept) > 10
    assert log.dropped == 0


@pytest.mark.parametrize("torn", ['{"kind": "rou', '{"kind":"round"}\n{'])
def test_reopening_after_a_torn_line_starts_a_new_one(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(torn)
    log = EventsLog(path)
    log.write("join")
    log.write("leave")
    log.close()
    assert path.read_text().startswith(torn + "\n")
    assert [json.loads(line)["kind"] for line in path.read_text().splitlines()[-2:]] == ["join", "leave"]


@pytest.mark.parametrize("part_bytes", [0, 10])
def test_full_disk_drops_lines_counts_them_and_goes_on(tmp_path: Path, part_bytes: int) -> None:
    full = False

    def write(descriptor: int, data: bytes) -> int:
        if not full:
            return os.write(descriptor, data)
        if part_bytes:
            return os.write(descriptor, data[:part_bytes])
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "events.jsonl"
    log = EventsLog(path, write=write)
    log.write("join")
    full = True
    log.write("vote", 1)
    log.write("vote", 2)
    full = False
    log.write("leave")
    log.close()
    assert log.dropped == 2
    whole = [line for line in path.read_text().splitlines() if line.endswith("}")]
    assert [json.loads(line)["kind"] for line in whole] == ["join", "leave"]


# Places for results are tried before the work, and left as they were.

NOWHERE = Path("/proc/self/nothing")
"""Place at which nobody can make anything, root neither."""


@pytest.mark.process
def test_what_can_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("content")
    try_file(tmp_path / "old", "--out")
    try_file(tmp_path / "new", "--out")
    try_folder(tmp_path / "deep" / "results", "--result-dir")
    try_folder(tmp_path, "--result-dir")
    try_socket(tmp_path / "socket")
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_text() == "content"


def test_what_cannot_be_written_is_told_by_its_flag(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in ("file/x", "missing/x", "", NOWHERE):
        with pytest.raises(StorageError, match=r"^--out .*(cannot be written|is a folder)") as told:
            try_file(tmp_path / place, "--out")
        assert "--out" in told.value.hint
    for place in ("file", "file/x", NOWHERE):
        with pytest.raises(StorageError, match=r"^--result-dir .* cannot be written") as told:
            try_folder(tmp_path / place, "--result-dir")
        assert "--result-dir" in told.value.hint


@pytest.mark.process
def test_a_socket_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in ("file", "file/x", NOWHERE, "long" * 50):
        with pytest.raises(UserError, match="cannot listen for a learner at"):
            try_socket(tmp_path / place)


@pytest.mark.process
@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("result_dir", NOWHERE, "--result-dir"),
        ("learner_socket", NOWHERE, "cannot listen for a learner"),
        ("data", NOWHERE, "the data path .* does not exist"),
    ],
)
def test_a_node_tries_its_paths_at_its_start(flag: str, value: Path, words: str, tmp_path: Path) -> None:
    try_paths(NodeSettings(data_dir=tmp_path))
    with pytest.raises(UserError, match=words):
        try_paths(NodeSettings(data_dir=tmp_path, **{flag: value}))


@pytest.mark.parametrize("flag", ["report", "plot"])
def test_a_demo_tries_its_files_before_it_starts_anything(flag: str) -> None:
    with pytest.raises(StorageError, match=f"--{flag} .* cannot be written"):
        demo.run(DemoSettings(**{flag: NOWHERE}))


def test_whoever_asks_whether_a_folder_is_in_use_leaves_nothing_in_it(tmp_path: Path) -> None:
    assert not is_in_use(tmp_path) and not [*tmp_path.iterdir()]
    folder = DataDir(tmp_path)
    folder.lock()
    assert is_in_use(tmp_path)
    folder.unlock()
    assert not is_in_use(tmp_path)
