"""Keys of a terminal, read in a process whose terminal it is."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from p2pdiloco.daemon.display.terminal import Keys
from p2pdiloco.daemon.program import HURRIED

HIDE_CURSOR, SHOW_CURSOR = b"\x1b[?25l", b"\x1b[?25h"

PROGRAM = """
import select, sys, termios
from p2pdiloco.daemon.display.terminal import Keys
before = termios.tcgetattr(0)
keys = Keys()
keys.start()
print("ready", flush=True)
found = ""
while "q" not in found:
    select.select([0], [], [], 0.05)
    found += keys.pressed()
    if "x" in found and "shell" not in found:  # Ctrl-Z and fg: the shell has put its own modes back
        found += " shell "
        termios.tcsetattr(0, termios.TCSANOW, before)
        print("shell", flush=True)
keys.stop()
keys.stop()
assert keys.pressed() == ""
print("found", found, termios.tcgetattr(0) == before, flush=True)
"""

LEAVING = """
import asyncio, fcntl, signal, sys, termios
from types import SimpleNamespace
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.daemon import start as node
from p2pdiloco.daemon.display.logs import RecentLines
from p2pdiloco.daemon.program import run_program
sys.path.insert(0, sys.argv[1])
from view_kit import snapshot

async def body(stop):
    signal.alarm(60)  # it outlives no test that was killed
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    member = SimpleNamespace(report=SimpleNamespace(snapshot=lambda now: snapshot()))
    showing = asyncio.create_task(node._show(member, NodeSettings(log="tui"), RecentLines()))
    await stop.wait()
    print("leaving", flush=True)
    await showing

sys.exit(run_program(body, "text"))
"""


def said_until(read: Callable[[], bytes], word: bytes) -> bytes:
    said = b""
    while word not in said:
        said += read()
    return said


@pytest.mark.process
def test_keys_come_at_once_without_an_echo_and_the_terminal_is_given_back() -> None:
    child, terminal = pty.fork()
    if child == 0:  # the terminal is its own
        os.execv(sys.executable, [sys.executable, "-c", PROGRAM])
    try:
        said_until(lambda: os.read(terminal, 1024), b"ready")
        os.write(terminal, b"x?")
        said = said_until(lambda: os.read(terminal, 1024), b"shell")
        assert b"x?" not in said, "no echo"
        os.write(terminal, b"q")
        said = said_until(lambda: os.read(terminal, 1024), b"True")
        assert b"found x? shell q True" in said
    finally:
        os.close(terminal)
        os.waitpid(child, 0)


@pytest.mark.process
def test_q_leaves_and_once_more_at_once_and_the_terminal_is_given_back() -> None:
    ours, its = os.openpty()
    before = termios.tcgetattr(ours)
    command = [sys.executable, "-c", LEAVING, str(Path(__file__).parent)]
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, start_new_session=True)
    os.close(its)
    try:
        said_until(lambda: os.read(ours, 1024), b"tokens/s")
        os.write(ours, b"?")
        said_until(lambda: os.read(ours, 1024), b"leave in good order")
        os.write(ours, b"q")
        said_until(lambda: os.read(ours, 1024), b"leaving")
        os.write(ours, b"q")
        assert HIDE_CURSOR not in said_until(lambda: os.read(ours, 1024), SHOW_CURSOR)
        assert process.wait(60) == HURRIED
        assert termios.tcgetattr(ours) == before
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_there_are_no_keys_where_there_is_no_terminal_of_ours() -> None:
    reading, writing = os.pipe()
    other, terminal = pty.openpty()  # somebody else's
    try:
        os.write(writing, b"q")
        os.write(other, b"q\n")
        for descriptor in (reading, terminal, -1):
            keys = Keys(descriptor)
            keys.start()
            assert keys.pressed() == ""
            keys.stop()
    finally:
        for descriptor in (reading, writing, other, terminal):
            os.close(descriptor)
