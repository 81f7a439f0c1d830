"""How long a test waits for what must happen: seconds of a quiet machine, times how slow this one is now.

A deadline ends a test that would wait for ever. How fast a machine is that has other things to do is no
property of what is tested.
"""

from __future__ import annotations

import os
import time

MOST = 10.0
"""No machine is taken for slower than that: a test that fails says so some day."""
FRESH_S = 5.0
"""A measurement counts for so long."""
PIECE = 300_000
"""Additions of one measurement."""
PIECE_S = 0.010
"""What they take on a quiet core of 2020, with Python 3.11."""


class Machine:
    """Tells how slow this machine is. What is read can be replaced by tests."""

    def __init__(self) -> None:
        self._measured_at = float("-inf")
        self._slowness = 1.0

    def slowness(self) -> float:
        """At least 1, at most `MOST`. At most every `FRESH_S` it takes the time of one measurement."""
        now = time.monotonic()
        if now - self._measured_at > FRESH_S:
            self._slowness = min(max(1.0, self.waits_for_cores(), self.computes_slowly()), MOST)
            self._measured_at = now
        return self._slowness

    def waits_for_cores(self) -> float:
        """How many processes there were for each core, over the last minute. Also a process of a low priority
        is one: what a test starts may be of a lower one."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return os.getloadavg()[0] / cores

    def computes_slowly(self) -> float:
        """How many times as long as on a quiet machine a piece of computing takes, at this moment. The load
        lags behind, and does not know of a slow processor, nor of a limit that a container has."""
        began, total = time.perf_counter(), 0
        for number in range(PIECE):
            total += number
        return (time.perf_counter() - began) / PIECE_S


MACHINE = Machine()


def within_s(seconds: float) -> float:
    """So many seconds of a quiet machine, as seconds of this one, as it is now."""
    return seconds * MACHINE.slowness()


class Deadline:
    """So many seconds of a quiet machine from now on. How slow this one is counts when they are over: others
    may have begun to compute in the meantime."""

    def __init__(self, seconds: float) -> None:
        self._began = time.monotonic()
        self._seconds = seconds

    def over(self) -> bool:
        """Whether nobody should wait any longer."""
        return self.left_s() <= 0

    def left_s(self) -> float:
        """Seconds until one should look again; none, or fewer: it is over."""
        took_s = time.monotonic() - self._began
        if took_s < self._seconds:
            return self._seconds - took_s
        return within_s(self._seconds) - took_s

    def __str__(self) -> str:
        return f"{time.monotonic() - self._began:.0f} s, {self._seconds:g} s of a quiet machine"
