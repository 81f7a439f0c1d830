"""What a daemon tells the service manager that started it, and what it never waits for."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2pdiloco.daemon import program as service

pytestmark = pytest.mark.process

PROBE = """
import sys
from p2pdiloco.daemon import program

async def body(stop):
    program.print_addresses(["/ip4/192.0.2.1/tcp/1/p2p/x"], "node")
    await stop.wait()

sys.exit(program.run_program(body, "text"))
"""


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """The manager's socket, of which the environment tells."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(60)
        monkeypatch.setenv(service.SOCKET, str(tmp_path / "notify"))
        yield sock


def test_a_daemon_says_that_it_lives_that_it_is_ready_and_that_it_leaves(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(service.WATCHDOG, "40000000")
    process = subprocess.Popen([sys.executable, "-c", PROBE], stdout=subprocess.DEVNULL)
    try:
        told: list[bytes] = []
        while b"READY=1" not in told or b"WATCHDOG=1" not in told:
            told.append(manager.recv(1024))
        process.terminate()
        while not told[-1].startswith(b"STOPPING=1\n"):
            told.append(manager.recv(1024))
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


async def test_it_says_that_it_lives_while_its_loop_turns(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(service.WATCHDOG, "2000")
    alive = asyncio.create_task(service.keep_alive())
    manager.setblocking(False)
    for _ in range(3):
        assert await asyncio.get_running_loop().sock_recv(manager, 1024) == b"WATCHDOG=1"
    alive.cancel()


@pytest.mark.parametrize(
    ("usec", "pid", "expected_s"),
    [("3000000", "", 3.0), ("x", "", 0.0), ("3000000", "1", 0.0), (None, "", 0.0)],
)
async def test_the_watchdog_is_who_the_environment_says(
    usec: str | None, pid: str, expected_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(service.WATCHDOG_PID, pid or str(os.getpid()))
    monkeypatch.setenv(service.WATCHDOG, usec) if usec else monkeypatch.delenv(
        service.WATCHDOG, raising=False
    )
    assert service.watchdog_s() == expected_s
    if not expected_s:
        await service.keep_alive()


def test_status_is_one_printable_line_also_in_the_abstract_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(f"\0p2pdiloco-test-{os.getpid()}")
        sock.settimeout(60)
        monkeypatch.setenv(service.SOCKET, f"@p2pdiloco-test-{os.getpid()}")
        service.tell_status("step 7\nREADY=1\x1b[2J " + "x" * 999)
        said = sock.recv(4096).decode()
    assert said.startswith("STATUS=step 7") and said.count("\n") == 0 and "\x1b" not in said
    assert len(said) <= service.MAX_STATUS + len("STATUS=")


def test_a_manager_that_does_not_read_or_is_gone_is_told_nothing(
    manager: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(10_000):
        service.tell_ready()
    for nobody in ("", "relative", "/nowhere/at/all", "/" + "x" * 300):
        monkeypatch.setenv(service.SOCKET, nobody)
        service.tell_stopping()
