"""Who steps back for whom on one machine: the niceness of threads, of processes, and of their sessions.

Linux shares the processor between sessions first (each is a scheduling group, if it is in no cgroup of its
own, as services are), then within them by niceness. So whoever steps back does so with all its threads and,
if its session is its own, with the session. What cannot be lowered stays as it is: nothing depends on it.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

LINUX = sys.platform == "linux"
ATTEMPTS = 8
PAUSE_S = 0.12


def lower_process(pid: int, niceness: int) -> bool:
    """Let a process of ours, and its session if it leads one, step back to this niceness (0 to 19, never up).
    False: the session stays as it was (`lower_session`)."""
    try:
        threads = [int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()] if LINUX else [pid]
        for thread in threads:
            _lower(thread, niceness)
    except (FileNotFoundError, ProcessLookupError):  # it has ended, or a thread has
        pass
    return lower_session(pid, niceness)


def lower_session(pid: int, niceness: int) -> bool:
    """Let the session that a process of ours leads step back behind other sessions.
    False: it stays as it was, perhaps because Linux lets only ten a second be changed, of all users'.
    True also where it leads none, or sessions are not what is scheduled."""
    group = Path(f"/proc/{pid}/autogroup")
    try:
        if niceness and group.exists() and os.getsid(pid) == pid:
            group.write_text(str(niceness))
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        pass
    except OSError:
        return False
    return True


async def patiently(lower: Callable[[int, int], bool], pid: int, niceness: int) -> bool:
    """One of the two above, again for a second when it comes too soon after others."""
    for _ in range(ATTEMPTS):
        if lower(pid, niceness):
            return True
        await asyncio.sleep(PAUSE_S)
    return False


def lower_thread(niceness: int) -> None:
    """Let the calling thread step back behind the others of its session. Linux only: elsewhere a niceness is
    the whole process's."""
    if LINUX:
        _lower(threading.get_native_id(), niceness)


def _lower(thread: int, niceness: int) -> None:
    if os.getpriority(os.PRIO_PROCESS, thread) < niceness:
        os.setpriority(os.PRIO_PROCESS, thread, niceness)
