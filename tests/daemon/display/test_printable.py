"""What strangers say reaches terminals and JSON lines without anything that a terminal obeys."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest

from p2pdiloco.adapters.data_dir import EventsLog
from p2pdiloco.cli import group, result_commands
from p2pdiloco.daemon import wire
from p2pdiloco.daemon.display.logs import JsonFormatter
from p2pdiloco.daemon.display.snapshot import StatusReport
from p2pdiloco.errors import PeerUnreachable, RemoteError, TransportError, UserError, clean, json_line

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
    assert group.run([]) == group.EXIT_USER
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
