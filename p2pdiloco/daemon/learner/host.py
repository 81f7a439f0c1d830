"""Host of the learner process, on the daemon's side: starts it, talks to it, ends it.

It runs in the daemon's event loop and needs no torch beyond the exchange. Whether and from what a dead
learner is started again is the daemon's policy: the host only reports `LearnerExited`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from msgspec import Struct, structs

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.errors import StorageError, invariant
from p2pdiloco.learner.channel import (
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
from p2pdiloco.learner.lifeline import EXIT_RANK_KILLED, EXIT_TOO_LARGE, memory_kills
from p2pdiloco.tensors.layout import Exchange, FragmentLayout
from p2pdiloco.util import clear_folder_at

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


class LearnerExited(Struct, frozen=True):
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
    """True: learners are programs of somebody else's (`daemon.learner.guest`)."""

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
        self._process: asyncio.subprocess.Process | None = None
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
            self._signal(signal.SIGKILL)
        return await asyncio.shield(exit_task)

    async def left_alone(self, for_s: float) -> None:
        """Wait until no learner has been here for so long. That never is so with this host: another one is
        started."""
        await asyncio.Event().wait()

    def close(self) -> None:
        """Let go of what outlives a learner: here, nothing."""

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _spawn(self, channel_fd: int) -> asyncio.subprocess.Process:
        log = _open_log(self._log_path)
        self._log_bytes = os.fstat(log).st_size
        self._memory_kills = memory_kills()
        try:
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "p2pdiloco.learner",
                str(channel_fd),
                str(self._exchange.fd),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(channel_fd, self._exchange.fd),
                # A Ctrl-C at the terminal is the daemon's to handle.
                start_new_session=True,
                env=_environment(),
            )
        finally:
            os.close(log)

    async def _watch(self, process: asyncio.subprocess.Process, link: LearnerSocket) -> int:
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
            self._options = structs.replace(self._options, halvings=self._options.halvings + 1)
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


def _environment() -> dict[str, str]:
    is_chosen = any(name in os.environ for name in WAITING)
    return dict(os.environ) if is_chosen else os.environ | ENVIRONMENT


def _open_log(path: Path) -> int:
    """Append to the log, begun anew when it has grown."""
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
