"""Niceness of threads, processes and sessions: who steps back for whom on one machine.

Linux shares the processor between sessions first (each is a scheduling group, if it is in no cgroup of its
own, as services are), then within them by niceness. So a process that steps back does so with all its threads
and, if its session is its own, with the session. What cannot be lowered stays as it is: nothing depends on
it.
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
BESIDE_GPU = 12
"""Niceness of the daemon beside a learner on a GPU: of 0, 10 and 12 the least with which such a learner kept
0.97 of its pace in rounds."""


def lower_process(pid: int, niceness: int) -> bool:
    """Let a process of ours, and its session if it leads one, step back to this niceness (0 to 19, never up;
    0: not at all). False: something of it stays as it was (`lower_session`, or a sandbox forbids it)."""
    known: set[int] = set()
    lowered = True
    for _ in range(2):  # who was not lowered yet may have started another thread meanwhile
        found = _threads(pid) - known
        lowered = all([_lower(thread, niceness) for thread in found]) and lowered
        known |= found
    return lower_session(pid, niceness) and lowered


def lower_session(pid: int, niceness: int) -> bool:
    """Let the session that a process of ours leads step back behind other sessions.
    False: it stays as it was, perhaps because Linux lets only ten a second be changed, of all users'.
    True also where it leads none, or sessions are not what is scheduled."""
    group = Path(f"/proc/{pid}/autogroup")
    try:
        if niceness and group.exists() and os.getsid(pid) == pid:
            words = group.read_text().split()  # "/autogroup-7 nice 0", or nothing
            if words and int(words[-1]) < niceness:
                group.write_text(str(niceness))
    except (FileNotFoundError, ProcessLookupError):  # it has ended
        pass
    except OSError:
        return False
    return True


def daemon_niceness(device: str, wanted: str) -> int:
    """Niceness that `--daemon-nice` means beside a learner on `device` (as the learner names it).

    With "auto", a learner that waits for its GPU wants little of the processor, and at once. One on the CPU
    wants all there is, for which rounds would have to starve.
    """
    if wanted == "auto":
        return 0 if "cpu" in device else BESIDE_GPU
    return int(wanted)


async def patiently(lower: Callable[[int, int], bool], pid: int, niceness: int) -> bool:
    """Call `lower_process` or `lower_session`, again for a second while it comes too soon after others."""
    for _ in range(ATTEMPTS):
        if lower(pid, niceness):
            return True
        await asyncio.sleep(PAUSE_S)
    return False


def lower_thread(niceness: int) -> bool:
    """Let the calling thread step back behind the others of its session. Linux only: elsewhere a niceness is
    the whole process's. False: it stays as it was."""
    return not LINUX or _lower(threading.get_native_id(), niceness)


def _threads(pid: int) -> set[int]:
    try:
        return {int(path.name) for path in Path(f"/proc/{pid}/task").iterdir()} if LINUX else {pid}
    except OSError:  # it has ended, or there is no /proc: then at least its first thread
        return {pid}


def _lower(thread: int, niceness: int) -> bool:
    """Lower one thread. Some sandboxes (a service's system call filter) let nobody do even this: False."""
    try:
        if niceness and os.getpriority(os.PRIO_PROCESS, thread) < niceness:
            os.setpriority(os.PRIO_PROCESS, thread, niceness)
    except ProcessLookupError:  # it has ended
        pass
    except OSError:
        return False
    return True
