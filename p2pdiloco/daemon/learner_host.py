"""Host of the learner process, on the daemon's side: starts it, talks to it, ends it.

It runs in the daemon's event loop and needs no torch beyond the exchange. Whether and from what a dead
learner is started again is the daemon's policy, for which `Failures` and `Silence` count: a host only reports
`LearnerExited`. `GuestHost` is for a program with a training loop of its own.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import signal
import socket
import stat
import struct
import sys
from asyncio.subprocess import Process
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from subprocess import DEVNULL
from typing import Literal, cast

from msgspec.structs import replace

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.errors import StorageError, UserError, invariant
from p2pdiloco.learner.channel import (
    HELLO,
    BaseRef,
    ChannelBroken,
    Command,
    Deframer,
    Failed,
    FollowCourse,
    LearnerEvent,
    LearnerOptions,
    RestoreMode,
    SpareMachine,
    Start,
    Stop,
    decode_event,
    frame,
)
from p2pdiloco.learner.lifeline import EXIT_DATA, EXIT_RANK_KILLED, EXIT_TOO_LARGE, memory_kills
from p2pdiloco.tensors.layout import Exchange, FragmentLayout
from p2pdiloco.util import Frozen, clear_folder_at, listening_socket

logger = logging.getLogger(__name__)

MAX_UNREAD_BYTES = 1024 * 1024
"""Bytes of commands that a learner may leave unread. One that leaves more is hung, and is killed."""
MAX_LOG_BYTES = 1024 * 1024
QUOTED_LOG_BYTES = 1500
ENVIRONMENT = {"GOMP_SPINCOUNT": "1000"}
"""Environment of learners, unless the node's own says how threads wait.

