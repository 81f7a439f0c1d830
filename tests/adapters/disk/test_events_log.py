from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest

from p2pdiloco.adapters.data_dir import EventsLog
from p2pdiloco.errors import StorageError


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


def test_a_log_that_cannot_be_opened_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot open"):
        EventsLog(tmp_path / "absent" / "events.jsonl")
