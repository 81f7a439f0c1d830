"""Client of the control socket: asks the node that runs here with a data folder."""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

from p2pdiloco.daemon.control.controls import AWAY, ControlState
from p2pdiloco.daemon.control.server import is_owner
from p2pdiloco.daemon.control.wire_lines import (
    MAX_LINE_BYTES,
    Reply,
    Request,
    decode_reply,
    encode,
    socket_path,
)
from p2pdiloco.errors import UserError
from p2pdiloco.util import DAMAGE

TIMEOUT_S, STATE_TIMEOUT_S = 10.0, 2.0


class NodeSilent(UserError):
    """Error: the node that runs here does not answer."""

    exit_status = 3


def ask(data_dir: Path, request: Request, timeout_s: float = TIMEOUT_S) -> Reply:
    """Ask the node with this data folder.

    Raises:
        NodeSilent: it does not listen, or does not answer in time.
        UserError: its socket is another user's.
    """
    path = socket_path(data_dir)
    try:
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
            connection.settimeout(timeout_s)
            connection.connect(str(path))
            if os.geteuid() != 0 and not is_owner(connection):  # root may talk to a service's node
                raise UserError(f"{path} belongs to another user")
            connection.sendall(encode(request))
            return decode_reply(_line(connection))
    except (OSError, EOFError) as error:
        hint = "is it starting? a bootstrap, and a node of an earlier version, have no such controls"
        why = (isinstance(error, OSError) and error.strerror) or error
        raise NodeSilent(
            f"the node with the data folder {data_dir} does not answer at {path}: {why}", hint
        ) from error
    except DAMAGE as error:
        raise NodeSilent(f"the node at {path} answers in words of another version") from error


def away_words(data_dir: Path) -> str:
    """Say why the node that runs here is away from its run for now, with no connection to anybody; empty: it
    is not, or does not say."""
    state = state_here(data_dir)
    if state is None or state.state != AWAY:
        return ""
    return state.rest.words if state.rest is not None else "away"


def state_here(data_dir: Path) -> ControlState | None:
    """Ask the node that runs here how it stands, for its owner; None: none runs, or it does not say."""
    with contextlib.suppress(UserError):
        return ask(data_dir, Request("state"), STATE_TIMEOUT_S).state
    return None


def _line(connection: socket.socket) -> bytes:
    found = b""
    while not found.endswith(b"\n"):
        part = connection.recv(MAX_LINE_BYTES)
        if not part or len(found) > MAX_LINE_BYTES:
            raise EOFError("it hung up")
        found += part
    return found
