"""A learner makes no inner steps while its daemon is stopped; its words where they cannot be written."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
from learner_kit import Bench

from p2pdiloco.learner.channel import Stop
from p2pdiloco.learner.lifeline import LOOK_EVERY_S, STOPPED_S, DaemonStandstill, speak
from p2pdiloco.learner.loop import StepReport

CONNECTING = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.recv(1)"

linux = pytest.mark.skipif(not hasattr(socket, "SO_PEERCRED"), reason="Linux says who is there")


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


@linux
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


@linux
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


@linux
@pytest.mark.parametrize("ends", [False, True])
def test_no_inner_step_is_made_while_the_daemon_stands_still(
    ends: bool, bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


# A process whose words cannot be written.


@pytest.fixture
def file(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[tuple[Path, int]]:
    """A file that is opened for words (`request.param`, or one of its own); what speaks now is put back."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    path = Path(getattr(request, "param", tmp_path / "learner.log"))
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    yield path, fd
    os.close(fd)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a file that is always full is Linux's")
@pytest.mark.parametrize("file", ["/dev/full"], indirect=True)
def test_a_full_disk_takes_no_word_and_ends_nobody(file: tuple[Path, int]) -> None:
    _, fd = file
    with pytest.raises(OSError, match="No space left"):
        os.write(fd, b"x")
    with speak(fd) as log:
        print("a word")
        print("another", file=sys.stderr, flush=True)
        try:
            raise ValueError("of ours")
        except ValueError:
            traceback.print_exc()
        log.flush()


def test_words_are_there_at_once_and_in_order(file: tuple[Path, int]) -> None:
    path, fd = file
    speak(fd)
    print("one")
    assert path.read_text() == "one\n"
    print("two \udc80", file=sys.stderr)
    assert path.read_text() == "one\ntwo \\udc80\n"
