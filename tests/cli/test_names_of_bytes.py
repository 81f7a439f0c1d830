"""Names of people, files and folders whose bytes are not UTF-8: they work, or are one sentence."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest

from p2pdiloco.cli.main import run
from p2pdiloco.daemon.display.logs import JsonFormatter
from p2pdiloco.errors import json_line
from p2pdiloco.learner.channel import Failed, Save, StateSaved, Stop, decode_command, decode_event, frame
from p2pdiloco.tasks.registry import load_manifest

NAME = os.fsdecode(b"Zo\xeb")


@pytest.mark.parametrize(
    "arguments",
    [
        ("node", "--name", NAME),
        ("node", "--join", f"/dns4/{NAME}/tcp/1"),
        ("node", "--run", NAME, "--listen", NAME),
        ("bootstrap", "--announce", f"/dns4/{NAME}/tcp/1"),
        ("invite", "--name", NAME, "run"),
        ("run", "amend", "--message", NAME, "run"),
        ("ban", NAME, "peer"),
    ],
)
def test_a_flag_that_others_are_told_is_text(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    said = capsys.readouterr().err
    flag = next((word for word in arguments if word.startswith("--")), "RUN")
    assert f"'{flag}'" in said and "must be UTF-8 text" in said
    assert len(said.splitlines()) == 2


def test_a_name_out_of_the_environment_is_text(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("P2PDILOCO_NAME", NAME)
    assert run(["node"]) == 2
    assert "must be UTF-8 text" in capsys.readouterr().err


def test_a_model_is_started_from_and_written_in_such_folders(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    folder = tmp_path / NAME
    folder.mkdir()
    first, second = folder / "run.toml", tmp_path / "second.toml"
    assert run(["run", "new", "first", "--preset", "micro", "--out", str(first)]) == 0
    # Whoever reads the output gets a path that there is.
    assert capfdbinary.readouterr().out.strip() == os.fsencode(first)
    assert run(["run", "check", str(first)]) == 0
    from p2pdiloco.daemon.run_files.run import genesis_versions, sign_run
    from p2pdiloco.daemon.run_files.saved_state import result_of
    from p2pdiloco.identity import Identity

    signed, vault = sign_run(first, Identity.generate())
    result_of(signed, vault, list(genesis_versions(signed, vault))).save(folder / "theta.safetensors")
    export = [
        "export",
        "--checkpoint",
        str(folder / "theta.safetensors"),
        "--out",
        str(tmp_path / f"x{NAME}"),
    ]
    assert run(export) == 0
    given = ["--from", str(tmp_path / f"x{NAME}"), "--out", str(second)]
    assert run(["run", "new", "second", "--preset", "micro", *given]) == 0
    assert load_manifest(second).run.initial_name == "xZo·"


def test_the_learner_hears_of_every_path_and_says_what_is_wrong_with_it() -> None:
    path = Path("/data") / NAME
    for command in (Save(path), Stop(path)):
        assert decode_command(frame(command)[4:]) == command
    assert decode_event(frame(StateSaved(path, False, f"no {path}"))[4:]) == (
        StateSaved(path, False, "no /data/Zo\\udceb")
    )
    assert decode_event(frame(Failed(f"{path} is no text", "x"))[4:]) == Failed(
        "/data/Zo\\udceb is no text", "x"
    )


def test_lines_for_machines_show_such_a_name() -> None:
    record = logging.LogRecord("x", logging.INFO, "", 0, "cannot read %s", (NAME,), None)
    record.fields = {"path": NAME, NAME: [NAME]}
    entry = json.loads(JsonFormatter().format(record))
    assert entry["message"] == "cannot read Zo\\udceb"
    assert entry["fields"] == {"path": "Zo\\udceb", "Zo\\udceb": ["Zo\\udceb"]}
    assert json.loads(json_line({"a": Path(NAME), "b": 1.5, "c": None})) == {
        "a": "Zo\\udceb",
        "b": 1.5,
        "c": None,
    }
