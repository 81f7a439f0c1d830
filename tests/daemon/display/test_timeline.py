"""Timeline of a run: thinned, bounded, kept over restarts."""

from __future__ import annotations

import io
import json
import logging
import math
import sys
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.live import Live
from rich.text import Text

import pictures
from p2pdiloco.adapters.data_dir import EventsLog
from p2pdiloco.cli import group, result_commands
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.display.logs import JsonFormatter
from p2pdiloco.daemon.display.snapshot import StatusReport
from p2pdiloco.daemon.display.timeline import (
    MAX_MARKS,
    MAX_POINTS,
    MAX_REASONS,
    NAME,
    Curve,
    LossPoint,
    PastEvent,
    PastMarks,
    Timeline,
    load_timeline,
    merged,
    save_timeline,
)
from p2pdiloco.errors import PeerUnreachable, RemoteError, TransportError, UserError, clean, json_line


def header(fragment: int, number: int, *learners: str) -> Any:
    return SimpleNamespace(
        fragment=fragment, number=number, contributors=[SimpleNamespace(learner=name) for name in learners]
    )


def test_a_long_curve_is_thinned_evenly_and_has_the_newest_point() -> None:
    curve = Curve()
    for step in range(20_000):
        curve.add(LossPoint(float(step), 100 * step, 3.0))
        assert len(curve.points) <= MAX_POINTS
    tokens = [point.tokens for point in curve.points]
    assert tokens[0] == 0 and tokens[-1] == 1_999_900 and tokens == sorted(tokens)
    gaps = [after - before for before, after in pairwise(tokens[:-1])]
    assert len(tokens) > MAX_POINTS / 4 and max(gaps) < 4 * min(gaps)


def test_a_curve_takes_no_loss_that_is_none_and_goes_back_with_the_run() -> None:
    curve = Curve()
    for tokens, loss in ((100, 3.0), (200, math.nan), (300, math.inf), (400, 2.5), (250, 2.6)):
        curve.add(LossPoint(0.0, tokens, loss))
    assert [(point.tokens, point.loss) for point in curve.points] == [(100, 3.0), (250, 2.6)]


def test_two_curves_are_one_where_the_first_counts() -> None:
    one = [LossPoint(0.0, tokens, 2.0) for tokens in (100, 200)]
    other = [LossPoint(0.0, tokens, 9.0) for tokens in (50, 150, 250)]
    assert [(p.tokens, p.loss) for p in merged(one, other)] == [(50, 9.0), (100, 2.0), (200, 2.0), (250, 9.0)]
    assert merged([], other) == tuple(other)


def test_marks_that_are_close_are_one_and_frequent_ones_hide_no_death() -> None:
    marks = PastMarks()
    marks.add(PastEvent(0.0, "silent", "died", "dan"))
    for turn in range(1000):
        marks.add(PastEvent(100.0 * turn, "office", "elected", "ann", turn % 4))
        marks.add(PastEvent(100.0 * turn + 1, "office", "elected", "ann", (turn + 1) % 4))
    assert len(marks.events) == MAX_MARKS and marks.events[0].kind == "silent"
    assert marks.events[-1].times == 2 and marks.events[-1].fragment is None


def test_what_several_saw_a_little_apart_is_one_mark_and_hides_no_death() -> None:
    timeline = Timeline(now_s=lambda: 5000.0)
    timeline.note("silent", None, "not counted on", {"peer": "dan"})
    for late_s in (-4.0, 1.4, 7.3):
        timeline.learn(
            [], [PastEvent(900.0, "join", "", "eve"), PastEvent(5000.0 + late_s, "silent", "", "dan")]
        )
    timeline.learn([], [PastEvent(4000.0, "silent", "", "dan")])
    assert [(event.at_s, event.peer) for event in timeline.marks.events] == [
        (900.0, "eve"),
        (4000.0, "dan"),
        (5000.0, "dan"),
    ]
    timeline.learn([], [PastEvent(6000.0 + 100 * turn, "office", "", "ann") for turn in range(1000)])
    kinds = [event.kind for event in timeline.marks.events]
    assert len(kinds) == MAX_MARKS and kinds.count("silent") == 2 and kinds.count("join") == 1


