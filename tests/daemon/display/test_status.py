from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from msgspec.structs import replace
from view_kit import HOSTILE, ME, empty, fragment_rows, peer_rows, printed, snapshot

from p2pdiloco.adapters.data_dir import EventsLog
from p2pdiloco.cli.status_command import render_status
from p2pdiloco.core.api.effects import Record
from p2pdiloco.daemon.diary import Diary, LearnerDiary
from p2pdiloco.daemon.display import snapshot as snapshot_module
from p2pdiloco.daemon.display.logs import RecentLines, configure_logging
from p2pdiloco.daemon.display.snapshot import (
    MAX_PEER_ROWS,
    CourseRow,
    ExcludedRow,
    NodeSnapshot,
    decode_status,
    encode_status,
    progress_text,
    status_of,
)
from p2pdiloco.daemon.display.terminal import age_text, render
from p2pdiloco.daemon.network.discovery import Names
from p2pdiloco.errors import RemoteError, json_line
from p2pdiloco.learner import channel as ch


def test_status_names_members_fragments_and_totals() -> None:
    for width in (80, 200):
        lines = printed(render_status(status_of(snapshot())), width)
        text = "\n".join(lines)
        assert max(map(len, lines)) <= width
        for word in (
            "run shakespeare",
            "4 members",
            "34.5M tokens",
            "versions 12-14",
            "loss 2.453",
            "data: epoch 1, 57/240 shards begun; ann trained on 12.3M tokens",
            "refused 4",
        ):
            assert word in text
        ann = next(line for line in lines if line.startswith("ann"))
        assert all(word in ann for word in ("…abcdef", "1240", "15.2k", "2.311", "syncer of 2"))
        second = next(line.split() for line in lines if line.split()[:2] == ["2", "14"])
        assert second == ["2", "14", "00000002", "3", "ann", "1M", "grace", "0.8", "s"]
        assert (
            sum(line.split()[1:3] == [str(12 + i % 3), f"{i:08x}"] for i in range(24) for line in lines) == 24
        )


def test_status_says_how_far_the_run_is_what_its_owner_says_and_how_old_a_loss_is() -> None:
    course = CourseRow(tokens=372, schedule_tokens=1000, left_s=7200.0, message="update by Friday")
    report = replace(status_of(snapshot()), course=course, heldout_loss=2.4, heldout_age_s=300.0)
    text = "\n".join(printed(render_status(report), 80))
    assert progress_text(course) in text and "the owner says: update by Friday" in text
    assert age_text(300.0) and f"(held-out){age_text(300.0)}" in text


def test_status_and_log_say_who_is_excluded_and_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    row = ExcludedRow(peer="12D3liar", name="n3", reason="it signed two versions 41 of fragment 2")
    report = decode_status(encode_status(status_of(replace(snapshot(), excluded=(row,)))))
    assert report.excluded == (row,)
    words = "n3 is excluded: it signed two versions 41 of fragment 2"
    assert words in "\n".join(printed(render_status(report), 80))
    names = Names()
    names["12D3liar"] = "n3"
    recent = RecentLines()
    diary = Diary(ME, "n0", names, EventsLog(tmp_path / "events.jsonl"), recent)
    with caplog.at_level(logging.INFO):
        diary.on_record(Record("excluded", None, row.reason, (("peer", "12D3liar"),)))
    assert words in caplog.text


def test_status_of_an_empty_run_and_hostile_words() -> None:
    assert "1 member," in "\n".join(printed(render_status(status_of(empty())), 80))
    hostile = replace(snapshot(), name=HOSTILE, recent=(HOSTILE,), refusals={HOSTILE: 1})
    text = "\n".join(printed(render_status(status_of(hostile)), 80))
    assert "\x1b" not in text and "\r" not in text and "\u202e" not in text


def test_status_json_is_the_whole_report() -> None:
    report = status_of(replace(snapshot(), heldout_loss=float("nan")))
    parsed = json.loads(json_line(report))
    assert [member["name"] for member in parsed["members"]] == ["ann", "node-0", "node-1", "node-2"]
    assert parsed["members"][0]["offices"] == 2 and parsed["answered_by"] == ME
    assert parsed["fragments"][5] == {
        "index": 5, "number": 14, "digest": "00000005", "term": 3, "syncer": ME, "tokens": 1_000_000,
        "state": "collecting 2/3", "pending": "sent",
        "epoch": 0, "groups": 1, "levels": 1, "group": 0, "root": "", "level": None,
    }  # fmt: skip
    assert parsed["heldout_loss"] is None and parsed["run_tokens"] == 34_500_000


def test_snapshot_and_status_survive_msgpack_and_json() -> None:
    original = snapshot()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(original), type=NodeSnapshot) == original
    assert msgspec.json.decode(msgspec.json.encode(original), type=NodeSnapshot) == original
    assert decode_status(encode_status(status_of(original))) == status_of(original)


def test_the_largest_ordinary_report_fits_a_control_message() -> None:
    peers = tuple(replace(row, peer="p" * 53, name="n" * 63) for row in peer_rows(MAX_PEER_ROWS))
    rows = fragment_rows(1024, peers)
    large = 1 << 40
    rows = tuple(replace(row, syncer="p" * 53, number=large, tokens=large, term=large) for row in rows)
    report = status_of(replace(snapshot(), peers=peers, fragments=rows, recent=("x" * 240,) * 20))
    assert len(encode_status(report)) <= 256 * 1024
    assert decode_status(encode_status(report)) == report
    rows = tuple(
        replace(row, epoch=large, groups=9999, levels=5, group=9999, root="p" * 53, level=4) for row in rows
    )
    report = replace(report, fragments=rows)
    assert len(encode_status(report)) <= 256 * 1024
    assert decode_status(encode_status(report)).fragments[-1] == replace(rows[-1], root="")


