"""A learner makes no inner steps while its daemon is stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from learner_kit import Bench

from p2pdiloco.learner.channel import Stop
from p2pdiloco.learner.lifeline import LOOK_EVERY_S, STOPPED_S, DaemonStandstill
from p2pdiloco.learner.loop import StepReport

CONNECTING = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.recv(1)"

pytestmark = pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="Linux says who is there")


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[tuple[int, socket.socket]]:
    """A process with a connection to us, and our end."""
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        listening.listen()
        process = subprocess.Popen([sys.executable, "-c", CONNECTING, str(tmp_path / "socket")])
        try:
            ours, _ = listening.accept()
            with ours:
                yield process.pid, ours
        finally:
            process.kill()
            process.wait()


def put(pid: int, number: signal.Signals, until: int) -> None:
    """Send a signal, and wait until the process is stopped, or goes on."""
    os.kill(pid, number)
    assert os.waitpid(pid, until)[0] == pid


@pytest.mark.process
def test_a_process_that_is_stopped_for_some_seconds_stands_still(daemon: tuple[int, socket.socket]) -> None:
    pid, ours = daemon
    now = [100.0]
    standstill = DaemonStandstill(ours, lambda: now[0])
    assert not standstill.lasts()
    put(pid, signal.SIGSTOP, os.WUNTRACED)
    assert not standstill.lasts(), "it was looked at just now"
    now[0] += LOOK_EVERY_S
    assert not standstill.lasts(), "a short stop makes no difference"
    now[0] += STOPPED_S
    assert standstill.lasts()
    put(pid, signal.SIGCONT, os.WCONTINUED)
    now[0] += LOOK_EVERY_S
    assert not standstill.lasts()


@pytest.mark.process
def test_a_process_that_is_gone_does_not_stand_still(daemon: tuple[int, socket.socket]) -> None:
    pid, ours = daemon
    now = [100.0]
    standstill = DaemonStandstill(ours, lambda: now[0])
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    for _ in range(9):
        now[0] += LOOK_EVERY_S
        assert not standstill.lasts()


@pytest.mark.parametrize("ends", [False, True])
def test_no_inner_step_is_made_while_the_daemon_stands_still(
    ends: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench = Bench()
    try:
        looks = iter([True, True, True, False])
        asked: list[bool] = []

        def lasts() -> bool:
            asked.append(next(looks))
            if ends and len(asked) == 2:
                bench.post(Stop())
            return asked[-1]

        monkeypatch.setattr(bench.channel.standstill, "lasts", lasts)
        monkeypatch.setattr(bench.channel, "wait", lambda timeout_s: None)
        assert bench.mailbox.boundary(StepReport(1, 2.0, 0)) is not ends
        assert len(asked) == (3 if ends else 4), "an end that was asked for before is obeyed"
        assert "stopped" in capsys.readouterr().err
    finally:
        bench.close()