Threads that wait for each other at the end of an operation spin. Where they spin for ever so long, also for a
thread whose processor something else has, an inner step took a hundred times as long while one other process
computed. For some microseconds it costs little there, less than sleeping at once costs on an idle machine
(docs/topics/devices.md, `scripts/bench/study/bench_threads.py`).
"""
WAITING = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")

STARVED = "this machine ran out of memory"
MORE_MEMORY = "a machine with more memory, or less beside it: p2pdiloco run check says how much a node needs"


class LearnerExited(Frozen):
    """Event: the learner process is gone and all its events have been delivered.

    `code` is the exit status, negative for a signal. It is 0 only after a stop that was asked for.
    """

    code: int
    reason: str
    hint: str = ""
    halved: bool = False
    """True: the next one computes half as many tokens at a time, since this one did not fit."""


OnEvent = Callable[[LearnerEvent | LearnerExited], None]


class LearnerHost:
    """Host of one learner process at a time, and the channel to it."""

    guest = False
    """True: learners are programs of somebody else's (`GuestHost`)."""

    def __init__(
        self,
        manifest: Manifest,
        layouts: Sequence[FragmentLayout],
        exchange: Exchange,
        options: LearnerOptions,
        on_event: OnEvent,
        log_path: Path,
    ) -> None:
        """`on_event` is called on the event loop; `log_path` takes the learner's stderr."""
        self._manifest = manifest
        self._fragments = len(layouts)
        self._exchange = exchange
        self._options = options
        self._on_event = on_event
        self._log_path = log_path
        self._process: Process | None = None
        self._link: LearnerSocket | None = None
        self._exit: asyncio.Task[int] | None = None
        self._failure = self._hint = ""
        self._course, self._spare = FollowCourse(), SpareMachine()
        self._greeted = False
        """True: the learner that is here has been told to start."""
        self._memory_kills = 0
        """Kills for want of memory on the whole system, when this process began."""
        self._log_bytes = 0
        """Bytes of the log, when this process began."""

    @property
    def running(self) -> bool:
        """True: there is a learner process whose exit has not been reported yet."""
        return self._process is not None

    @property
    def pid(self) -> int | None:
        """Process id while `running`."""
        return self._process.pid if self._process is not None else None

    async def prepare(self) -> None:
        """Start the process ahead of its work, so that its imports (seconds) overlap with catching up.

        Raises:
            StorageError: the log file cannot be written.
        """
        invariant(not self.running, "a learner is running already")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with theirs:
            try:
                process = await self._spawn(theirs.fileno())
            except BaseException:
                ours.close()
                raise
        link = LearnerSocket(self._deliver)
        await asyncio.get_running_loop().create_unix_connection(lambda: link, sock=ours)
        self._process, self._link, self._failure, self._hint = process, link, "", ""
        self._greeted = False
        self._exit = asyncio.create_task(self._watch(process, link), name="learner-exit")

    async def start(
        self,
        bases: Sequence[BaseRef],
        restore_path: Path | None = None,
        restore: Sequence[RestoreMode] = (),
    ) -> None:
        """Start learning from the versions that lie in the exchange, in the prepared process or a new one.

        `Ready` follows as an event.

        Raises:
            StorageError: the log file cannot be written.
        """
        command = self.start_command(bases, restore_path, restore)
        if not self.running:
            await self.prepare()
        self._greeted = self.send(command)

    def start_command(
        self, bases: Sequence[BaseRef], restore_path: Path | None, restore: Sequence[RestoreMode]
    ) -> Start:
        """Make the command that a learner hears first."""
        invariant(len(bases) == self._fragments, "one base per fragment")
        invariant(len(restore) in (0, self._fragments), "one restore mode per fragment, or none at all")
        return Start(
            manifest=self._manifest,
            options=self._options,
            bases=tuple(bases),
            restore_path=restore_path,
            restore=tuple(restore),
            course=self._course,
            spare=self._spare,
        )

    def follow(self, course: FollowCourse | SpareMachine) -> None:
        """Let the learner go by this course of the run, or this wish of the machine's owner; also later
        ones."""
        if isinstance(course, SpareMachine):
            self._spare = course
        else:
            self._course = course
        if self._greeted:
            self.send(course)

    def send(self, command: Command) -> bool:
        """Post a command. False: there is no learner to take it. Never blocks."""
        if self._link is None:
            return False
        if self._link.unread_bytes() > MAX_UNREAD_BYTES:
            self.kill("it stopped reading commands")
            return False
        return self._link.write(frame(command))

    def kill(self, reason: str = "") -> None:
        """Kill the process; `LearnerExited` follows, with that reason unless there is one already."""
        self._failure = self._failure or reason
        self._signal(signal.SIGKILL)

    async def stop(self, save_path: Path | None, timeout_s: float) -> int | None:
        """Ask the learner to save (if a path is given) and to end; SIGKILL after timeout_s.

        Returns the exit status (None: no learner runs). `LearnerExited` has been delivered then.
        """
        exit_task = self._exit
        if not self.running or exit_task is None:
            return None
        self.send(Stop(save_path=save_path))
        if not (await asyncio.wait({exit_task}, timeout=timeout_s))[0]:
            self.kill()
        return await asyncio.shield(exit_task)

    async def left_alone(self, for_s: float) -> None:
        """Wait until no learner has been here for so long. That never is so with this host: another one is
        started."""
        await asyncio.Event().wait()

    def close(self) -> None:
        """Let go of what outlives a learner: here, nothing."""

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _spawn(self, channel_fd: int) -> Process:
        log = open_log(self._log_path)
        self._log_bytes = os.fstat(log).st_size
        self._memory_kills = memory_kills()
        try:
            return await begin(channel_fd, self._exchange.fd, log, _environment())
        finally:
            os.close(log)

    async def _watch(self, process: Process, link: LearnerSocket) -> int:
        """Wait for process and channel to end, then report. A cancelled watch takes the learner along."""
        try:
            code = await process.wait()
        except asyncio.CancelledError:
            self._signal(signal.SIGKILL)
            link.close()
            raise
        # Events written just before the end are still in the socket; EOF comes behind them.
        await link.closed.wait()
        said = self._failure or link.failure
        reason = said or _describe(code, self._log_path, self._log_bytes)
        # Not by us: that it would say.
        killed = code == EXIT_RANK_KILLED or (code == -signal.SIGKILL and not said)
        starved = killed and memory_kills() > self._memory_kills
        if starved:
            reason, self._hint = f"{reason}: {STARVED}", self._hint or MORE_MEMORY
        halved = starved or code == EXIT_TOO_LARGE
        if halved:
            self._options = replace(self._options, halvings=self._options.halvings + 1)
        self._process = self._link = None
        self._on_event(LearnerExited(code, reason, self._hint, halved))
        return code

    def _deliver(self, body: bytes) -> None:
        try:
            event = decode_event(body)
        except ChannelBroken as error:
            self.kill(str(error))
            return
        if isinstance(event, Failed):
            self._failure, self._hint = event.reason, event.hint
        self._on_event(event)