def test_a_report_with_bytes_of_names_that_are_no_text_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    report = status_of(replace(snapshot(), recent=("learner: /tmp/Zo\udceb",)))
    assert decode_status(encode_status(report)).recent == ("learner: /tmp/Zo\\udceb",)
    monkeypatch.setattr(snapshot_module, "MAX_REPORT_BYTES", 1)
    shortened = encode_status(report)
    monkeypatch.undo()
    assert decode_status(shortened).recent == ("learner: /tmp/Zo\\udceb",)


def test_what_a_learner_says_is_written_down_with_how_long_it_did_something_else(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    diary = Diary(ME, "ann", Names(), EventsLog(events), RecentLines())
    told = LearnerDiary(diary, mock.Mock(), Counter)
    assert told.age_s() is None
    told.on_learner(ch.Status(1, 64, 1.0, 0.1, 2.0, 0.2, 3.0, longest_aside_s=6.0))
    told.on_learner(ch.Evaluated(2.5, 64, took_s=7.0))
    age_s = told.age_s()
    assert age_s is not None and age_s < 60.0
    progress, evaluation = map(json.loads, events.read_text().splitlines())
    assert (progress["longest_aside_s"], evaluation["took_s"]) == (6.0, 7.0)


def test_groups_are_shown_with_their_syncers_and_the_root() -> None:
    flat = "\n".join(printed(render_status(status_of(snapshot())), 100))
    assert "root" not in flat and "groups" not in flat
    rows = list(fragment_rows(4, peer_rows(3)))
    for index, level in enumerate((None, 0, 1, 2)):
        state = "waiting: 2 of 3 groups, grace ends in 0.4 s" if index == 3 else "idle"
        rows[index] = replace(
            rows[index], epoch=6 + index, groups=5, levels=3, group=index, level=level, root=ME, state=state
        )
    grouped = replace(snapshot(), fragments=tuple(rows))
    text = "\n".join(printed(render_status(status_of(grouped)), 160))
    assert "versions 12-14, 5 groups, epoch 6-9" in text and "leaf syncer" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["0", "12", "00000000", "node-0", "g0", "ann", "sent"] in lines
    assert "g1 leaf" in text and "g2 L1" in text and "g3 root" in text
    assert "waiting: 2 of 3 groups, grace ends in 0.4 s" in text
    view = "\n".join(printed(render(grouped), 120))
    assert "5 groups, epoch 6-9" in view and "g3 root waiting" in view


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        b"x" * 300_000,
        encode_status(status_of(snapshot()))[:-5],
        msgspec.msgpack.encode({**msgspec.to_builtins(status_of(empty())), "extra": 1}),
        msgspec.msgpack.encode({**msgspec.to_builtins(status_of(empty())), "run_name": "x" * 81}),
        msgspec.msgpack.encode({**msgspec.to_builtins(status_of(empty())), "run_tokens": -1}),
    ],
)
def test_anything_else_from_a_peer_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteError, match="bad-status"):
        decode_status(data)


def test_work_that_is_too_long_is_told_its_owner_first_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("WARNING")
    events = EventsLog(tmp_path / "events.jsonl")
    diary = Diary(ME, "ann", Names(), events, RecentLines())
    diary.on_record(Record("cut", 1, "our own work is 9 times as long", (("length", 9.0), ("times", 1))))
    diary.on_record(Record("cut", 1, "too long to count in full: cut", (("peer", "12D3KooWpeer000001"),)))
    assert diary.refusals == {"own-too-long": 1, "too-long": 1}
    warnings = [record.message for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1 and "our own work" in warnings[0]
    assert "…000001" in diary._recent.lines()[-1]


def test_a_log_line_of_the_daemon_s_own_has_the_fields_that_those_of_the_core_have(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    diary = Diary(ME, "ann", Names(), EventsLog(tmp_path / "events.jsonl"), RecentLines())
    diary.say(logging.WARNING, "link", "it does not keep up", every=3)
    diary.on_record(Record("cut", 1, "our own work is long", (("times", 1),)))
    said = [(vars(record)["event"], vars(record)["fields"]) for record in caplog.records]
    assert said == [
        ("link", {"fragment": None, "reason": "it does not keep up", "every": 3}),
        ("cut", {"fragment": 1, "reason": "our own work is long", "times": 1}),
    ]


def test_a_decision_is_once_among_the_latest_whether_the_log_tells_it_or_not(tmp_path: Path) -> None:
    root, recent = logging.getLogger(), RecentLines()
    before, level = root.handlers[:], root.level
    diary = Diary(ME, "ann", Names(), EventsLog(tmp_path / "events.jsonl"), recent)
    configure_logging("tui", recent=recent)
    try:
        diary.on_record(Record("join", None, "a full member", ()))
        diary.on_record(Record("election", 1, "we stand", ()))
        diary.on_record(Record("cut", 1, "our own work is long", (("times", 1),)))
    finally:
        root.handlers[:] = before
        root.setLevel(level)
    assert diary.recent == (
        "join: a full member",
        "election: fragment 1 we stand",
        "cut: fragment 1 our own work is long",
    )
