"""Keys of a terminal, read in a process whose terminal it is."""

from __future__ import annotations

import os
import pty
import sys
from collections.abc import Callable

from p2pdiloco.daemon.display.keys import Keys

PROGRAM = """
import select, sys, termios
from p2pdiloco.daemon.display.keys import Keys
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


def said_until(read: Callable[[], bytes], word: bytes) -> bytes:
    said = b""
    while word not in said:
        said += read()
    return said


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
