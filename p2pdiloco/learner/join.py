"""Connection to a daemon that waits for a program's learner (`daemon.learner.guest`)."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from p2pdiloco.errors import StorageError

HELLO = b"p2pdiloco-learner-1\n"
"""First bytes on the socket; the exchange's descriptor comes with them."""


def join_daemon(path: Path, timeout_s: float) -> tuple[socket.socket, int]:
    """Connect to the daemon; returns the connection, and a descriptor of the exchange.

    Raises:
        StorageError: nobody listens there (yet).
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout_s)
    try:
        connection.connect(str(path))
        hello, descriptors, _, _ = socket.recv_fds(connection, len(HELLO), 1)
    except OSError as error:
        connection.close()
        raise StorageError(f"no daemon at {path}: {error}") from error
    if hello != HELLO or len(descriptors) != 1:
        connection.close()
        for descriptor in descriptors:
            os.close(descriptor)
        raise StorageError(f"{path} is no daemon that waits for a learner, or it has one already")
    return connection, descriptors[0]
