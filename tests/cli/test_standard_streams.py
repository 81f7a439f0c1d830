"""Standard streams that are closed, or that cannot show a character."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest
from deadlines import within_s

from p2pdiloco.cli.main import run

pytestmark = pytest.mark.process

NOBODY = "/ip4/127.0.0.1/tcp/1/p2p/12D3KooWJbJFaZ1dwpuu9tQY3ELCKCpWMJc1dSRVbcMwhiLiFq7q"
COMMAND = f"exec {sys.executable} -m p2pdiloco"


@pytest.mark.parametrize("closed", ["<&-", ">&- 2>&- <&-"])
def test_a_command_with_an_event_loop_runs_with_closed_streams(closed: str) -> None:
    asked = subprocess.run(
        ["sh", "-c", f"{COMMAND} status --join {NOBODY} --timeout-s 2 {closed}"], timeout=within_s(60)
    )
    assert asked.returncode == 4, "nobody is there: a sentence, if anybody can read it"


@pytest.mark.parametrize("name", ["Zo\\xeb", "Zo\\udceb"])
def test_what_the_encoding_cannot_show_is_escaped(name: str) -> None:
    program = f"from p2pdiloco.cli.interrupt import make_usable; make_usable(); print('{name}')"
    ascii_only = os.environ | {"PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"}
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=ascii_only)
    assert shown.stdout == f"{name}\n", shown.stderr


def test_a_stop_counts_before_there_is_an_event_loop() -> None:
    """Also of the first process of a container, to which an unhandled SIGTERM is nothing."""
    early = "main.run = lambda words: os.kill(os.getpid(), signal.SIGTERM) or 0"
    program = f"import os, signal; from p2pdiloco.cli import main; {early}; main.main()"
    assert subprocess.run([sys.executable, "-c", program], timeout=within_s(60)).returncode == 143


def test_an_empty_home_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "")
    assert run(["--version"]) == 0
    assert Path("~").expanduser() == Path(pwd.getpwuid(os.getuid()).pw_dir)
