"""A process that ends with the one at the other end of a socket, however that ends."""

from __future__ import annotations

import os
import select
import socket
import threading

from p2pdiloco.errors import P2PDilocoError

EXIT_FAILED = 1
EXIT_ORPHANED = 70
EXIT_TOO_LARGE = 75
"""What its processes compute together does not fit: the next learner is to take half as much at a time."""


class PassTooLarge(P2PDilocoError):
    """What one process computes at a time does not fit, and others compute it with it: all must take less."""


def exit_status(error: P2PDilocoError) -> int:
    """Of a learner's process that ends for it."""
    return EXIT_TOO_LARGE if isinstance(error, PassTooLarge) else EXIT_FAILED


def end_with(sock: socket.socket) -> None:
    """End this process as soon as the other end of the socket is closed, whatever it is doing."""
    threading.Thread(target=_watch, args=(sock,), name="lifeline", daemon=True).start()


def _watch(sock: socket.socket) -> None:
    hang_up = getattr(select, "POLLRDHUP", 0) | select.POLLHUP
    poll = select.poll()
    poll.register(sock.fileno(), hang_up)
    while not any(happened & (hang_up | select.POLLERR) for _, happened in poll.poll()):
        pass
    os._exit(EXIT_ORPHANED)
