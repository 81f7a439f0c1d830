"""`p2pdiloco run new --guide` at a pseudo-terminal: the flags of `run new` as questions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from at_terminal import NEARBY, OWNER, look_at, run_called
from click.testing import CliRunner
from terminal_kit import CTRL_C, Terminal

from p2pdiloco.adapters.data_dir import DataDir
from p2pdiloco.adapters.run_store import run_folder
from p2pdiloco.cli import guide, questions
from p2pdiloco.cli import main as cli_main
from p2pdiloco.cli.guide import UNIT, save_settings, shipped_unit, start_by_itself, user_unit
from p2pdiloco.config.settings import load_settings_table
from p2pdiloco.daemon.notice import Invite, grant
from p2pdiloco.daemon.run_files.known_runs import RunLink, encode_link
from p2pdiloco.errors import UserError
from p2pdiloco.tasks.registry import load_manifest


@pytest.mark.process
def test_the_guide_asks_and_writes(tmp_path: Path) -> None:
    out = tmp_path / "run.toml"
    with Terminal(["-m", "p2pdiloco", "run", "new", "--guide", "--out", str(out)]) as terminal:
        for question, line in (
            ("Name of the run", "no good"),
            ("a name has", "ours"),
            ("Model to start from", "huge"),
            ("answer one of", "micro"),
            ("Data:", "back"),
            ("Model to start from", "tiny"),
            ("Data:", "hub:owner/texts"),
            ("Length", "demo"),
            ("Members at the start", "many"),
            ("answer a number", "12"),
            ("Who may be", ""),
        ):
            terminal.expect(question)
            terminal.type(line)
        assert terminal.end() == 0, terminal.shown
    manifest = load_manifest(out)
    assert (manifest.run.name, manifest.data.source, manifest.data.dataset) == ("ours", "hub", "owner/texts")
    assert manifest.group.expected_members == 12 and manifest.admission.mode == "invite"
    for command in (f"p2pdiloco bootstrap --run {out}", "node --genesis LINK-PRINTED-BY-BOOTSTRAP"):
        assert command in terminal.shown


@pytest.mark.process
def test_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    out = tmp_path / "run.toml"
    with Terminal(["-m", "p2pdiloco", "run", "new", "ours", "--guide", "--out", str(out)]) as terminal:
        terminal.expect("Name of the run")
        terminal.expect(": ")
        terminal.press(CTRL_C)
        # readline sees a signal that comes just before it waits only with the next key.
        assert terminal.end(pressing=b"\n") == 130 and "Traceback" not in terminal.shown
    assert not out.exists()


def test_without_a_terminal_or_a_name_it_is_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path / "run.toml")
    assert cli_main.run(["run", "new", "--guide", "--out", out]) == 2
    assert "nobody at a terminal" in capsys.readouterr().err
    assert cli_main.run(["run", "new", "--out", out]) == 2
    assert "--guide" in capsys.readouterr().err
    assert cli_main.run(["run", "new", "ours", "--data", "hub:what", "--out", out]) == 2
    assert "data are embedded" in capsys.readouterr().err
    assert cli_main.run(["run", "new", "ours", "--data", "jsonl", "--out", out]) == 0
    assert load_manifest(Path(out)).data.source == "jsonl"


# `p2pdiloco join` at a pseudo-terminal: it asks, shows, saves and starts; nothing is half-written.

ADDRESS = f"/ip4/203.0.113.1/tcp/31337/p2p/{OWNER.peer_id}"
SCRIPT = str(Path(__file__).with_name("at_terminal.py"))
RUN = run_called("ours").id
LINK = encode_link(RunLink(RUN, (ADDRESS,), OWNER.peer_id, "ours"))
USUAL = [(words, "") for words in ("Name", "to send", "to receive", "of the disk", "month", "Hours")]
Join = Callable[..., tuple[int, str]]


@pytest.fixture
def join(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Join:
    """`p2pdiloco join` for the folder `my node`, in this process, as it is to somebody at a terminal: gives
    these answers, each to the question with these words, and returns the status, and what was shown."""
    monkeypatch.setattr(questions, "at_terminal", lambda: True)
    monkeypatch.setattr(guide, "manifest_to_join", look_at)
    monkeypatch.setattr(guide, "look_nearby", lambda: [NEARBY])
    monkeypatch.setenv("PATH", str(tmp_path / "tools"), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    systemctl = tmp_path / "tools" / "systemctl"
    systemctl.parent.mkdir()
    systemctl.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    systemctl.chmod(0o755)

    def start(words: list[str], *answers: tuple[str, str]) -> tuple[int, str]:
        typed = "".join(f"{line}\n" for _, line in answers)
        with CliRunner().isolation(input=typed) as (*_, shown):
            status = cli_main.run(["join", *words, "--data-dir", str(tmp_path / "my node")])
            text = shown.getvalue().decode()
        asked = ".*?".join(f"{re.escape(question)}[^\n]*: {re.escape(line)}\n" for question, line in answers)
        assert re.search(asked, text, re.DOTALL), text
        return status, text

    return start


@pytest.mark.process
def test_it_asks_shows_saves_and_starts(join: Join, tmp_path: Path) -> None:
    folder = tmp_path / "my node"
    root = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(Path.cwd())])
    with Terminal([SCRIPT, "join", LINK, "--data-dir", str(folder)], {"PYTHONPATH": root}) as terminal:
        _answer_and_start(terminal, folder)
    path = folder / "node.toml"
    values = load_settings_table(path, "node")
    told = {"name": "anna", "max_upload": "10Mbit", "max_disk": "20GiB", "hours": "22-7"}
    assert values == {"data_dir": folder, "invite": LINK, "max_transfer": "200GB/month", **told}
    assert path.stat().st_mode & 0o777 == 0o600 and not list(folder.glob("*.tmp"))

    # Once more: what was answered is what Enter takes; other keys stay.
    path.write_text(path.read_text() + "threads = 2\n")
    before = ("Run link", "[anna]", "[10Mbit]", "no limit", "[20GiB]", "[200GB/month]", "[22-7]")
    status, shown = join([], *((words, "") for words in before), ("What now?", "save"))
    assert status == 0 and LINK in shown
    assert load_settings_table(path, "node") == values | {"threads": 2}


def _answer_and_start(terminal: Terminal, folder: Path) -> None:
    for question, line in (
        ("Name that others see", "anna"),
        ("to send", "fast"),
        ("to send", "20Mbit"),
        ("to receive", "back"),
        ("to send", "10Mbit"),
        ("to receive", ""),
        ("of the disk", "20GiB"),
        ("month", "much"),
        ("month", "200GB/month"),
        ("Hours", "22-7"),
    ):
        terminal.expect(question)
        terminal.expect(": ")
        terminal.type(line)
    shown = terminal.expect("What now?")
    assert "run ours (" in shown and "memory: at least" in shown and "--max-disk 20GiB" in shown
    terminal.expect(": ")
    assert not folder.exists(), "nothing is written before the last answer"
    terminal.type("")
    assert terminal.end() == 0, terminal.shown
    assert f"STARTED anna 10Mbit True {RUN} {folder}" in terminal.shown


def test_an_address_needs_a_run(join: Join, tmp_path: Path) -> None:
    """The id of what was looked at is saved, which is sure, unlike a name."""
    status, shown = join(
        [],
        ("[/ip4/192.0.2.9/tcp/1", "nonsense"),
        ("Run link", ADDRESS),
        ("Name or id of the run", "nowhere"),
        ("Name or id of the run", "own-data"),
        ("Name that others see", "x" * 64),
        ("Name that others see", ""),
        ("your data", "/no/such"),
        ("your data", str(tmp_path)),
        ("to send", ""),
        ("to receive", ""),
        ("of the disk", "much"),
        ("of the disk", "1KiB"),
        ("month", ""),
        ("Hours", ""),
        ("What now?", "back"),
        ("Hours", "back"),
        ("month", "back"),
        ("of the disk", ""),
        ("month", ""),
        ("Hours", ""),
        ("What now?", "save"),
    )
    assert status == 0
    assert shown.startswith(f"in this network: run {'ab' * 6} at /ip4/192.0.2.9/tcp/1")
    for words in (
        "must look like",
        "63 letters at most",
        "know no run nowhere",
        "/no/such does not exist",
        "--max-disk is",
    ):
        assert words in shown, words
    values = tomllib.loads((tmp_path / "my node/node.toml").read_text())["node"]
    assert values["join"] == [ADDRESS] and values["run"] == run_called("own-data").id
    assert values["data"] == str(tmp_path) and "name" not in values and "max_upload" not in values


def test_whoever_goes_leaves_nothing(join: Join, tmp_path: Path) -> None:
    """Ctrl-C and the end of the input are one to click."""
    status, shown = join([LINK], *USUAL)
    assert status == 130 and "memory: at least" in shown, "after all but the last"
    assert join([LINK], *USUAL, ("What now?", "quit"))[0] == 0
    assert not (tmp_path / "my node").exists()


def test_the_saved_file_says_what_is_a_secret(tmp_path: Path) -> None:
    invite = Invite(grant(RUN, OWNER.peer_id, 0, 5, OWNER), OWNER, (ADDRESS,))
    within = encode_link(RunLink(RUN, (ADDRESS,), OWNER.peer_id, "ours", invite))
    for word, said in (
        (LINK, "a run link, which is no secret"),
        (within, "a run link with an invite in it: a secret"),
    ):
        text = save_settings(tmp_path, {"invite": word}).read_text()
        assert f'\ninvite = "{word}"  # {said}\n' in text and text.count("secret") == 1
        assert load_settings_table(tmp_path / "node.toml", "node")["invite"] == word
    assert "secret" not in save_settings(tmp_path, {"join": [ADDRESS]}).read_text()


def test_a_run_by_invite_needs_one(join: Join, tmp_path: Path) -> None:
    status, shown = join(
        [],
        ("Run link", ADDRESS),
        ("Name or id", "closed-one"),
        ("Name or id", "back"),
        ("Run link", LINK),
        *USUAL,
        ("What now?", "quit"),
    )
    assert status == 0 and "takes members by invite" in shown and "nothing was saved" in shown


def test_who_is_let_in_needs_no_invite(join: Join, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By list; with the owner's key; or who was let in before. What led to another run is not kept."""
    folder = tmp_path / "my node"
    folder.mkdir()
    settings = folder / "node.toml"
    settings.write_text(f'[node]\ninvite = "{LINK}"\nthreads = 2\n')
    status, shown = join([ADDRESS], ("Name or id", "listed-one"), *USUAL, ("What now?", "save"))
    assert status == 0 and "has to put this node on a list" in shown
    values = tomllib.loads(settings.read_text())["node"]
    assert values["run"] == run_called("listed-one").id and values["threads"] == 2 and "invite" not in values
    closed = ([ADDRESS], ("Name or id", "closed-one"), *USUAL, ("What now?", "quit"))
    with monkeypatch.context() as owner:
        owner.setattr(guide, "owns", lambda where, key: (where, key) == (folder, OWNER.peer_id))
        assert "takes members by invite" not in join(*closed)[1]
    kept = run_folder(folder, run_called("closed-one").id) / "admission"
    kept.parent.mkdir(parents=True)
    kept.touch()
    assert "takes members by invite" not in join(*closed)[1]