MakeHost = Callable[[OnEvent], LearnerHost]
"""Factory of the host that tells its events there."""


class LearnerSocket(asyncio.Protocol):
    """Daemon's end of the socket pair."""

    def __init__(self, deliver: Callable[[bytes], None]) -> None:
        self.closed = asyncio.Event()
        self.failure = ""
        self._deliver = deliver
        self._deframer = Deframer()
        self._transport: asyncio.WriteTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)  # uvloop's is no subclass of it

    def data_received(self, data: bytes) -> None:
        try:
            bodies = self._deframer.feed(data)
        except ChannelBroken as error:
            self.failure = str(error)
            self.close()  # the learner ends by itself when its socket closes
            return
        for body in bodies:
            self._deliver(body)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()

    def unread_bytes(self) -> int:
        return self._transport.get_write_buffer_size() if self._transport is not None else 0

    def write(self, data: bytes) -> bool:
        if self._transport is None or self._transport.is_closing():
            return False
        self._transport.write(data)
        return True

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def begin(channel_fd: int, exchange_fd: int, log: int, environment: Mapping[str, str]) -> Process:
    """Start the learner's program with these descriptors, of which the last takes what it says."""
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        "-m",
        "p2pdiloco.learner",
        str(channel_fd),
        str(exchange_fd),
        stdin=DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(channel_fd, exchange_fd),
        # A Ctrl-C at the terminal is the daemon's to handle.
        start_new_session=True,
        env=environment,
    )


def _environment() -> dict[str, str]:
    is_chosen = any(name in os.environ for name in WAITING)
    return dict(os.environ) if is_chosen else os.environ | ENVIRONMENT


def open_log(path: Path) -> int:
    """Open the log of a learner's programs; one that has grown large begins anew. Raises: StorageError."""
    try:
        clear_folder_at(path)
        grown = path.exists() and path.stat().st_size > MAX_LOG_BYTES
        mode = os.O_TRUNC if grown else os.O_APPEND
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | mode, 0o600)
    except OSError as error:
        raise StorageError(f"cannot write the learner's log {path}: {error.strerror}") from error


def _describe(code: int, log_path: Path, since: int) -> str:
    """Describe why a learner ended that did not say so itself: its status and the end of what it wrote.

    The log was `since` bytes long when the learner began.
    """
    if code == 0:
        return "stopped"
    how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    try:
        text = log_path.read_bytes()[since:][-QUOTED_LOG_BYTES:].decode(errors="replace").strip()
    except OSError:
        return how
    last = " | ".join(line.strip() for line in text.splitlines()[-3:])
    return f"{how}; its last words: {last}" if last else how


ACCEPT_PAUSE_S = 1.0
"""Pause after a connection that could not be taken, such as for want of file descriptors."""


class GuestHost(LearnerHost):
    """Host that waits for a guest: a learner that the daemon did not start, a program with a training loop of
    its own.

    The program connects to a socket in the file system, and gets the descriptor of the exchange with the
    first bytes. From then on it is what a learner process is (`learner.channel`). Its end is a learner's
    absence; the next one to connect goes on. It is never signalled: a program that hangs loses its connection
    only.
    """

    guest = True

    def __init__(
        self,
        socket_path: Path,
        manifest: Manifest,
        layouts: Sequence[FragmentLayout],
        exchange: Exchange,
        options: LearnerOptions,
        on_event: OnEvent,
        log_path: Path,
    ) -> None:
        """`socket_path`: path where learners connect; made anew. The others: as of `LearnerHost`."""
        super().__init__(manifest, layouts, exchange, options, on_event, log_path)
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
        """Post a command, as `LearnerHost.send`. A program that has not begun yet is told nothing else."""
        return self._greeted and super().send(command)

    def kill(self, reason: str = "") -> None:
        """Drop the connection: the program is not ours to end."""
        self._failure = self._failure or reason
        if self._link is not None:
            self._link.close()

    async def stop(self, save_path: Path | None, timeout_s: float) -> int | None:
        """Tell the program to save (if a path is given) and to stop; after timeout_s its connection is
        dropped.

        Returns as `LearnerHost.stop`.
        """
        self._start = None
        return await super().stop(save_path, timeout_s)

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
            self.send(replace(start, **newest))

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
        return listening_socket(path)
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
        with suppress(OSError):
            size = struct.calcsize("3i")
            found: int = struct.unpack(
                "3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
            )[0]
            return found
    return 0