def test_timeline_tells_who_was_in_the_last_merge_and_how_often_versions_come() -> None:
    clock = iter([0.0, *(float(second) for second in range(100, 1000, 10))])
    timeline = Timeline(now_s=lambda: next(clock))
    timeline.look([header(0, 4, "ann"), header(1, 4, "ben")])  # what was here already is not new
    assert timeline.newest is None and not timeline.last_contributors
    timeline.look([header(0, 5, "ann", "ben"), header(1, 4, "ben")])
    timeline.look([header(0, 5, "ann", "ben"), header(1, 5, "cleo")])
    assert timeline.newest is not None and (timeline.newest.fragment, timeline.newest.at_s) == (1, 120.0)
    assert timeline.last_contributors == {"cleo"} and timeline.merged_at_s == {
        "ann": 110.0,
        "ben": 110.0,
        "cleo": 120.0,
    }
    assert timeline.usual_s == 10.0 and timeline.version_at_s == {0: 110.0, 1: 120.0}


def test_timeline_counts_our_contributions_and_marks_faults_but_not_our_own_coming() -> None:
    timeline = Timeline(now_s=lambda: 5.0)
    timeline.note("contribution", 0, "merged", {"tokens": 256})
    timeline.note("contribution", 0, "refused: stale-base", {})
    timeline.note("contribution", 0, "given up: damaged", {"tokens": 1})
    assert timeline.own.merged == 1 and timeline.own.merged_tokens == 256 and timeline.own.given_up == 1
    assert timeline.own.refused == {"stale-base": 1}
    for number in range(100):
        timeline.note("contribution", 0, f"refused: for reason {number}", {})
    assert len(timeline.own.refused) == MAX_REASONS
    for kind, reason, fields in (
        ("join", "training", {}),
        ("join", "unvouched: started from most", {"basis": "most", "peer": "ann"}),
        ("learner", "running", {"device": "cpu"}),
        ("merge", "3 of 3", {"number": 4}),
    ):
        timeline.note(kind, None, reason, fields)
    assert timeline.marks.events == ()
    timeline.note("silent", None, "not counted on", {"peer": "dan"})
    timeline.note("learner", None, "ended: exit status 1; its last words: /home/ann/x.py", {"code": 1})
    assert [(event.kind, event.peer) for event in timeline.marks.events] == [("silent", "dan"), ("fault", "")]
    assert timeline.marks.events[1].words == "its learner; its log says more", "everybody sees it"


def test_marks_say_of_whom_they_are_also_to_others() -> None:
    timeline = Timeline(now_s=lambda: 5.0)
    names = {"me": "rose", "tom": "tulip"}
    for kind, reason, fields in (
        ("election", "we stand: term 3 is over", {"term": 4}),
        ("office", "we are the syncer with 2 of 2 votes", {"term": 4}),
        ("office", "follows", {"syncer": "tom"}),
        ("course", "the run goes on", {}),
        ("excluded", "it voted twice", {"peer": "tom"}),
    ):
        timeline.note(kind, 0, reason, fields, lambda peer: names.get(peer, ""), "me")
    assert [(event.name, event.words) for event in timeline.marks.events] == [
        ("rose", "stands: term 3 is over"),
        ("rose", "is the syncer with 2 of 2 votes"),
        ("tulip", "is the syncer"),
        ("", "the run goes on"),
        ("tulip", "it voted twice"),
    ]


def test_timeline_survives_a_restart_and_a_damaged_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    timeline = Timeline(now_s=lambda: 50.0)
    timeline.measured("first", 3.5, 1000)
    timeline.measured("first", 3.5, 2000)  # the same one
    timeline.note("silent", None, "\udceb", {"peer": "dan"})
    save_timeline(tmp_path, timeline)
    again = load_timeline(tmp_path)
    assert again.curve.points == (LossPoint(50.0, 1000, 3.5),) and again.since_s == 50.0
    (tmp_path / NAME).write_text("{")
    assert load_timeline(tmp_path).curve.points == () and "damaged" in caplog.text


# Pictures of a terminal: the last whole picture of a live view, as an SVG that asks no other host.


def drawn(*frames: str) -> str:
    """All that a live view writes when it shows these, one after the other, and is cut off in the last."""
    out = io.StringIO()
    with Live(console=Console(file=out, force_terminal=True, width=40), auto_refresh=False) as live:
        for frame in frames:
            live.update(Text(frame, style="red"), refresh=True)
        return "a sentence before\n" + out.getvalue()


