"""`p2pdiloco join` at a pseudo-terminal: it asks, shows, saves and starts; nothing is half-written."""

from __future__ import annotations

import os
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from at_terminal import OWNER, run_called
from terminal_kit import CTRL_C, Terminal

from p2pdiloco.cli import main as cli_main
from p2pdiloco.cli.guided.autostart import UNIT, shipped_unit, start_by_itself, user_unit
from p2pdiloco.config.settings import load_settings_table
from p2pdiloco.daemon.admission.link import RunLink, encode_link
from p2pdiloco.errors import UserError

ADDRESS = f"/ip4/203.0.113.1/tcp/31337/p2p/{OWNER.peer_id}"
SCRIPT = str(Path(__file__).with_name("at_terminal.py"))
RUN = run_called("ours").id
LINK = encode_link(RunLink(RUN, (ADDRESS,), OWNER.peer_id, "ours"))
USUAL = [(words, "") for words in ("Name", "to send", "to receive", "of the disk", "month", "Hours")]
Join = Callable[..., Terminal]


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Join]:
    """Starts `p2pdiloco join` with these words, for the folder `node`."""
    made: list[Terminal] = []
    tools = tmp_path / "tools"
    tools.mkdir()
    systemctl = tools / "systemctl"
    systemctl.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    systemctl.chmod(0o755)

    def start(*words: str) -> Terminal:
        environment = {
            "PATH": f"{tools}:{os.environ['PATH']}",
            "XDG_CONFIG_HOME": str(tmp_path / "config"),
            "PYTHONPATH": os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(Path.cwd())]),
        }
        made.append(Terminal([SCRIPT, "join", *words, "--data-dir", str(tmp_path / "my node")], environment))
        return made[-1]

    yield start
    for terminal in made:
        terminal.kill()


def answer(terminal: Terminal, *answers: tuple[str, str]) -> None:
    """Give answers to questions, by what is in them."""
    for question, line in answers:
        terminal.expect(question)
        terminal.expect(": ")
        terminal.type(line)


def test_it_asks_shows_saves_and_starts(join: Join, tmp_path: Path) -> None:
    terminal = join(LINK)
    answer(
        terminal,
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
    )
    shown = terminal.expect("What now?")
    assert "run ours (" in shown and "memory: at least" in shown and "--max-disk 20GiB" in shown
    terminal.expect(": ")
    assert not (tmp_path / "my node").exists(), "nothing is written before the last answer"
    terminal.type("")
    assert terminal.end() == 0, terminal.shown
    folder = tmp_path / "my node"
    assert f"STARTED anna 10Mbit True {RUN} {folder}" in terminal.shown
    path = folder / "node.toml"
    values = load_settings_table(path, "node")
    told = {"name": "anna", "max_upload": "10Mbit", "max_disk": "20GiB", "hours": "22-7"}
    assert values == {"data_dir": folder, "invite": LINK, "max_transfer": "200GB/month", **told}
    assert path.stat().st_mode & 0o777 == 0o600 and not list(folder.glob("*.tmp"))

    # Once more: what was answered is what Enter takes; other keys stay.
    path.write_text(path.read_text() + "threads = 2\n")
    again = join()
    answer(again, (LINK[:20], ""), ("[anna]", ""), ("[10Mbit]", ""), ("no limit", ""), ("[20GiB]", ""))
    answer(again, ("[200GB/month]", ""), ("[22-7]", ""), ("What now?", "save"))
    assert again.end() == 0 and load_settings_table(path, "node") == values | {"threads": 2}
    assert "STARTED" not in again.shown


def test_an_address_needs_a_run(join: Join, tmp_path: Path) -> None:
    """The id of what was looked at is saved, which is sure, unlike a name."""
    terminal = join()
    terminal.expect(f"in this network: run {'ab' * 6} at /ip4/192.0.2.9/tcp/1")
    answer(
        terminal,
        ("[/ip4/192.0.2.9/tcp/1", "nonsense"),
        ("must look like", ADDRESS),
        ("Name or id of the run", "nowhere"),
        ("know no run nowhere", "own-data"),
        ("Name that others see", ""),
        ("your data", "/no/such"),
        ("does not exist", str(tmp_path)),
        ("to send", ""),
        ("to receive", ""),
        ("of the disk", "1KiB"),
        ("month", ""),
        ("Hours", ""),
    )
    terminal.expect("--max-disk is")
    answer(terminal, ("What now?", "back"), ("Hours", "back"), ("month", "back"), ("of the disk", ""))
    answer(terminal, ("month", ""), ("Hours", ""), ("What now?", "save"))
    assert terminal.end() == 0, terminal.shown
    values = tomllib.loads((tmp_path / "my node/node.toml").read_text())["node"]
    assert values["join"] == [ADDRESS] and values["run"] == run_called("own-data").id
    assert values["data"] == str(tmp_path) and "name" not in values and "max_upload" not in values


def test_ctrl_c_leaves_nothing(join: Join, tmp_path: Path) -> None:
    terminal = join(LINK)
    answer(terminal, *USUAL)
    terminal.expect("What now?")
    terminal.expect(": ")
    terminal.press(CTRL_C)
    assert terminal.end() == 130 and "Traceback" not in terminal.shown
    assert not (tmp_path / "my node").exists()


def test_a_run_by_invite_needs_one(join: Join, tmp_path: Path) -> None:
    terminal = join()
    answer(
        terminal,
        ("Run link", ADDRESS),
        ("Name or id", "closed-one"),
        ("takes members by invite", "back"),
        ("Run link", LINK),
        *USUAL,
        ("What now?", "quit"),
    )
    assert terminal.end() == 0 and "nothing was saved" in terminal.shown
    assert not (tmp_path / "my node").exists()


def test_it_starts_by_itself(join: Join, tmp_path: Path) -> None:
    terminal = join(LINK)
    answer(terminal, *USUAL)
    answer(terminal, ("What now?", "service"))
    assert terminal.end() == 0, terminal.shown
    unit = tmp_path / "config/systemd/user" / UNIT
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == ["--user daemon-reload", f"--user enable --now {UNIT}"]
    assert f'"--config" "{tmp_path}/my node/node.toml"' in unit.read_text()
    for words in ("loginctl enable-linger", "disable --now", f"rm {unit}", "journalctl --user"):
        assert words in terminal.shown
    assert "STARTED" not in terminal.shown


def test_a_manager_that_refuses_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "systemctl"
    tool.write_text("#!/bin/sh\necho 'Failed to connect\nto bus' >&2; exit 1\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(UserError, match="daemon-reload failed: Failed to connect to bus") as error:
        start_by_itself(tmp_path / "node.toml")
    assert "enable --now" in error.value.hint


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
    assert "WatchdogSec=" in text and "SystemCallFilter=" in text and "User=" not in text
    assert "WantedBy=default.target" in text and "ProtectSystem" not in text


def test_without_a_terminal_it_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli_main.run(["join", LINK]) == 2
    said = capsys.readouterr().err
    assert "there is nobody at a terminal" in said and "p2pdiloco node LINK, with --name" in said