def test_this_machine_decides_what_is_asked(join: Join, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guide, "mains", lambda: True)
    monkeypatch.setattr(guide, "can_start_by_itself", lambda: False)
    battery = ("mains power only?", "")
    status, shown = join([LINK], *USUAL, battery, ("What now?", "service"), ("What now?", "quit"))
    assert status == 0 and "answer one of start, save, quit\n" in shown


def test_a_folder_in_use_is_left_alone(join: Join, tmp_path: Path) -> None:
    with DataDir(tmp_path / "my node", parents=True):
        status, shown = join([LINK])
    assert status == 2 and "a node runs with the data folder" in shown


@pytest.mark.process
def test_it_starts_by_itself(join: Join, tmp_path: Path) -> None:
    status, shown = join([LINK], *USUAL, ("What now?", "service"))
    assert status == 0
    unit = tmp_path / "config/systemd/user" / UNIT
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == ["--user daemon-reload", f"--user enable --now {UNIT}"]
    assert f'"--config" "{tmp_path}/my node/node.toml"' in unit.read_text()
    for words in ("loginctl enable-linger", "disable --now", f"rm {unit}", "journalctl --user"):
        assert words in shown


@pytest.mark.process
def test_a_manager_that_refuses_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "systemctl"
    tool.write_text("#!/bin/sh\necho 'Failed to connect\nto bus' >&2; exit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(UserError, match="daemon-reload failed: Failed to connect to bus") as error:
        start_by_itself(tmp_path / "node.toml")
    assert "enable --now" in error.value.hint


@pytest.mark.process
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_the_user_s_unit_is_one(tmp_path: Path) -> None:
    shipped = shipped_unit()
    assert shipped is not None
    unit = tmp_path / UNIT
    unit.write_text(user_unit(shipped.read_text(encoding="utf-8"), tmp_path / 'my "50 %" node.toml'))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--user", str(unit)],
        capture_output=True,
        text=True,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0 and UNIT not in done.stderr, done.stderr
    text = unit.read_text()
    assert f'"--config" "{tmp_path}/my \\"50 %%\\" node.toml"\n' in text
    assert "WatchdogSec=" in text and "SystemCallFilter=" in text and "User=" not in text
    assert "WantedBy=default.target" in text and "ProtectSystem" not in text


def test_without_a_terminal_it_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.run(["join", LINK]) == 2
    said = capsys.readouterr().err
    assert "there is nobody at a terminal" in said and "p2pdiloco node LINK, with --name" in said
