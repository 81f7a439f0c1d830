"""Stepping back for others on one machine: as far as the system allows, and never an error."""

from __future__ import annotations

import asyncio
import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from p2pdiloco import priority


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
