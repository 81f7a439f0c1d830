"""The tiers of the suite: what is quick opens no socket and starts no process."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
from tiers import Guard, OutsideError


def test_the_guard_refuses_what_is_outside_and_only_while_it_watches() -> None:
    guard = Guard()
    with guard.watching() as tried, socket.socket() as opened:
        with pytest.raises(OutsideError, match=r"socket\.bind"):
            opened.bind(("127.0.0.1", 0))
        with pytest.raises(OutsideError, match=r"socket\.connect"):
            opened.connect(("127.0.0.1", 9))
        with pytest.raises(OutsideError, match=r"subprocess\.Popen"):
            subprocess.run([sys.executable, "-c", ""], check=True)
        with pytest.raises(OutsideError, match=r"os\.fork"):
            os.fork()
    assert [words.split()[0] for words in tried] == [
        "socket.bind",
        "socket.connect",
        "subprocess.Popen",
        "os.fork",
    ]
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
