"""The demo's processes: a bootstrap and nodes, started as a person would start them, and all of them ended.

Everything that one of our processes starts (p2pd, learner) is remembered while it runs, so that at the end
nothing is left even where its parent was killed. Only processes that were seen as descendants of ours are
ever signalled; psutil tells a reused process id apart. A guard process does the same when this one is
killed.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from p2pdiloco.adapters.p2pd import socket_folder
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.settings import ENVIRONMENT_PREFIX
from p2pdiloco.demo.guard import Guard
from p2pdiloco.errors import P2PDilocoError, StorageError
from p2pdiloco.identity import Identity
from p2pdiloco.learner.lifeline import save_takes_s
from p2pdiloco.tasks.registry import task_of

LISTEN = "/ip4/127.0.0.1/tcp/0"
BASE = ("--listen", LISTEN, "--log", "text")
BOOTSTRAP_TIMEOUT_S = 60.0
LEAVE_S = 12.0
"""A node promises to be gone 6.5 s after SIGTERM, and what its state takes to be written; on a busy machine
it is given a little more than a program gives its own (`session`)."""
END_TIMEOUT_S = 5.0
TICK_S = 0.1
EVALUATE_S = 20.0
"""Every node evaluates on held-out text this often: the curve has points of all of them, and little
training time is lost."""
CHECKPOINT_S = 20.0
LOG_TAIL_BYTES = 1500

Pause = Callable[[float], None]
"""Waits for so many seconds; raises when the person wants to stop."""


def stop_here() -> None:
    """Stop this process; returns when it goes on (SIGCONT)."""
    os.kill(os.getpid(), signal.SIGSTOP)


class DemoFailed(P2PDilocoError):
    """The swarm did not do what the demo is about; the text says what."""


class SwarmNode:
    """One bootstrap or node: its folder, its present process, and what that has started."""

    def __init__(self, name: str, data_dir: Path, arguments: Sequence[str], guard: Guard) -> None:
        """Raises: StorageError."""
        self.name = name
        self.data_dir = data_dir
        self.log = data_dir.with_name(f"{name}.log")
        self.arguments = list(arguments)
        self.wrapper: list[str] = []
        """Words before the command: what puts it into a network namespace, for instance."""
        self._guard = guard
        try:
            data_dir.mkdir(parents=True)
        except OSError as error:
            raise StorageError(f"{data_dir}: cannot be made: {error.strerror}") from error
        guard.adopt(socket_folder(data_dir))
        self.peer = Identity.load_or_create(data_dir / "identity.key").peer_id
        self._process: subprocess.Popen[bytes] | None = None
        self._family: set[psutil.Process] = set()

    @property
    def listen(self) -> str:
        """The multiaddr that it is told to listen on."""
        return self.arguments[self.arguments.index("--listen") + 1]

    @listen.setter
    def listen(self, address: str) -> None:
        self.arguments[self.arguments.index("--listen") + 1] = address

    @property
    def events(self) -> Path:
        """Path of the node's event log."""
        return self.data_dir / "events.jsonl"

    @property
    def alive(self) -> bool:
        """Tell whether the process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_status(self) -> int | None:
        """Exit status of the last process; None while it runs."""
        return self._process.poll() if self._process is not None else None

    def start(self, *more: str) -> None:
        """Start, or start again after the process has ended."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith(ENVIRONMENT_PREFIX)}
        environment |= self._guard.environment()
        command = [*self.wrapper, sys.executable, "-P", "-m", "p2pdiloco", *self.arguments, *more]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,  # Ctrl-C at the terminal is the demo's to handle
            )

    def remember_family(self) -> None:
        """Note what the process has started so far."""
        if self._process is not None and self.alive:
            try:
                self._family |= set(psutil.Process(self._process.pid).children(recursive=True))
            except psutil.NoSuchProcess:
                return  # it has just ended; what it had started is known from the last time

    def child(self, part: str) -> psutil.Process | None:
        """Find its learner ("p2pdiloco.learner") or its network process ("p2pd"), while they run."""
        if self._process is None or not self.alive:
            return None
        try:
            for process in psutil.Process(self._process.pid).children():
                words = process.cmdline()
                if part in words or (words and Path(words[0]).name == part):
                    return process
        except psutil.NoSuchProcess:
            return None  # ended in this moment
        return None

    @property
    def pid(self) -> int:
        """Process id of the daemon, the last one if it has ended."""
        return self._process.pid if self._process is not None else 0

    def kill(self) -> float:
        """kill -9 of the daemon alone. Returns the monotonic time of it."""
        self.remember_family()
        now = time.monotonic()
        self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        return now

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it still runs."""
        if self._process is not None:
            self._process.send_signal(number)  # polls first: never hits a reused id

    def clear_away(self) -> int:
        """End what is left of the process and of what it started; how many of these there were."""
        self.remember_family()
        left = [process for process in self._family if process.is_running()]
        for process in left:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue  # ended by itself in between
        if self.alive:
            self.signal(signal.SIGKILL)
        if self._process is not None:
            self._process.wait()
        psutil.wait_procs(left, timeout=END_TIMEOUT_S)
        shutil.rmtree(socket_folder(self.data_dir), ignore_errors=True)
        return len(left)

    def last_words(self) -> str:
        """The end of what the process has written."""
        return self.log.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").strip()


class Swarm:
    """A bootstrap and nodes on loopback. `end` must be called, whatever happened."""

    def __init__(
        self,
        folder: Path,
        run_file: Path,
        manifest: Manifest,
        nodes: int,
        temporary: bool = False,
        min_step_s: float = 0.0,
    ) -> None:
        """`run_file`: of the `manifest`. `temporary`: the folder goes even if we are killed. `min_step_s`: of
        every node's learner.

        Raises:
            StorageError: a data folder cannot be made.
        """
        self._folder = folder
        self.leave_s = LEAVE_S + save_takes_s(sum(spec.numel for spec in task_of(manifest).specs()))
        """Time that a node may take to leave."""
        self._min_step_s = min_step_s
        self.guard = Guard()
        if temporary:
            self.guard.adopt(folder)
        bootstrap_dir = folder / "bootstrap"
        arguments = ["bootstrap", "--run", str(run_file), "--data-dir", str(bootstrap_dir), *BASE]
        self.bootstrap = SwarmNode("bootstrap", bootstrap_dir, arguments, self.guard)
        self.nodes: list[SwarmNode] = []
        for _ in range(nodes):
            self.add_node()

    def add_node(self) -> SwarmNode:
        """One more node, with a folder and an identity of its own; not started yet. Raises: StorageError."""
        name = f"node-{len(self.nodes) + 1}"
        flags = ["--device", "cpu", "--threads", "1", "--eval-every-s", str(EVALUATE_S), "--evaluate", "each"]
        flags += ["--checkpoint-every-s", str(CHECKPOINT_S), "--name", name]
        if self._min_step_s:
            flags += ["--min-step-s", f"{self._min_step_s:.4f}"]
        data_dir = self._folder / name
        node = SwarmNode(name, data_dir, ["node", "--data-dir", str(data_dir), *BASE, *flags], self.guard)
        self.nodes.append(node)
        return node

    def node(self, name: str) -> SwarmNode:
        """The node of this name."""
        return next(node for node in self.nodes if node.name == name)

    def start_bootstrap(self, pause: Pause, stop: Callable[[], None] = stop_here) -> str:
        """Start the bootstrap peer: the address that it prints. `stop`: stops this process when a person
        presses Ctrl-Z, and returns when it goes on.

        Raises:
            DemoFailed: it ended, or printed none in time.
        """
        signal.signal(signal.SIGTSTP, lambda *_: self._suspend(stop))
        self.bootstrap.start()
        until = time.monotonic() + BOOTSTRAP_TIMEOUT_S
        while time.monotonic() < until:
            for line in self.bootstrap.log.read_text(errors="replace").splitlines():
                if line.startswith("p2pdiloco node --join "):
                    return line.split()[3]
            if not self.bootstrap.alive:
                break
            pause(TICK_S)
        raise DemoFailed(f"the bootstrap peer did not start: {self.bootstrap.last_words()}")

    def start_nodes(self, address: str) -> None:
        """Start all nodes; the first one is allowed to begin the run."""
        for node in self.nodes:
            node.arguments += ["--join", address]
            node.start(*(["--genesis"] if node is self.nodes[0] else []))

    def watch(self, may_be_dead: str = "") -> None:
        """Note the processes' children, and that nobody but `may_be_dead` has ended.

        Raises:
            DemoFailed: a process has ended by itself.
        """
        for member in (self.bootstrap, *self.nodes):
            member.remember_family()
            if not member.alive and member.name != may_be_dead:
                raise DemoFailed(
                    f"{member.name} ended by itself with status {member.exit_status}: {member.last_words()}"
                )

    def leave(self, pause: Pause) -> list[str]:
        """Tell all nodes to leave, wait until they have saved. Names of those that did not end in time."""
        running = [node for node in self.nodes if node.alive]
        for node in running:
            node.remember_family()
            node.signal(signal.SIGTERM)
        until = time.monotonic() + self.leave_s
        while time.monotonic() < until and any(node.alive for node in running):
            pause(TICK_S)
        return [node.name for node in running if node.alive or node.exit_status != 0]

    def _suspend(self, stop: Callable[[], None]) -> None:
        """Stop with all nodes (Ctrl-Z): they have sessions of their own. Their learners stop with them."""
        running = [member for member in (self.bootstrap, *self.nodes) if member.alive]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for member in running:
                member.signal(number)
            if number is signal.SIGSTOP:
                stop()

    def end(self) -> int:
        """End everything at once, in any state; how many processes had to be killed."""
        signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        members = [self.bootstrap, *self.nodes]
        for member in members:
            member.remember_family()
            member.signal(signal.SIGTERM)
        until = time.monotonic() + END_TIMEOUT_S
        for member in members:
            if member._process is not None:
                try:
                    member._process.wait(max(0.1, until - time.monotonic()))
                except subprocess.TimeoutExpired:
                    continue  # clear_away ends it
        cleared = sum(member.clear_away() for member in members)
        self.guard.release()
        return cleared
