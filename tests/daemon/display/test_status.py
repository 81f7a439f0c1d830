from __future__ import annotations

import json
import logging
from collections import Counter
from pathlib import Path
from unittest import mock

import msgspec
import pytest
from msgspec.structs import replace
from rich.cells import cell_len
from view_kit import HOSTILE, ME, empty, fragment_rows, peer_rows, printed, snapshot, with_me, with_peers

from p2pdiloco.adapters.data_dir import EventsLog
from p2pdiloco.cli.status_command import render_status
from p2pdiloco.core.api.events import Record
from p2pdiloco.core.api.reasons import LossFinding
from p2pdiloco.daemon.diary import Diary, LearnerDiary
from p2pdiloco.daemon.display import snapshot as snapshot_module
from p2pdiloco.daemon.display.logs import RecentLines, configure_logging
from p2pdiloco.daemon.display.snapshot import (
    MAX_PEER_ROWS,
    CourseRow,
    ExcludedRow,
    NodeSnapshot,
    count,
    counted,
    decode_status,
    duration,
    encode_status,
    fit,
    folded,
    loss_text,
    progress_text,
    ranges,
    size,
    sparkline,
    status_of,
)
from p2pdiloco.daemon.display.terminal import EXPLAINED, age_text, log_line, render
from p2pdiloco.daemon.network.discovery import Names
from p2pdiloco.errors import RemoteError, clean, json_line
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


def test_a_doubt_is_seen_here_and_by_others() -> None:
    doubted = replace(snapshot(), doubt="few seats are here: 2 of 5")
    for shown in (render(doubted), render_status(status_of(doubted))):
        assert doubted.doubt in "\n".join(printed(shown, 120, 50))


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
    hostile = with_me(replace(snapshot(), recent=(HOSTILE,), refusals={HOSTILE: 1}), name=HOSTILE)
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
        "final": 0,
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
    report = status_of(with_peers(replace(snapshot(), fragments=rows, recent=("x" * 240,) * 20), peers))
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


SNAPSHOTS = {
    "usual": snapshot(),
    "empty": empty(),
    "many peers": snapshot(peers=64, fragments=24),
    "many fragments": snapshot(peers=3, fragments=1024, recent=20),
    "no peers": snapshot(peers=0),
    "losses that blew up": with_me(
        replace(snapshot(), loss_history=(1.0, float("inf"), 2.0)), loss=float("nan")
    ),
    "wide letters": with_me(replace(snapshot(), recent=("訓練" * 100,)), name="訓練" * 20),
}


@pytest.mark.parametrize("size", [(80, 24), (60, 20), (81, 25), (120, 40), (200, 50), (40, 8), (300, 100)])
@pytest.mark.parametrize("name", SNAPSHOTS)
def test_view_fits_the_terminal(name: str, size: tuple[int, int]) -> None:
    width, height = size
    lines = printed(render(SNAPSHOTS[name]), width, height)
    assert 0 < len(lines) <= height - 1
    assert max(map(cell_len, lines)) <= width


def test_all_of_a_usual_node_is_on_80_by_24() -> None:
    lines = printed(render(snapshot()), 80, 24)
    text = "\n".join(lines)
    for word in (
        "ann",
        "training",
        "epoch 1, 57/240 shards",
        "step 1240",
        "2.311",
        "15.2k tokens/s",
        "62 ms/step",
    ):
        assert word in text
    for word in ("node-0", "node-2", "catching up", "refused 4", "versions 12-14", "up 12 MB", "fragment 8:"):
        assert word in text
    for index in range(24):
        assert f" {index} v{12 + index % 3} " in text
    assert "  2 v14   0000 you     grace 0.8 s" in text


def test_wide_terminal_shows_more_peers_and_reasons() -> None:
    text = "\n".join(printed(render(snapshot(peers=12, recent=9)), 200, 50))
    assert "node-11" in text and "fragment 0: waiting" in text and "more" not in text


