from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import within_s

from p2pdiloco.adapters.data_dir import DataDir, EventsLog
from p2pdiloco.errors import StorageError

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


def test_a_folder_that_others_could_see_is_closed_to_them_or_it_is_said(
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


def test_an_event_log_that_others_could_read_is_closed_to_them(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.touch(mode=0o644)
    EventsLog(path).close()
    assert path.stat().st_mode & 0o777 == 0o600


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