def frame(word: str) -> str:
    return "\n".join(f"{word} {line}" for line in range(12))


def test_the_last_whole_picture_is_taken() -> None:
    found = pictures.last_frame(drawn(frame("first"), frame("second"), frame("cut off")))
    assert "second 11" in found and "first" not in found and "cut off" not in found


def test_who_draws_nothing_gives_no_picture() -> None:
    with pytest.raises(ValueError, match="drew no picture"):
        pictures.last_frame("error: no such run\n")


def test_a_picture_asks_no_other_host() -> None:
    found = pictures.svg("\x1b[1;32mtraining\x1b[0m  step 7", "p2pdiloco node")
    assert "training" in found and "@font-face" not in found and "url(http" not in found


# What strangers say reaches terminals and JSON lines without anything that a terminal obeys.

EVIL = "a\x1b]0;title\x07\x1b[2J\x9b31m\u202egnp\u2066\r\nFAKE: all fine\x7f\x85\u2028\ufeffé日"
"""OSC, CSI, C1, direction overrides and isolates, CR LF, DEL, NEL, a line separator; then what prints."""


def assert_harmless(text: str) -> None:
    assert text.rstrip("\n").isprintable(), ascii(text)


def test_clean_leaves_what_prints_and_what_is_to_be_kept() -> None:
    assert_harmless(clean(EVIL))
    assert clean(EVIL).endswith("é日") and len(clean(EVIL)) == len(EVIL)
    assert clean("a\n\tb\rc", keep="\n\t") == "a\n\tb·c"


def test_json_is_harmless_and_keeps_every_character() -> None:
    strange = EVIL + '\U000e0001\U0001f600\ud7ff"\\'
    assert_harmless(json_line({"text": strange}))
    assert json.loads(json_line({"text": strange})) == {"text": strange}


def test_status_log_lines_and_events_as_json(tmp_path: Path) -> None:
    report = StatusReport(
        run_name=EVIL, run_id=EVIL, answered_by=EVIL, state="training", recent=(EVIL,), refusals={EVIL: 1}
    )
    record = logging.LogRecord("p2pdiloco", logging.WARNING, "", 0, "%s", (EVIL,), None)
    record.fields = {EVIL: EVIL}
    log = EventsLog(tmp_path / "events.jsonl")
    log.write("refusal", None, EVIL, [("peer", EVIL)])
    log.close()
    for line in (json_line(report), JsonFormatter().format(record), log.path.read_text()):
        assert_harmless(line)
        assert EVIL in json.dumps(json.loads(line), ensure_ascii=False) or EVIL in json.loads(line).values()


@pytest.mark.parametrize("kind", [RemoteError, TransportError, PeerUnreachable])
def test_errors_say_a_peers_words_printable_and_short(kind: type[Exception]) -> None:
    error = kind(EVIL * 100)
    assert_harmless(str(error))
    assert len(str(error)) < 1000
    assert_harmless(str(RemoteError("bad", EVIL)))


@pytest.mark.parametrize("field", ["run", "name", "owner"])
def test_a_listed_run_has_a_name_and_ids_that_can_be_shown(field: str) -> None:
    sound = wire.RunSummary("ab" * 32, "shakespeare", "12D3KooW")
    assert wire.decode(wire.encode(wire.RunList((sound,))), wire.RunList).runs == (sound,)
    told = {"run": "ab" * 32, "name": "shakespeare", "owner": "12D3KooW", field: "run\x1b[2J"}
    with pytest.raises(RemoteError):
        wire.decode(wire.encode(wire.RunList((wire.RunSummary(**told),))), wire.RunList)


def test_the_command_lines_last_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fails(**_: object) -> None:
        raise UserError(EVIL, EVIL)

    monkeypatch.setattr(group.cli, "main", fails)
    assert group.run([]) == UserError.exit_status
    said = capsys.readouterr().err.splitlines()
    assert [line[:6] for line in said] == ["error:", "hint: "]
    for line in said:
        assert_harmless(line)


@pytest.mark.parametrize("terminal", [True, False])
def test_a_models_text_is_raw_only_where_no_terminal_obeys_it(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    result_commands._show("one\n\ttwo\x1b[2J")
    told = capsys.readouterr()
    assert told.out == ("one\n\ttwo·[2J\n" if terminal else "one\n\ttwo\x1b[2J\n")
    assert ("shown as ·" in told.err) == terminal