def test_crowds_are_counted_and_the_busy_fragments_come_first() -> None:
    crowd = replace(snapshot(peers=64, fragments=0), members_total=501)
    idle = [replace(row, state="idle", pending="") for row in fragment_rows(100, crowd.peers)]
    idle[77] = replace(idle[77], state="electing")
    text = "\n".join(printed(render(replace(crowd, fragments=tuple(idle))), 80, 24))
    assert "peers (500)" in text and "and 498 more" in text
    assert "fragments (100, the " in text and " 77 v" in text and "electing" in text
    exactly = replace(snapshot(peers=2), members_total=4)
    assert "and 1 more" in "\n".join(printed(render(exactly), 80, 24))


def test_empty_view_says_what_is_missing() -> None:
    text = "\n".join(printed(render(empty()), 80, 24))
    assert "joining" in text and "nobody else so far" in text and "no state yet" in text


def test_words_of_peers_cannot_steer_the_terminal() -> None:
    peers = (replace(peer_rows(1)[0], name=HOSTILE),)
    hostile = replace(snapshot(peers=0), recent=(HOSTILE,), refusals={HOSTILE: 1}, device=HOSTILE)
    hostile = with_peers(with_me(hostile, name=HOSTILE), peers)
    text = "\n".join(printed(render(hostile), 120, 40))
    assert "\x1b" not in text and "\r" not in text and "\u202e" not in text and "\x07" not in text
    assert "[red]" in text


def test_log_line() -> None:
    assert log_line(snapshot()) == (
        "step 1240  loss 2.31  tokens/s 15.2k  peers 3  versions 12-14  syncer of 2,5"
    )
    assert log_line(empty()) == "joining:  step 0  loss -  tokens/s 0  peers 0  versions -  syncer of -"
    catching_up: NodeSnapshot = replace(empty(), state="catching up", fragments=fragment_rows(1, ()))
    assert log_line(catching_up).startswith("catching up:  step 0") and "versions 12 " in log_line(
        catching_up
    )


def test_wording() -> None:
    assert [count(n) for n in (0, 950, 999.7, 15_234, 999_999, 3.4e6, 2.5e15, None, float("nan"))] == [
        "0", "950", "1k", "15.2k", "1M", "3.4M", "2500T", "-", "-",
    ]  # fmt: skip
    assert [duration(s) for s in (0.0621, 1.25, 240, 9000, None, float("inf"))] == [
        "62 ms", "1.2 s", "4 min", "2.5 h", "-", "-",
    ]  # fmt: skip
    assert [size(n) for n in (120, 1_234_567)] == ["120 B", "1.23 MB"]
    assert ranges([7, 0, 1, 2]) == "0-2,7" and ranges([]) == "-" and ranges(range(0, 99, 2)).endswith(",14,…")
    assert sparkline([1, 2, 3, 100, 0], 3) == "▁█▁" and sparkline([], 5) == "" and sparkline([2.0], 5) == "▁"
    assert (
        fit("node", 6) == "node  " and fit("a long name", 6) == "a lon…" and cell_len(fit("訓練訓練", 5)) == 5
    )
    assert clean("a\x1bb\u202ec") == "a·b·c" and loss_text(None) == "-" and loss_text(float("nan")) == "nan"
    assert ME[-6:] == "abcdef"


def test_who_cannot_save_a_vote_is_seen_here_and_by_others() -> None:
    usual = snapshot()
    peers = (replace(usual.peers[0], votes=False), *usual.peers[1:])
    text = "\n".join(printed(render(with_peers(usual, peers)), 80, 24))
    assert text.count("cannot save") == 1 and "no vote" not in text
    full = with_me(usual, votes=False)
    assert "the disk takes nothing: no vote" in "\n".join(printed(render(full), 160, 30))
    assert [row.votes for row in status_of(full).members[:2]] == [False, True]


def test_whose_work_weighs_little_is_seen() -> None:
    usual = snapshot()
    peers = (replace(usual.peers[0], weighs=0.125), replace(usual.peers[1], weighs=0.96), *usual.peers[2:])
    text = "\n".join(printed(render(with_peers(usual, peers)), 120, 50))
    assert text.count("weighs") == 1 and "weighs 12%" in text


