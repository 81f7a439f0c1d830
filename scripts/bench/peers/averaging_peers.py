"""The processes of bench_averaging.py: nodes of ours, hivemind's averagers, learners beside them."""

from __future__ import annotations

import contextlib
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from p2pdiloco.adapters.p2pd import socket_folder
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.demo.guard import Guard
from p2pdiloco.tasks.registry import render_toml

HERE = Path(__file__).parent
PATIENCE_S = 90.0


class Peer:
    """One of the processes, and what it says."""

    def __init__(
        self, script: str, words: Sequence[str], log: Path, guard: Guard, wrapper: Sequence[str] = ()
    ) -> None:
        """`wrapper`: words before the command, that put it into a network namespace for instance."""
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [*wrapper, sys.executable, str(HERE / script), *words],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=os.environ | guard.environment(),
                start_new_session=True,
            )
        self._log = log
        self._said: queue.Queue[str] = queue.Queue()
        self._family: set[psutil.Process] = set()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._said.put(line.strip())
        self._said.put("")

    def wait_for(self, beginning: str, patience_s: float = PATIENCE_S) -> list[str]:
        """The next line that begins so, in words.

        Raises:
            RuntimeError: the process ended, or said no such thing in time.
        """
        until = time.monotonic() + patience_s
        while True:
            try:
                line = self._said.get(timeout=max(0.01, until - time.monotonic()))
            except queue.Empty:
                raise RuntimeError(f"{self._log.name}: no {beginning!r} in {patience_s:.0f} s") from None
            if not line:
                end = self._log.read_text(errors="replace")[-1500:]
                raise RuntimeError(f"{self._log.name} ended before {beginning!r}: {end}")
            if line.startswith(beginning):
                return line.split()

    def tell(self, word: str) -> None:
        """One line."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    def cpu_s(self) -> float:
        """Processor time of it and of everything that it has started and that runs."""
        own = psutil.Process(self._process.pid)
        self._family |= {own, *own.children(recursive=True)}
        times = [process.cpu_times() for process in self._family if process.is_running()]
        return float(sum(t.user + t.system for t in times))

    def hang_up(self) -> None:
        """Let it end; `end` waits for it, and for what it has started."""
        if self._process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):  # a child that ends in this moment
                self._family |= set(psutil.Process(self._process.pid).children(recursive=True))
        assert self._process.stdin is not None
        self._process.stdin.close()

    def end(self) -> None:
        """Gone, with all that it has started."""
        self.hang_up()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        left = [process for process in self._family if process.is_running()]
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=5)


def start_ours(folder: Path, manifest: Manifest, nodes: int, daemon_nice: str, guard: Guard) -> list[Peer]:
    """Nodes that train; the first one owns the run."""
    run_file = folder / "run.toml"
    run_file.write_text(render_toml(manifest))
    peers: list[Peer] = []
    address = ""
    for index in range(nodes):
        data_dir = folder / f"node-{index}"
        guard.adopt(socket_folder(data_dir))
        words = [str(data_dir), address, "" if index else str(run_file), data_dir.name, daemon_nice]
        peers.append(Peer("averaging_node.py", words, folder / f"node-{index}.log", guard))
        if not index:
            address = peers[0].wait_for("p2pdiloco node --join ")[3]
    return peers


def start_hivemind(folder: Path, numels: Sequence[int], nodes: int, guard: Guard) -> list[Peer]:
    """Averagers; peer i holds the value i."""
    peers: list[Peer] = []
    address, sizes = "", ",".join(map(str, numels))
    for index in range(nodes):
        words = [sizes, address, str(nodes), str(index)]
        peers.append(Peer("averaging_hivemind.py", words, folder / f"hivemind-{index}.log", guard))
        if not index:
            address = peers[0].wait_for("address ")[1]
    return peers


def start_learners(folder: Path, nodes: int, numels: Sequence[int], share: float, guard: Guard) -> list[Peer]:
    """Learners at their production priority, each of which takes this share of a core."""
    words = [str(share), ",".join(map(str, numels))]
    made = [
        Peer("averaging_learner.py", words, folder / f"learner-{index}.log", guard) for index in range(nodes)
    ]
    for learner in made:
        learner.wait_for("trains")
    return made
