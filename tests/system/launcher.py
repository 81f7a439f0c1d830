"""Starts `p2pdiloco node` and `bootstrap` as forks of a process that has already imported what they import.

These are processes like any others, with memory, descriptors, threads and a pid of their own; each is spared
two CPU-seconds of importing, and its test as long a wait. So is a node's learner, on Linux: the node's child
there, too, but not the node's fork, which has threads (`Nursery`). Demo, chaos, sessions, nodes behind a NAT
and commands that end by themselves start as a person starts them.
"""

from __future__ import annotations

import asyncio
import atexit
import ctypes
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

import psutil

TAG = "SWARM_UNDER_TEST"
"""Variable that all have whom a swarm started; each swarm's value is its own."""
DAEMONS = ("node", "join", "bootstrap")
"""Commands whose sockets a swarm looks for at their end, where its own process would have them."""
POLL_S = 0.02
START_S = 900.0
"""Of a launcher that lives: that it has ended is seen at once, however slow the machine is."""


class Launched:
    """One of its processes, with the part of `subprocess.Popen` that swarms use."""

    def __init__(self, launcher: Launcher, pid: int, arguments: Sequence[str] = ()) -> None:
        self.pid = pid
        self._arguments = arguments
        self._launcher = launcher

    def poll(self) -> int | None:
        """Exit status, negative: the signal that killed it; None while it runs."""
        return self._launcher.statuses.get(self.pid)

    def wait(self, timeout: float | None = None) -> int:
        """Raises:
        subprocess.TimeoutExpired: it still runs.
        """
        with self._launcher.changed:
            self._launcher.changed.wait_for(lambda: self.poll() is not None or self._launcher.ended, timeout)
        status = self.poll()
        assert status is not None or not self._launcher.ended, "the launcher ended: nobody knows of its forks"
        if status is None:
            raise subprocess.TimeoutExpired(" ".join(["p2pdiloco", *self._arguments]), timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        """Nothing happens to one that has ended, also if we do not know of it yet."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class Launcher:
    """The forking process, seen from a test."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.statuses: dict[int, int] = {}
        self.changed = threading.Condition()
        self._asking = threading.Lock()
        self.ended = False
        self._started: list[int] = []
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(environment),
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(
        self,
        arguments: Sequence[str],
        out: Path,
        err: Path,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        by: Sequence[str] = (),
    ) -> Launched:
        """`p2pdiloco` with these arguments, and its output in new files, or in one. `folder`, `environment`:
        where it is started, and what variables it has; else those of the launcher. `by`: a program that runs
        the command, and its own arguments."""
        assert self._process.stdin is not None
        for path in (out, err):
            path.touch()
        with self._asking, self.changed:
            if not self.ended:
                where = [str(folder or Path.cwd()), None if environment is None else dict(environment)]
                words = [list(arguments), str(out), str(err), *where, list(by)]
                self._process.stdin.write(json.dumps(words) + "\n")
                self._process.stdin.flush()
            self.changed.wait_for(lambda: self._started or self.ended, START_S)
            assert self._started, "the launcher ended" if self.ended else "the launcher does not answer"
            return Launched(self, self._started.pop(), list(arguments))

    def close(self, timeout_s: float) -> None:
        """It ends, and is waited for; what it started lives on."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout_s)
        self._reader.join(timeout_s)

    def kill(self, timeout_s: float) -> None:
        """It ends at once: what it was asked for and has not forked yet never runs."""
        self._process.kill()
        self._process.wait(timeout_s)
        self._reader.join(timeout_s)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            pid, status = json.loads(line)
            with self.changed:
                if status is None:
                    self._started.append(pid)
                else:
                    self.statuses[pid] = status
                self.changed.notify_all()
        with self.changed:
            self.ended = True
            self.changed.notify_all()


class Shared:
    """One launcher for many swarms: importing takes it two CPU-seconds."""

    def __init__(self) -> None:
        self._made: Launcher | None = None

    def get(self) -> Launcher:
        """It lives, or is a new one. What it starts is given an environment of its own each time."""
        if self._made is None or self._made.ended:
            own = {k: v for k, v in os.environ.items() if not k.startswith("P2PDILOCO_")}
            # Its forks have its temporary folder, which is not to be one that a test made for itself.
            self._made = Launcher(own | {"OMP_NUM_THREADS": "1", "TMPDIR": tempfile.gettempdir()})
        return self._made

    def end(self, timeout_s: float) -> None:
        """It ends at once: what it was asked for and has not forked yet never runs."""
        if self._made is not None:
            self._made.kill(timeout_s)
            self._made = None


def is_fork(process: psutil.Process) -> bool:
    """Whether that is what a launcher has forked: whoever has its number may be somebody else by now."""
    return __file__ in process.cmdline()


def is_learner(process: psutil.Process) -> bool:
    """Whether that is a learner that was forked."""
    return process.name().startswith(LEARNER)


def nursed(process: psutil.Process, tag: str) -> bool:
    """Whether that is the nursery, or a forked learner, of a node of the swarm with this tag."""
    return process.name() in (LEARNER + tag[:TOLD], NURSERY + tag[:TOLD])


# Learners.

LEARNER, NURSERY = "learner ", "nursery "
TOLD = 6
"""So much of a tag fits into the name of a process, whose environment shows that of its parent."""
PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 15, 36
CAN_NURSE = sys.platform == "linux" and hasattr(os, "pidfd_open")


class Nursery:
    """Forks learners for a node, of which it was forked itself before that had threads.

    Who forks a learner ends at once; so it becomes a child of the node, as one that the node starts would be:
    the node waits for it, and signals it.
    """

    def __init__(self, node: socket.socket) -> None:
        """`node`: its end of the socket to who forks."""
        self._node = node

    @classmethod
    def here(cls) -> Nursery:
        """To be made by the node, before it runs."""
        adopting(True)
        node, nursery = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        if os.fork() == 0:
            node.close()
            _control(PR_SET_NAME, _name(NURSERY))
            _nurse(nursery)
        nursery.close()
        return cls(node)

    @classmethod
    @contextmanager
    def apart(cls) -> Iterator[Nursery]:
        """For a process that has threads: who forks for it is a new one, whose learners it adopts."""
        node, nursery = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        descriptor = nursery.fileno()
        command = [sys.executable, __file__, str(descriptor)]
        process = subprocess.Popen(
            command,
            pass_fds=[descriptor],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
        )
        nursery.close()
        adopting(True)
        try:
            yield cls(node)
        finally:
            adopting(False)
            node.close()
            process.wait()

    def fork(self, environment: Mapping[str, str], *descriptors: int) -> int:
        """Process id of a new learner with this log, this channel, this exchange."""
        words = json.dumps(dict(environment)).encode()
        socket.send_fds(self._node, [len(words).to_bytes(8) + words], descriptors)
        return int.from_bytes(self._node.recv(8, socket.MSG_WAITALL))

    async def begin(self, channel: int, exchange: int, log: int, environment: Mapping[str, str]) -> Nursed:
        """In place of `learner_host.begin`."""
        return Nursed(await asyncio.to_thread(self.fork, environment, log, channel, exchange))


def _nurse(node: socket.socket) -> NoReturn:
    """Until the node is gone."""
    while True:
        head, descriptors, _, _ = socket.recv_fds(node, 8, 3)
        if not head:
            os._exit(0)
        words = node.recv(int.from_bytes(head), socket.MSG_WAITALL)
        ours, its = os.pipe()
        if (between := os.fork()) == 0:
            if pid := os.fork():
                os.write(its, pid.to_bytes(8))
                os._exit(0)
            for descriptor in (node.fileno(), ours, its):
                os.close(descriptor)
            _be_learner(json.loads(words), *descriptors)
        pid = os.read(ours, 8)
        os.waitpid(between, 0)  # from now on the node is its parent
        for descriptor in (ours, its, *descriptors):
            os.close(descriptor)
        node.sendall(pid)


def _be_learner(environment: Mapping[str, str], log: int, channel: int, exchange: int) -> NoReturn:
    """What `python -m p2pdiloco.learner` does."""
    from p2pdiloco.learner.__main__ import main

    os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    _control(PR_SET_NAME, _name(LEARNER))
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
    _begin_anew()
    status = main(channel, [str(exchange)])
    sys.stderr.flush()
    os._exit(status)


class Nursed:
    """A learner that was forked, with the part of `asyncio.subprocess.Process` that its host uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._descriptor = os.pidfd_open(pid)

    async def wait(self) -> int:
        """Exit status, negative: the signal that killed it."""
        if self.returncode is None:
            loop, ended = asyncio.get_running_loop(), asyncio.Event()
            loop.add_reader(self._descriptor, ended.set)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(self._descriptor)
            self.returncode = self._collect()
        return self.returncode

    def _collect(self) -> int:
        """Of one that has ended."""
        os.close(self._descriptor)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def nursing_here() -> None:
    """A node that was forked has its learners forked."""
    from p2pdiloco.daemon import learner_host

    learner_host.begin = Nursery.here().begin  # type: ignore[assignment]


def adopting(yes: bool) -> None:
    """Whether this process is the parent of what its children leave behind."""
    _control(PR_SET_CHILD_SUBREAPER, int(yes))


def _name(kind: str) -> bytes:
    return (kind + os.environ.get(TAG, "")[:TOLD]).encode()


def _control(what: int, value: int | bytes) -> None:
    """prctl(2), for this process."""
    done = ctypes.CDLL(None, use_errno=True).prctl(what, value, 0, 0, 0)
    assert done == 0, os.strerror(ctypes.get_errno())


# The launcher's own process, and what its forks become.


def serve() -> tuple[list[str], list[str]] | None:
    """Forks until its input ends (None). Returns in every fork, with the arguments of what that shall be, and
    the words of the program that runs it."""
    assert threading.active_count() == 1, "a fork has one thread: what others held would stay locked"
    living: set[int] = set()
    pending = b""
    while True:
        ready, _, _ = select.select([0], [], [], POLL_S if living else None)
        for pid in list(living):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                living.discard(pid)
                _say(pid, os.waitstatus_to_exitcode(status))
        if not ready:
            continue
        received = os.read(0, 65536)
        if not received:
            return None
        *lines, pending = (pending + received).split(b"\n")
        for line in lines:
            arguments, out, err, folder, environment, by = json.loads(line)
            pid = os.fork()
            if pid == 0:
                _be(out, err)
                os.chdir(folder)
                if environment is not None:
                    os.environ.clear()
                    os.environ.update(environment)
                return arguments, by
            living.add(pid)
            _say(pid, None)


def _say(pid: int, status: int | None) -> None:
    os.write(1, json.dumps([pid, status]).encode() + b"\n")


def _be(out: str, err: str) -> None:
    """What a process of its own has otherwise than a fork."""
    for descriptor, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, out, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND),
        (2, err, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND),
    ):
        opened = os.open(path, flags, 0o600)
        os.dup2(opened, descriptor)
        os.close(opened)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    _begin_anew()