def test_who_is_expelled_here_is_seen_and_told() -> None:
    usual = snapshot()
    peers = (replace(usual.peers[0], expelled=LossFinding.HARM), *usual.peers[1:])
    seen = with_peers(usual, peers)
    assert "\n".join(printed(render(seen), 120, 50)).count("expelled (harm)") == 1
    told = decode_status(encode_status(status_of(seen)))
    assert [row.peer for row in told.members if row.expelled is LossFinding.HARM] == [peers[0].peer]


LOUD = replace(
    with_me(snapshot(peers=3), name="a-volunteer-with-a-long-name", votes=False, reach="outbound only"),
    link="1.2 of 3.4 Mbit/s up: contributing to every third version",
    course=CourseRow(tokens=372, schedule_tokens=1000, left_s=7200.0, message="please update by Friday"),
    heldout_loss=2.4441,
    heldout_age_s=95.0,
    learner_age_s=42.0,
    recent=("older", "fragment 3: " + "the newest sentence is long and goes on " * 2 + "to its end"),
)
LOUD = with_peers(
    LOUD,
    (
        replace(peer_rows(1)[0], confirmed=False, votes=False, thin=True, reach="outbound only"),
        *peer_rows(3)[1:],
    ),
)


@pytest.mark.parametrize("size", [(80, 24), (60, 20)])
def test_nothing_that_matters_is_cut_on_small_terminals(size: tuple[int, int]) -> None:
    lines = printed(render(LOUD), *size)
    assert len(lines) < size[1] and not any(line.endswith("…") for line in lines)
    assert any(line.startswith("    outbound only") for line in lines)
    text = " ".join(" ".join(line.split()) for line in lines)
    for words in (
        "a-volunteer-with-a-long-name", "training", "step 1240 (42.0 s ago)", "held-out 2.444 (95.0 s ago)",
        "every third version", "outbound only, catching up, cannot save, thin uplink", "no vote",
        "37.2 % of 1k tokens, 2.0 h left", "please update by Friday", "goes on to its end", "? explains",
    ):  # fmt: skip
        assert words in text, words


@pytest.mark.parametrize("size", [(80, 24), (60, 20)])
def test_the_words_of_the_view_are_explained_on_small_terminals(size: tuple[int, int]) -> None:
    text = " ".join("\n".join(printed(render(LOUD, explained=True), *size)).split())
    assert all(" ".join(words.split()) in text for words in EXPLAINED)


def test_only_figures_that_are_old_are_shown_with_their_age() -> None:
    young = replace(LOUD, heldout_age_s=4.9, learner_age_s=None)
    text = "\n".join(printed(render(young), 120, 40))
    assert "held-out 2.444" in text and "2.444 (" not in text and "step 1240 (" not in text


def test_ages_of_figures_are_in_reports() -> None:
    assert status_of(LOUD).heldout_age_s == 95.0
    said = "\n".join(printed(render_status(status_of(LOUD)), 80))
    assert "2.444 (held-out) (95.0 s ago)" in said


def test_folded() -> None:
    assert folded("one two  three", 7) == ["one two", "three"] and folded("", 5) == [""]
    assert folded("abcdefgh ij", 3) == ["abc", "def", "gh", "ij"]
    assert all(cell_len(line) <= 5 for line in folded("訓練" * 20, 5))
    assert "".join(folded("訓練" * 20, 5)).replace(" ", "") == "訓練" * 20


def test_one_of_something_is_not_several() -> None:
    assert [counted(number, "member") for number in (0, 1, 2)] == ["0 members", "1 member", "2 members"]


@pytest.mark.parametrize("width", [60, 80])
def test_a_peer_without_a_name_is_known_by_its_id(width: int) -> None:
    shown = snapshot(peers=3, fragments=4)
    peers = tuple(replace(row, name="", reach="outbound only") for row in shown.peers)
    text = "\n".join(printed(render(with_peers(shown, peers)), width, 40))
    assert all(f"…{row.peer[-6:]}" in text for row in peers), text
