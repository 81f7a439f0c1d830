"""Guard of event loops: nothing waits for a disk, for /proc or for a driver in the thread of one.

A daemon whose loop stands still sends no heartbeats, and is taken for dead after three seconds.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import sqlite3
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import psutil

ALLOWED = {
    # Before the transport begins.
    ("data_dir.py", "DataDir.lock"),
    ("data_dir.py", "DataDir.__enter__"),
    ("identity.py", "Identity.load_or_create"),
    # Before the node is a member: it sends no heartbeats, and nobody counts on it.
    ("member.py", "RunHoldings.__init__"),
    ("admission.py", "own_admission"),
    ("member.py", "Approval.approve"),
    ("member.py", "Approval.check"),
    ("run.py", "room_for"),
    ("status_command.py", "visit"),  # a command is no daemon
    # Of tests: a node signs in another thread, a bootstrap in another process.
    ("run.py", "sign_run"),
    ("served_runs.py", "sign_all"),
    ("control.py", "NodeControls.__init__"),
}
"""Functions of the package, by file and qualified name, below which a start may wait."""
NET = ("dns", "endpoint", "flow", "framing", "hivemind_", "multiaddrs", "p2pd", "streams")
ROOMS = ("/p2pdiloco/daemon/", "/p2pdiloco/web/", *(f"/p2pdiloco/adapters/{name}" for name in NET))
"""Rooms of what a daemon's loop runs."""
TESTS = Path(__file__).parent
READERS = ("cpu_times", "net_if_stats", "process_iter", "sensors_battery", "virtual_memory")


def may_wait() -> bool:
    """Tell whether this thread may: it runs no event loop of the package's, is at an allowed place, or a test
    called what waits itself, with no coroutine of the package between."""
    if asyncio._get_running_loop() is None:
        return True
    frame: FrameType | None = sys._getframe(2)
    ours = coroutine = False
    while frame is not None:
        code = frame.f_code
        if TESTS in Path(code.co_filename).parents and code.co_filename != __file__:
            if not coroutine:
                return True
        else:
            is_package = f"{os.sep}p2pdiloco{os.sep}" in code.co_filename
            coroutine = coroutine or (is_package and bool(code.co_flags & inspect.CO_COROUTINE))
        if (Path(code.co_filename).name, code.co_qualname) in ALLOWED:
            return True
        ours = ours or any(room in code.co_filename for room in ROOMS)
        frame = frame.f_back
    return not ours


@contextmanager
def guarded(found: Callable[[str], None]) -> Iterator[None]:
    """Context in which `found` is told of every wait in the thread of an event loop, with its stack."""
    disks = (os, "fsync"), (sqlite3, "connect")
    places = [*disks, (psutil.Process, "__init__"), *((psutil, name) for name in READERS)]
    real = [(where, name, getattr(where, name)) for where, name in places if hasattr(where, name)]

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if not may_wait():
                found(f"{name} in the thread of the event loop:\n{''.join(traceback.format_stack()[-14:-1])}")
            return function(*arguments, **named)

        return call

    for where, name, function in real:
        setattr(where, name, watched(name, function))
    try:
        yield
    finally:
        for where, name, function in real:
            setattr(where, name, function)
