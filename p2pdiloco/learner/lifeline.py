"""End of a learner's process: when it comes, how long it may take, and what its exit status says.

The process ends with the process at the other end of a socket, and before others when memory runs out. It
does not end for a full log, nor for signals that others are sent as well. While its daemon is stopped
(`DaemonStandstill`), it makes no inner steps.
"""

from __future__ import annotations

import io
import signal
import socket
import struct
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from p2pdiloco.errors import DataError, P2PDilocoError
from p2pdiloco.util import Now

DRAIN_TIMEOUT_S = 2.0
"""Seconds that a daemon may take to read the last words."""
SAVE_S = 3.0
SAVE_AT_MOST_S = 120.0
SAVE_BYTES_PER_S = 100e6
"""Bytes a second that a slow disk writes."""
STATE_BYTES = 20
"""Bytes that a parameter takes at an orderly end: displacement and moments of the learner, Θ and momentum of
the daemon."""
EXIT_FAILED = 1
EXIT_TOO_LARGE = 75
"""Exit status of a learner whose processes together compute what does not fit: the next one takes half as
much at a time."""
EXIT_DATA = 65
"""Exit status of a learner whose data are not what they should be: no other one finds better ones."""
EXIT_RANK_KILLED = 76
"""Exit status of a learner of which one process was killed, as the system does for lack of memory."""


class PassTooLarge(P2PDilocoError):
    """Lack of memory in one process while others compute the same pass: all must take less at a time."""


class RankKilled(P2PDilocoError):
    """Error: another process of this learner was killed."""


def ignore_signals() -> None:
    """Ignore SIGINT and SIGTERM, which also come from a Ctrl-C and from whoever ends a whole session or
    group.

    The daemon says whether this node ends, and what is saved before. It has SIGKILL.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A compiler's processes must not inherit that it is ignored.
    signal.signal(signal.SIGTERM, lambda *_: None)


def memory_kills() -> int:
    """Number of processes that this system has ended for lack of memory (Linux; elsewhere 0)."""
    try:
        counters = Path("/proc/vmstat").read_text().split()
        return int(counters[counters.index("oom_kill") + 1])
    except (OSError, ValueError):
        return 0


def exit_status(error: P2PDilocoError) -> int:
    """Exit status of a learner's process that ends for this error."""
    if isinstance(error, RankKilled):
        return EXIT_RANK_KILLED
    if isinstance(error, DataError):
        return EXIT_DATA
    return EXIT_TOO_LARGE if isinstance(error, PassTooLarge) else EXIT_FAILED


def save_takes_s(parameters: int) -> float:
    """Seconds that the state of a model of so many parameters may take to be written at an orderly end."""
    return min(SAVE_AT_MOST_S, SAVE_S + STATE_BYTES * parameters / SAVE_BYTES_PER_S)


class _Log(io.FileIO):
    """Log that loses what does not fit: a full disk must not end a process that writes that it is full."""

    def write(self, data: Any, /) -> int:
        with suppress(OSError):  # there is nowhere to say it
            super().write(data)
        return memoryview(data).nbytes


def speak(fd: int) -> IO[str]:
    """Send what this process says to the descriptor from now on, as far as it can be written."""
    log = io.TextIOWrapper(_Log(fd, "w", closefd=False), errors="backslashreplace", write_through=True)
    sys.stdout = sys.stderr = log
    return log


LOOK_EVERY_S = 1.0
STOPPED_S = 3.0
"""Standstill that makes no difference: of a swarm's pauses most are shorter."""
STOPPED_STATES = ("T", "t")
_CREDENTIALS = struct.Struct("3i")


class DaemonStandstill:
    """Standstill of the process at the other end of a socket: it is stopped (Ctrl-Z, SIGSTOP, a debugger).
    Unknown elsewhere than on Linux.

    Somebody who stops a node wants the machine back. The learner has a session of its own, which no Ctrl-Z
    reaches.
    """

    def __init__(self, sock: socket.socket, clock: Now = time.monotonic) -> None:
        self._pid = _process_behind(sock)
        self._clock = clock
        self._looked_s = float("-inf")
        self._since_s: float | None = None

    def lasts(self) -> bool:
        """Tell whether it has lasted for `STOPPED_S`. Looks once a `LOOK_EVERY_S`: costs next to nothing."""
        now = self._clock()
        if self._pid and now - self._looked_s >= LOOK_EVERY_S:
            self._looked_s = now
            stopped = _state(self._pid) in STOPPED_STATES
            self._since_s = (now if self._since_s is None else self._since_s) if stopped else None
        return self._since_s is not None and now - self._since_s >= STOPPED_S


def _process_behind(sock: socket.socket) -> int:
    """Id of the process that made the other end; 0: unknown."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return 0
    with suppress(OSError):
        pid, _, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size))
        return int(pid)
    return 0


def _state(pid: int) -> str:
    """State of a process, one letter (proc(5)); empty: it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1].decode("ascii")
    except OSError:
        return ""
