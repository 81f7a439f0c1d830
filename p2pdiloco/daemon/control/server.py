"""Server of the control socket, `<data_dir>/control.sock`: for this user alone."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import stat
import struct
import sys
from pathlib import Path

from p2pdiloco.daemon.control.controls import OwnerControls
from p2pdiloco.daemon.control.wire_lines import (
    MAX_LINE_BYTES,
    Reply,
    Request,
    decode_request,
    encode,
    socket_path,
)
from p2pdiloco.errors import UserError
from p2pdiloco.util import DAMAGE

logger = logging.getLogger(__name__)
PATIENCE_S = 5.0
"""Time for a request to come, and for its answer to be taken."""
MAX_CLIENTS = 8
_UCRED = "3i"


class ControlServer:
    """Server of one node's controls."""

    def __init__(self, data_dir: Path, controls: OwnerControls) -> None:
        self._path = socket_path(data_dir)
        self._controls = controls
        self._server: asyncio.Server | None = None
        self._clients: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Listen, for this user only. The data folder is ours, so a socket that is there is nobody's any
        more.

        Where it cannot be made the node runs without: that is said.
        """
        try:
            _clear(self._path)
            with contextlib.ExitStack() as undo:
                listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                listener.bind(str(self._path))  # a daemon's files are its user's from the start
                self._path.chmod(0o600)
                self._server = await asyncio.start_unix_server(
                    self._accept, sock=listener, limit=MAX_LINE_BYTES
                )
                undo.pop_all()
        except OSError as error:
            why = error.strerror or str(error)
            logger.warning(
                "no control socket at %s (%s): pause, resume, finish and limits do not reach this node",
                self._path,
                why,
            )

    async def close(self) -> None:
        """Listen no longer; whoever is being answered is answered."""
        if self._server is None:
            return
        self._server.close()
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        if self._clients:
            await asyncio.wait(self._clients, timeout=PATIENCE_S)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(self._serve(reader, writer))
        self._clients.add(task)
        task.add_done_callback(self._clients.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        too_slow_gone_or_no_line = TimeoutError, OSError, EOFError, asyncio.LimitOverrunError
        with contextlib.closing(writer), contextlib.suppress(*too_slow_gone_or_no_line):
            async with asyncio.timeout(PATIENCE_S):
                writer.write(encode(await self._reply(reader, writer)))
                await writer.drain()

    async def _reply(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> Reply:
        line = await reader.readuntil(b"\n")  # also of who is refused, who would else not hear why
        if len(self._clients) > MAX_CLIENTS:
            return Reply(False, "too many ask this node at once", "try again")
        if not is_owner(writer.get_extra_info("socket")):
            return Reply(False, "this node belongs to another user")
        try:
            request = decode_request(line)
        except DAMAGE:
            return Reply(False, "not a request that this node knows", "is it of the same version?")
        try:
            return Reply(True, await self._do(request), state=self._controls.state())
        except UserError as error:
            return Reply(False, str(error), error.hint, self._controls.state())

    async def _do(self, request: Request) -> str:
        controls = self._controls
        match request.do:
            case "state":
                return ""
            case "pause":
                return await controls.pause()
            case "resume":
                return await controls.resume()
            case "finish":
                return controls.finish()
            case "limits":
                return await controls.limits(request.changes)


def _clear(path: Path) -> None:
    """Remove a socket that a killed node left. Raises: OSError (something else is there)."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode) or found.st_uid != os.geteuid():
        raise OSError("something else is there")
    path.unlink(missing_ok=True)


def is_owner(connection: socket.socket) -> bool:
    """Tell whether the process at the other end is of this user (or root), where the system says; elsewhere
    the file's rights have to do."""
    if sys.platform != "linux":
        return True
    try:
        raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(_UCRED))
    except OSError:
        return False
    _, uid, _ = struct.unpack(_UCRED, raw)
    return uid in (os.geteuid(), 0)