RESTART_MAX_S = 30.0
HEALTHY_S = 60.0
"""Life of a learner after which it died of something new: the back-off begins again."""
FAILED_STARTS = 3
"""Number of learners in a row without an inner step after which there is none."""


class Failures:
    """Count of learners' ends: says whether there is another one, and after what pause."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._by_data = 0
        """Learners in a row that ended for data that cannot be read."""
        self._without_step = 0
        """Learners in a row that ended before they had made an inner step."""
        self.stepped = False
        """True: the present one has made an inner step, so nothing was lacking for one."""
        self._ready_s = math.inf
        """Time at which the present one began to make inner steps."""

    def ready(self, now: float) -> None:
        """Note that the learner begins to make inner steps."""
        self._ready_s = now

    def made_step(self) -> None:
        """Note that the learner has made an inner step."""
        self.stepped, self._without_step = True, 0

    def ended(self, exited: LearnerExited, guest: bool, now: float) -> float:
        """Return the seconds until the next one is started; infinite: never, a learner cannot train here.

        A `guest`'s start is its owner's.
        """
        if now - self._ready_s >= HEALTHY_S:
            self._in_a_row = self._by_data = 0
        by_data = exited.code == EXIT_DATA and not guest
        self._by_data = self._by_data + 1 if by_data else 0
        # Of one that had trained a read may have failed for once: the next one comes to the same place soon.
        no_data = by_data and (self._by_data > 1 or not self.stepped)
        fits_now = exited.code == EXIT_TOO_LARGE  # the next one takes less: it need not be waited for
        self._in_a_row += not fits_now
        self._without_step += not self.stepped and not guest and not fits_now
        self.reset()
        if self._without_step >= FAILED_STARTS or no_data:
            return math.inf
        return 0.0 if guest else min(RESTART_MAX_S, 0.2 * 4 ** min(max(self._in_a_row - 1, 0), 4))

    def reset(self) -> None:
        """Note that there is no learner."""
        self.stepped, self._ready_s = False, math.inf


TICK_S = 5.0
DOUBT_S, DOUBT_STEPS = 60.0, 20
"""Silence, in seconds and in its usual inner steps, after which it is said."""
HANGS_S, HANGS_STEPS = 600.0, 100
"""Silence after which the learner is ended: evaluations and saves take some minutes at most."""


class Silence:
    """Time for which nothing has been heard of a learner: it may hang (a driver, a disk, a stopped process).

    Time is counted in the daemon's own ticks: a daemon that was stopped itself, or a machine that slept,
    accuses nobody.
    """

    def __init__(self) -> None:
        self.silent_s = 0.0
        self._doubted = False

    def heard(self) -> bool:
        """Note that it has said something; return whether it was doubted before."""
        doubted, self.silent_s, self._doubted = self._doubted, 0.0, False
        return doubted

    def tick(self, step_s: float) -> Literal["", "doubtful", "hangs"]:
        """Count `TICK_S`, which have gone by; return what is to be thought of the learner now.

        `step_s`: its usual inner step; 0: it has made none yet. Then it may compile, or load what is large,
        for as long as it likes.
        """
        self.silent_s += TICK_S
        if step_s and self.silent_s >= max(HANGS_S, HANGS_STEPS * step_s):
            return "hangs"
        if not self._doubted and self.silent_s >= max(DOUBT_S, DOUBT_STEPS * step_s):
            self._doubted = True
            return "doubtful"
        return ""