def _begin_anew() -> None:
    """What chance brings is not its parent's."""
    random.seed()
    numpy.random.seed()
    torch.seed()


def signing_here() -> None:
    """A fork has torch: a process that signs for it would import it again, at every start of a bootstrap."""
    from p2pdiloco.daemon import bootstrap
    from p2pdiloco.daemon.run_files import served_runs

    async def sign(data_dir: Path, files: Sequence[Path], _log: str) -> None:
        served_runs.sign_all(data_dir, files)

    bootstrap.sign_apart = sign  # type: ignore[assignment]


def stand_still(what: str) -> NoReturn:
    """End a node whose event loop waits for a disk: its test finds it dead, and this in what it said."""
    os.write(2, what.encode())
    os._exit(70)


def run_by(words: Sequence[str], arguments: Sequence[str]) -> int:
    """Exit status of a program that runs the command that follows its own words."""
    sys.argv = [*words, "p2pdiloco", *arguments]
    try:
        runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def end(status: int) -> NoReturn:
    """As Python ends, but nothing is freed first: a fork would copy what it has of its parent's memory for
    that, which takes 0.7 CPU-seconds."""
    threading._shutdown()  # waits for threads, as always
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.path[0] = str(Path.cwd())  # as for `python -m p2pdiloco`: the package is that of this checkout
    import numpy
    import torch

    sys.path.append(str(Path(__file__).parents[1]))
    from loop_guard import guarded

    import p2pdiloco.cli.status_command
    import p2pdiloco.daemon.start
    import p2pdiloco.learner.training_process  # noqa: F401
    from p2pdiloco.cli.group import run

    signing_here()
    gc.collect()
    gc.freeze()  # else each fork looks through all of torch, and copies its pages by that
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's ^C is for the test to handle
    if sys.argv[1:]:
        _nurse(socket.socket(fileno=int(sys.argv[1])))
    if (given := serve()) is not None:
        arguments, by = given
        if arguments[0] not in DAEMONS:
            tempfile.tempdir = None  # that of its own variables, not of the launcher's
        elif CAN_NURSE and arguments[0] != "bootstrap":
            nursing_here()
        with guarded(stand_still):
            end(run_by(by, arguments) if by else run(arguments))
