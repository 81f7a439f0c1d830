"""Standstill of the daemon: it is stopped (Ctrl-Z, SIGSTOP, a debugger), and its learner with it.

Whoever stops a node wants its machine back. The learner has a session of its own, which no Ctrl-Z reaches.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path

LOOK_EVERY_S = 1.0
STOPPED_S = 3.0
"""Standstill that makes no difference: of a swarm's pauses most are shorter."""
STOPPED_STATES = ("T", "t")
_CREDENTIALS = struct.Struct("3i")


class DaemonStandstill:
    """Standstill of the process at the other end of a socket; unknown elsewhere than on Linux."""

    def __init__(self, sock: socket.socket, clock: Callable[[], float] = time.monotonic) -> None:
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
    """Find the id of the process that made the other end; 0: unknown."""
    option = getattr(socket, "SO_PEERCRED", None)
    if option is None:
        return 0
    with contextlib.suppress(OSError):
        pid, _, _ = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size))
        return int(pid)
    return 0


def _state(pid: int) -> str:
    """Read a process's state, one letter (proc(5)); empty: it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b") ")[2][:1].decode("ascii")
    except OSError:
        return ""
