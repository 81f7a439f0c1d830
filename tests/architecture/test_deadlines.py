"""Deadlines of tests: they are of this machine's seconds, wherever a test waits for what must happen; tiers:
what is quick opens no socket and starts no process."""

from __future__ import annotations

import ast
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import deadlines
import pytest
from arch_source import nodes, sources
from deadlines import MOST, Deadline, Machine, within_s
from tiers import Guard, OutsideError

TESTS = Path(__file__).parents[1]
WAITS = {"asyncio.wait_for": 1, "asyncio.timeout": 0, "psutil.wait_procs": 1}
"""Functions that wait, and which of their arguments says how long. Others are told by a `timeout`."""
LEAST_S = 1.0
"""What is shorter is waited for to pass."""
ELSEWHERE = ("documents/", "slow/")


def of_machine(monkeypatch: pytest.MonkeyPatch, **slow: float) -> Machine:
    machine = Machine()
    for name in ("waits_for_cores", "computes_slowly"):
        monkeypatch.setattr(machine, name, lambda name=name: slow.get(name, 0.5))
    monkeypatch.setattr(deadlines, "MACHINE", machine)
    return machine


def test_a_quiet_machine_has_seconds_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    of_machine(monkeypatch)
    assert within_s(15) == 15


@pytest.mark.parametrize("why", ["waits_for_cores", "computes_slowly"])
def test_a_slow_one_has_longer_seconds_within_reason(monkeypatch: pytest.MonkeyPatch, why: str) -> None:
    of_machine(monkeypatch, **{why: 3.0})
    assert within_s(15) == 45
    of_machine(monkeypatch, **{why: 1e9})
    assert within_s(15) == 15 * MOST


def test_a_deadline_counts_as_slow_as_the_machine_is_when_it_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(deadlines.time, "monotonic", lambda: now[0])
    of_machine(monkeypatch)
    deadline = Deadline(15)
    assert not deadline.over() and deadline.left_s() == 15
    now[0] += 16
    assert deadline.over()
    of_machine(monkeypatch, waits_for_cores=2.0)  # since somebody else began to compute
    assert not deadline.over() and deadline.left_s() == 14
    now[0] += 14
    assert deadline.over()


def test_this_machine_is_measured() -> None:
    machine = Machine()
    assert machine.waits_for_cores() >= 0 < machine.computes_slowly() and 1 <= machine.slowness() <= MOST


def fixed(tree: ast.AST) -> Iterator[int]:
    """Lines of waiting for a fixed number of seconds."""
    for node in nodes(tree):
        if not isinstance(node, ast.Call):
            continue
        said = [word.value for word in node.keywords if word.arg == "timeout"]
        if (at := WAITS.get(ast.unparse(node.func))) is not None:
            said += node.args[at : at + 1]
        for seconds in said:
            if isinstance(seconds, ast.Constant) and isinstance(seconds.value, int | float):
                if seconds.value >= LEAST_S:
                    yield node.lineno
            elif isinstance(seconds, ast.Name) and seconds.id.isupper():
                yield node.lineno


def test_nobody_waits_for_a_fixed_time() -> None:
    found = [
        f"{path.relative_to(TESTS)}:{line}"
        for path, tree in sources("tests").items()
        if not any(words in str(path.relative_to(TESTS)) for words in ELSEWHERE)
        for line in fixed(tree)
    ]
    assert not found, f"tests/deadlines.py has within_s and Deadline: {found}"


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
