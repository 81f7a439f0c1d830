"""Guest: a learner that the daemon did not start, a program with a training loop of its own.

It connects to a socket in the file system, and gets the descriptor of the exchange with the first bytes. From
then on it is what a learner process is (`learner.channel`). Its end is a learner's absence; the next one to
connect goes on. It is never signalled: a program that hangs loses its connection only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import stat
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from p2pdiloco.daemon.learner.host import LearnerExited, LearnerHost, LearnerSocket
from p2pdiloco.errors import UserError
from p2pdiloco.learner.channel import HELLO, BaseRef, Command, RestoreMode, Start, Stop

ACCEPT_PAUSE_S = 1.0
"""Pause after a connection that could not be taken, such as for want of file descriptors."""
logger = logging.getLogger(__name__)


class GuestHost(LearnerHost):
    """Host that waits for a learner instead of starting one."""

    guest = True

    def __init__(self, socket_path: Path, *host: Any) -> None:
        """`socket_path`: path where learners connect; made anew. `host`: see `LearnerHost`."""
        super().__init__(*host)
        self._socket_path = socket_path
        self._listener: socket.socket | None = None
        self._made: tuple[int, int] | None = None
        """Inode of the socket that we made."""
        self._accepting: asyncio.Task[None] | None = None
        self._start: Start | None = None
        self._pid = 0
        self._here, self._gone = asyncio.Event(), asyncio.Event()
        """Events of which exactly one is set: a program is connected, or none is."""
        self._gone.set()

    @property
    def running(self) -> bool:
        """True: a learner is here."""
        return self._link is not None

    @property
    def pid(self) -> int | None:
        """Process id of the program that is connected; 0: this system does not say."""
        return self._pid if self.running else None

    async def prepare(self) -> None:
        """Wait for a program from now on.

        Raises:
            UserError: the socket cannot be made, or there is something else at its path.
        """
        if self._listener is not None:
            return
        listener = _bound(self._socket_path)
        self._made = _inode(self._socket_path)
        listener.listen(2)
        listener.setblocking(False)
        self._listener = listener
        self._accepting = asyncio.create_task(self._accept(listener), name="learner-socket")
        logger.info("waiting for a training program at %s", self._socket_path)

    async def start(
        self,
        bases: Sequence[BaseRef],
        restore_path: Path | None = None,
        restore: Sequence[RestoreMode] = (),
    ) -> None:
        """Start the program that is here, or the next one, from the versions in the exchange."""
        await self.prepare()
        self._start = self.start_command(bases, restore_path, restore)
        self._greet()

    def send(self, command: Command) -> bool:
        """See `LearnerHost.send`. A program that has not begun yet is told nothing else."""
        return self._greeted and super().send(command)

    def kill(self, reason: str = "") -> None:
        """Drop the connection: the program is not ours to end."""
        self._failure = self._failure or reason
        if self._link is not None:
            self._link.close()

    async def stop(self, save_path: Path | None, timeout_s: float) -> int | None:
        """Tell the program to save (if a path is given) and to stop; after timeout_s its connection is
        dropped.

        See `LearnerHost.stop`.
        """
        self._start = None
        exit_task = self._exit
        if self._link is None or exit_task is None:
            return None
        self.send(Stop(save_path=save_path))
        if not (await asyncio.wait({exit_task}, timeout=timeout_s))[0]:
            self.kill()
        return await asyncio.shield(exit_task)

    async def left_alone(self, for_s: float) -> None:
        """Wait until no program has been connected for so long."""
        while True:
            await self._gone.wait()
            try:
                async with asyncio.timeout(for_s):
                    await self._here.wait()
            except TimeoutError:
                return

    def close(self) -> None:
        """Stop listening: nobody is waited for any more."""
        if self._accepting is not None:
            self._accepting.cancel()
        if self._listener is not None:
            self._listener.close()
            if self._made is not None and _inode(self._socket_path) == self._made:
                self._socket_path.unlink(missing_ok=True)
        self._listener = self._accepting = None
        self.kill()

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                connection, _ = await loop.sock_accept(listener)
                await self._take(connection)
            except OSError as error:
                logger.warning("a training program could not be taken: %s", error)
                await asyncio.sleep(ACCEPT_PAUSE_S)

    async def _take(self, connection: socket.socket) -> None:
        """Take a connection. Raises: OSError (it is gone, or this process has no room for it); it is
        closed then."""
        if self._link is not None:
            connection.close()  # one learner at a time
            return
        link = LearnerSocket(self._deliver)
        try:
            socket.send_fds(connection, [HELLO], [self._exchange.fd])
            pid = _pid_of(connection)
            connection.setblocking(False)
            await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=connection)
        except OSError:
            connection.close()
            raise
        self._pid, self._link, self._failure, self._greeted = pid, link, "", False
        self._here.set()
        self._gone.clear()
        self._exit = asyncio.create_task(self._watch_link(link), name="learner-exit")
        self._greet()

    def _greet(self) -> None:
        if self._link is not None and self._start is not None:
            self._greeted = True
            start, self._start = self._start, None
            newest = {"course": self._course, "spare": self._spare}  # others by now, perhaps
            self.send(msgspec.structs.replace(start, **newest))

    async def _watch_link(self, link: LearnerSocket) -> int:
        """Wait for the connection's end, then report it, if the program had anything to do."""
        try:
            await link.closed.wait()
        except asyncio.CancelledError:
            link.close()
            raise
        self._link = None
        self._here.clear()
        self._gone.set()
        if self._greeted:
            self._on_event(LearnerExited(0, self._failure or link.failure or "the training program is gone"))
        return 0


def try_socket(path: Path) -> None:
    """Try whether a socket can be made there, and remove it. Raises: UserError."""
    with _bound(path):
        path.unlink()


def _bound(path: Path) -> socket.socket:
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _make_room(path)
        with contextlib.ExitStack() as undo:
            listener = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            listener.bind(str(path))
            path.chmod(0o600)
            undo.pop_all()
            return listener
    except OSError as error:
        raise UserError(f"cannot listen for a learner at {path}: {error}") from error


def _make_room(path: Path) -> None:
    """Remove a socket that nobody listens on, which a daemon that was killed leaves behind.

    Raises:
        UserError: there is something else at that path. It may be dear to somebody.
        OSError: it cannot be looked at, or not be removed.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    hint = "name another path with --learner-socket, or move away what is there"
    if not stat.S_ISSOCK(mode):
        raise UserError(f"cannot listen for a learner at {path}: there is something that is no socket", hint)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
        except BlockingIOError:
            pass  # somebody listens, and is busy
    raise UserError(f"cannot listen for a learner at {path}: another program listens there", hint)


def _inode(path: Path) -> tuple[int, int] | None:
    """Identify what is at a path, not followed; None: nothing, or nothing that can be looked at."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _pid_of(connection: socket.socket) -> int:
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            size = struct.calcsize("3i")
            found: int = struct.unpack(
                "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            )[0]
            return found
    return 0
