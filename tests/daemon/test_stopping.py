"""Stopping a daemon: signals, and a terminal that closes under it."""

from __future__ import annotations

import asyncio
import os
import pty
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from deadlines import within_s

from p2pdiloco import priority
from p2pdiloco.daemon.program import print_addresses
from p2pdiloco.daemon.start import OWN_TICK_S, STARVED, OwnTime

PROBE = """
import asyncio, fcntl, os, signal, sys, termios
from pathlib import Path
from p2pdiloco.daemon import program

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
        print("leaving", file=sys.stderr, flush=True)
    told.write_text("left")

sys.exit(program.run_program(body, "text"))
"""


@pytest.mark.process
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
from p2pdiloco.daemon import program

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


@pytest.mark.process
def test_a_daemon_that_ends_does_not_look_through_all_that_it_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", GARBAGE], capture_output=True, text=True, timeout=within_s(60)
    )
    assert (done.stdout, done.returncode) == ("over ", 0), done.stderr


SPEAKING = """
import asyncio, logging, signal, sys
from pathlib import Path
from p2pdiloco.daemon import program

lines, end, told, more = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[5]

async def body(stop):
    for number in range(lines):
        print(f"printed {number}{more}", flush=True)
        logging.getLogger("p2pdiloco").info("logged %d%s", number, more)
    if end == "bug":
        raise ZeroDivisionError("a bug")
    signal.raise_signal(signal.SIGTERM)
    await stop.wait()
    told.write_text("left")
    if end == "at once":
        signal.raise_signal(signal.SIGTERM)
        await asyncio.Event().wait()

sys.exit(program.run_program(body, sys.argv[4]))
"""


@pytest.mark.process
@pytest.mark.parametrize("log", ["text", "json"])
@pytest.mark.parametrize(("end", "status"), [("in order", 0), ("at once", 130), ("bug", 1)])
def test_a_reader_that_takes_nothing_holds_no_daemon(end: str, status: int, log: str, tmp_path: Path) -> None:
    """A daemon that says more than a pipe and its queue hold leaves nevertheless, however it leaves."""
    ours, its = os.pipe()
    told = tmp_path / "told"
    command = [sys.executable, "-c", SPEAKING, "4000", end, str(told), log, "." * 500]
    process = subprocess.Popen(command, stdout=its, stderr=its)
    try:
        assert process.wait(60) == status
    finally:
        process.kill()
        process.wait()
        os.close(its)
        os.close(ours)
    assert told.exists() == (end != "bug")


@pytest.mark.process
@pytest.mark.parametrize(("end", "last"), [("in order", "logged 2999"), ("bug", "ZeroDivisionError: a bug")])
def test_nothing_that_is_said_is_lost_at_an_end(end: str, last: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SPEAKING, "3000", end, str(tmp_path / "told"), "text", ""]
    done = subprocess.run(command, capture_output=True, text=True, timeout=within_s(60))
    assert done.stdout.splitlines() == [f"printed {number}" for number in range(3000)]
    logged = [line for line in done.stderr.splitlines() if "logged" in line]
    assert len(logged) == 3000 and done.stderr.splitlines()[-1].endswith(last)


@pytest.mark.parametrize(
    ("addresses", "is_told"),
    [
        (["/ip4/127.0.0.1/tcp/1/p2p/x", "/ip6/::1/tcp/1/p2p/x"], True),
        (["/ip4/192.0.2.1/tcp/1/p2p/x", "/ip4/127.0.0.1/tcp/1/p2p/x"], False),
        (["/dns4/a.example/tcp/1/p2p/x"], False),
    ],
)
def test_who_listens_on_the_loopback_only_is_told(
    addresses: list[str], is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    print_addresses(addresses, "bootstrap")
    assert ("cannot be reached from other machines" in caplog.text) == is_told


def test_leaving_counts_the_time_that_the_machine_gives_us_and_not_for_ever() -> None:
    asked = asyncio.Event()
    calm, busy, stuck, away = (OwnTime(1.0, event) for event in (asked, asked, asked, asyncio.Event()))
    asked.set()
    assert [calm.is_over(OWN_TICK_S) for _ in range(21)].index(True) in (19, 20)
    assert not any(busy.is_over(3 * OWN_TICK_S) for _ in range(19))  # 2.85 s by the clock on the wall
    assert stuck.is_over(STARVED + 0.1)
    ticks = [away.is_over(OWN_TICK_S) for _ in range(round(STARVED / OWN_TICK_S) + 2)]
    assert ticks.index(True) >= round(STARVED / OWN_TICK_S) - 2  # nobody waits for a node that goes away


# Stepping back for others on one machine: as far as the system allows, and never an error.


class Threads:
    """Niceness by thread, where some have ended and perhaps nothing may be changed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, forbidden: bool = False) -> None:
        self.nice: dict[int, int] = {11: 0, 13: 15, 14: 0}
        self.forbidden = forbidden
        self.listed = [{11, 12, 13}, {11, 12, 13, 14}]
        monkeypatch.setattr(priority, "_threads", lambda pid: self.listed.pop(0))
        monkeypatch.setattr(priority, "lower_session", lambda pid, niceness: True)
        monkeypatch.setattr(os, "getpriority", self.get)
        monkeypatch.setattr(os, "setpriority", self.set)

    def get(self, _which: int, thread: int) -> int:
        if thread not in self.nice:
            raise ProcessLookupError
        return self.nice[thread]

    def set(self, _which: int, thread: int, niceness: int) -> None:
        if self.forbidden:
            raise PermissionError
        self.nice[thread] = niceness


def test_a_thread_that_ends_and_one_that_starts_keep_no_other_from_stepping_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads = Threads(monkeypatch)
    assert priority.lower_process(10, 7)
    assert threads.nice == {11: 7, 13: 15, 14: 7}, "never up"


def test_zero_is_not_at_all_also_of_who_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads(monkeypatch)
    threads.nice = {11: -5, 12: 0, 13: 0, 14: 0}
    assert priority.lower_process(10, 0)
    assert threads.nice[11] == -5


def test_a_system_that_forbids_it_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = Threads(monkeypatch, forbidden=True)
    assert not priority.lower_process(10, 7) and not threads.listed
    monkeypatch.setattr(os, "getpriority", lambda which, thread: 0)
    monkeypatch.setattr(priority, "LINUX", True)
    assert not priority.lower_thread(7)
    with ThreadPoolExecutor(1, "tensors", priority.lower_thread, (7,)) as executor:
        assert executor.submit(int).result() == 0


@pytest.mark.parametrize(
    ("device", "wanted", "niceness"),
    [
        ("cpu", "auto", 0),
        ("cpu, a program's own loop", "auto", 0),
        ("2 x cpu, sharded", "auto", 0),
        ("cuda", "auto", 12),
        ("mps, a program's own loop", "auto", 12),
        ("cuda", "0", 0),
        ("cpu", "12", 12),
    ],
)
def test_rounds_step_back_by_themselves_for_a_learner_that_waits_for_its_gpu(
    device: str, wanted: str, niceness: int
) -> None:
    assert priority.daemon_niceness(device, wanted) == niceness


async def test_what_comes_too_soon_is_tried_again_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", pause)
    answers = [False, False, True]
    assert await priority.patiently(lambda pid, niceness: answers.pop(0), 10, 7) and len(pauses) == 2
    assert not await priority.patiently(lambda pid, niceness: False, 10, 7)
    assert len(pauses) == 2 + priority.ATTEMPTS
