"""What tests of real nodes start them with: its own failures are said, and it leaves nobody behind."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from deadlines import within_s
from launcher import Launched, Launcher
from system_kit import Swarm

END_S = 30.0


@pytest.fixture
def launcher() -> Iterator[Launcher]:
    made = Launcher(os.environ)
    yield made
    made.kill(within_s(END_S))


def test_a_process_that_has_just_ended_can_be_signalled(launcher: Launcher, tmp_path: Path) -> None:
    """Whether it has is known a moment later than it does."""
    found = launcher.start(["--version"], tmp_path / "out", tmp_path / "err")
    while found.poll() is None:
        found.send_signal(signal.SIGCONT)
    assert found.wait(within_s(END_S)) == 0 and "p2pdiloco" in (tmp_path / "out").read_text()


def test_nobody_waits_for_a_launcher_that_has_ended(launcher: Launcher, tmp_path: Path) -> None:
    launcher.kill(within_s(END_S))
    with pytest.raises(AssertionError, match="launcher ended"):
        Launched(launcher, os.getpid()).wait(None)
    with pytest.raises(AssertionError, match="launcher ended"):
        launcher.start(["--version"], tmp_path / "out", tmp_path / "err")


def test_a_command_that_hangs_is_named(launcher: Launcher, tmp_path: Path) -> None:
    with pytest.raises(subprocess.TimeoutExpired, match="p2pdiloco status --json"):
        Launched(launcher, os.getpid(), ["status", "--json"]).wait(0.01)
    with Swarm(tmp_path) as swarm, pytest.raises(AssertionError, match=r"p2pdiloco plan --help: did not end"):
        swarm.command("plan", "--help", timeout_s=0.001)
