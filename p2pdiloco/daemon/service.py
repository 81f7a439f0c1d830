"""Word to the service manager that started this process (sd_notify(3)): ready, status, still alive, stopping.

It listens at a socket that it names in the environment; without one nothing is said. A datagram is all of the
protocol, so there is no library for it. Nothing here waits, and nothing here fails: who does not read is told
nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket

from p2pdiloco.errors import clean

SOCKET, WATCHDOG, WATCHDOG_PID = "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"
MAX_STATUS = 500


def tell_ready() -> None:
    """Say that others can reach this peer."""
    _tell("READY=1")


def tell_status(words: str) -> None:
    """Say in one line what this process does; `systemctl status` shows it."""
    _tell(f"STATUS={clean(words)[:MAX_STATUS]}")


def tell_stopping() -> None:
    """Say that the end has begun."""
    _tell("STOPPING=1\nSTATUS=leaving: finishing what is in flight, saving")


async def keep_alive() -> None:
    """Say, for ever, that the event loop turns, twice as often as is asked for; return if it is not."""
    period_s = watchdog_s() / 2
    while period_s:
        _tell("WATCHDOG=1")
        await asyncio.sleep(period_s)


def watchdog_s() -> float:
    """Seconds within which the service manager wants to hear of this process; 0: it does not."""
    try:
        is_ours = int(os.environ.get(WATCHDOG_PID) or os.getpid()) == os.getpid()
        return int(os.environ[WATCHDOG]) / 1e6 if is_ours else 0.0
    except (KeyError, ValueError):
        return 0.0


def _tell(message: str) -> None:
    path = os.environ.get(SOCKET, "")
    if not path.startswith(("/", "@")):
        return
    address = "\0" + path[1:] if path[0] == "@" else path
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.setblocking(False)
        sock.sendto(message.encode(errors="replace"), address)
