"""A bootstrap and nodes as real processes on loopback: what demo, benchmarks and system tests drive.

Every process is started by us and ended by us, by process id, whatever happens: leaving the `with` block
asks the nodes to leave, then kills what is left. p2pd and learners end by themselves with their daemon.
"""

from __future__ import annotations

import json
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import psutil

from p2pdiloco.errors import UserError

START_TIMEOUT_S = 60.0
LEAVE_TIMEOUT_S = 12.0
POLL_S = 0.05
LISTEN = "/ip4/127.0.0.1/tcp/0"
Line = dict[str, Any]


class Process:
    """One `p2pdiloco` process with its data folder."""

    def __init__(self, name: str, folder: Path, arguments: Sequence[str]) -> None:
        self.name = name
        self.data_dir = folder / name
        self.arguments = [*arguments, "--data-dir", str(self.data_dir), "--listen", LISTEN, "--log", "text"]
        self.log = folder / f"{name}.log"
        self.out = folder / f"{name}.out"
        self.address = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._read = 0

    @property
    def events(self) -> Path:
        """The node's diary."""
        return self.data_dir / "events.jsonl"

    @property
    def pid(self) -> int:
        """Process id of the daemon, the last one if it has ended."""
        return self._process.pid if self._process else 0

    @property
    def running(self) -> bool:
        """Whether the daemon process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def status(self) -> int | None:
        """Exit status; None while running."""
        return self._process.poll() if self._process else None

    def start(self, *more: str) -> None:
        """Start it, or start it again with the same folder and identity."""
        self.address = ""
        self.out.write_bytes(b"")
        with self.out.open("ab") as out, self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "p2pdiloco", *self.arguments, *more],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                # Ctrl-C at the terminal is for us; we then end our processes in order.
                start_new_session=True,
            )

    def wait_address(self, timeout_s: float = START_TIMEOUT_S) -> str:
        """The address to join at, as it was printed.

        Raises: UserError (it ended, or printed nothing in time; quotes its log).
        """

        def printed() -> bool:
            found = re.search(r"^p2pdiloco node --join (\S+)", self.out.read_text(), re.MULTILINE)
            self.address = found[1] if found else ""
            return bool(self.address) or not self.running

        wait_until(printed, timeout_s, f"{self.name} to print its address")
        if not self.address:
            raise UserError(f"{self.name} ended at its start: {self.last_words()}")
        return self.address

    def last_words(self) -> str:
        """The end of its log, in one line."""
        lines = self.log.read_text(errors="replace").strip().splitlines() if self.log.exists() else []
        return " | ".join(lines[-3:])

    def new_lines(self) -> list[Line]:
        """Diary lines that were written since the last call."""
        if not self.events.exists():
            return []
        with self.events.open("rb") as file:
            file.seek(self._read)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._read += len(whole)
        return [json.loads(line) for line in whole.splitlines()]

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the daemon if it lives."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def wait(self, timeout_s: float) -> int | None:
        """Its exit status, or None if it still runs after so long."""
        if self._process is None:
            return None
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None

    def kill(self) -> float:
        """SIGKILL to the daemon alone; the monotonic time of it."""
        at_s = time.monotonic()
        self.signal(signal.SIGKILL)
        self.wait(5)
        return at_s


class Swarm:
    """A bootstrap and `nodes` nodes; the first starts the run."""

    def __init__(
        self, folder: Path, run_file: Path, nodes: int, node_options: Sequence[str] = ("--threads", "1")
    ) -> None:
        self.bootstrap = Process("bootstrap", folder, ["bootstrap", "--run", str(run_file)])
        self._folder = folder
        self._options = list(node_options)
        self.nodes: list[Process] = []
        self._wished = nodes

    def __enter__(self) -> Self:
        try:
            self.bootstrap.start()
            self.bootstrap.wait_address()
            for index in range(self._wished):
                self.add_node(genesis=index == 0)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def add_node(self, genesis: bool = False, join: str = "") -> Process:
        """Start one more node."""
        name = f"node-{len(self.nodes) + 1}"
        arguments = ["node", "--join", join or self.bootstrap.address, "--name", name, *self._options]
        node = Process(name, self._folder, [*arguments, *(["--genesis"] if genesis else [])])
        self.nodes.append(node)
        node.start()
        return node

    def living(self) -> Iterator[Process]:
        """Nodes whose daemon lives."""
        return (node for node in self.nodes if node.running)

    def wait_training(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until every living node's learner makes steps. Raises: UserError."""
        for node in self.living():
            wait_until(
                lambda node=node: not node.running or _trains(node.events), timeout_s, f"{node.name} to train"
            )
            if not node.running:
                raise UserError(f"{node.name} ended: {node.last_words()}")

    def close(self, timeout_s: float = LEAVE_TIMEOUT_S) -> None:
        """Ask everyone to leave; kill who has not after timeout_s."""
        everyone = [*self.nodes, self.bootstrap]
        for process in self.nodes:
            process.signal(signal.SIGTERM)
        deadline = time.monotonic() + timeout_s
        for process in self.nodes:
            process.wait(max(0.0, deadline - time.monotonic()))
        self.bootstrap.signal(signal.SIGTERM)
        self.bootstrap.wait(3)
        for process in everyone:
            process.kill()


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Poll a condition. Raises: UserError when it does not come true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise UserError(f"waited {timeout_s:.0f} s in vain for {what}")
        _pause()


def _pause() -> None:
    # select on nothing: a pause that a signal handler's exception ends at once.
    select.select([], [], [], POLL_S)


def _trains(events: Path) -> bool:
    return events.exists() and b'"kind":"progress"' in events.read_bytes()


def process_tree(pid: int) -> list[int]:
    """The process and its descendants, for measuring; empty when it is gone."""
    try:
        process = psutil.Process(pid)
        return [pid, *(child.pid for child in process.children(recursive=True))]
    except psutil.NoSuchProcess:
        return []
