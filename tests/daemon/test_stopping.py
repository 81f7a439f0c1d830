"""Stopping a daemon: signals, and a terminal that closes under it."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

PROBE = """
import asyncio, fcntl, os, signal, sys, termios
from pathlib import Path
from p2pdiloco.daemon import process as program

hangup, told = sys.argv[1], Path(sys.argv[2])
signal.signal(signal.SIGHUP, signal.SIG_IGN if hangup == "ignored" else signal.SIG_DFL)

async def body(stop):
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    os.write(1, b"ready")
    if hangup == "ignored":
        while os.isatty(0):
            await asyncio.sleep(0)
        signal.raise_signal(signal.SIGTERM)
    await stop.wait()
    signal.raise_signal(signal.SIGHUP)  # a shell hands it on
    await asyncio.sleep(0)
    if hangup != "ignored":
        signal.raise_signal(signal.SIGTERM)  # who logs out, or shuts down, sends one as well: it is the first
        await asyncio.sleep(0)
        print("leaving", flush=True)
        os.write(2, b"leaving")
    told.write_text("left")

sys.exit(program.run_program(body, "text"))
"""


@pytest.mark.parametrize("hangup", ["taken", "ignored"])
def test_a_terminal_that_closes_lets_a_daemon_leave_in_order(hangup: str, tmp_path: Path) -> None:
    ours, its = pty.openpty()
    told = tmp_path / "told"
    command = [sys.executable, "-c", PROBE, hangup, str(told)]
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its)
    try:
        os.close(its)
        said = b""
        while b"ready" not in said:
            said += os.read(ours, 1024)
        os.close(ours)
        assert process.wait(30) == 0
    finally:
        process.kill()
        process.wait()
    assert told.read_text() == "left"
    assert told.stat().st_mode & 0o777 == 0o600, "what a daemon writes is its user's"


GARBAGE = """
import os, sys
from p2pdiloco.daemon import process as program

class Ring:
    def __init__(self):
        self.itself = self

    def __del__(self):
        os.write(1, b"found")

async def body(stop):
    Ring()

status = program.run_program(body, "text")
os.write(1, b"over ")
sys.exit(status)
"""


def test_a_daemon_that_ends_does_not_look_through_all_that_it_imported() -> None:
    done = subprocess.run([sys.executable, "-c", GARBAGE], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("over ", 0), done.stderr
