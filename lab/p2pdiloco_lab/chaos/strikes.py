"""Strikes of a chaos run: what each fault does to the real processes, and how it is mended.

A strike knows processes only: it kills, stops, limits and starts again, exactly as a power cut, a busy
machine, a full disk or a person would. It never talks to a node.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable

import psutil
from msgspec import Struct

from p2pdiloco.demo.swarm import Swarm, SwarmNode
from p2pdiloco_lab.chaos.facts import Act, State
from p2pdiloco_lab.chaos.plan import Fault
from p2pdiloco_lab.links.namespaces import Links

LEARNER, P2PD = "p2pdiloco.learner", "p2pd"
FULL_DISK_BYTES = 16_384
"""No file may grow beyond it while the disk is "full": less than a checkpoint or an update log needs."""


class Strike(Struct, kw_only=True):
    """A fault that has been carried out."""

    fault: Fault
    index: int
    node: str
    """Name of the node it hit; "bootstrap"."""
    at_s: float
    """Monotonic."""
    what: str
    mend: Callable[[], str] | None
    """Undoes it; says what it did. None: the daemon mends itself."""
    mend_at_s: float = 0.0
    patience_s: float = 0.0
    """Time by which the mending may be put off because the victim has not ended yet."""


class Striker:
    """Carries faults out and mends them; every change of a node's state is an `Act` in `acts`."""

    def __init__(self, swarm: Swarm, links: Links | None, join: Callable[[], list[str]]) -> None:
        """`join`: arguments with which a newcomer finds the swarm."""
        self._swarm = swarm
        self._links = links
        self._join = join
        self.acts: list[Act] = []
        self.newcomers: list[SwarmNode] = []
        """Started on the way, not yet known to whoever reads the logs."""

    def act(self, node: str, state: State, at_s: float | None = None) -> float:
        """Note a node's new state; the monotonic time of it."""
        at_s = time.monotonic() if at_s is None else at_s
        self.acts.append(Act(at_s, node, state))
        return at_s

    def strike(self, index: int, fault: Fault, node: SwarmNode) -> Strike | None:
        """Hit the node now; None if there is nothing to hit (its learner is just being started, say)."""
        now = time.monotonic()
        done: tuple[str, Callable[[], str] | None] | None
        match fault.kind:
            case "kill-syncer" | "kill-daemon":
                done = self._kill(node)
            case "kill-learner":
                done = self._kill_child(node, LEARNER)
            case "kill-p2pd":
                done = self._kill_child(node, P2PD)
            case "stop-daemon":
                done = self._stop(node, [psutil.Process(node.pid)])
            case "stop-node":
                processes = [psutil.Process(node.pid), node.child(LEARNER), node.child(P2PD)]
                done = self._stop(node, [process for process in processes if process is not None])
            case "disk-full":
                done = self._fill_disk(node)
            case "leave":
                done = self._leave(node)
            case "newcomer":
                done = self._replace(node)
            case "kill-bootstraps":
                done = self._kill_bootstrap()
            case "cut-link" | "slow-link":
                done = self._link(node, cut=fault.kind == "cut-link")
        if done is None:
            return None
        what, mend = done
        name = "bootstrap" if fault.kind == "kill-bootstraps" else node.name
        return Strike(
            fault=fault,
            index=index,
            node=name,
            at_s=now,
            what=what,
            mend=mend,
            mend_at_s=now + fault.lasts_s,
            patience_s=self._swarm.leave_s if fault.kind == "leave" else 0.0,
        )

    # --- processes -----------------------------------------------------------------------------------

    def _kill(self, node: SwarmNode) -> tuple[str, Callable[[], str]]:
        self.act(node.name, "killed", node.kill())
        return "kill -9 of the daemon", lambda: self.start_again(node)

    def start_again(self, node: SwarmNode) -> str:
        """Start a node as its owner would: the same command, the same folder."""
        if node.alive:
            return "runs already"
        node.start()
        self.act(node.name, "starting")
        return "started again"

    def _kill_child(self, node: SwarmNode, part: str) -> tuple[str, None] | None:
        process = node.child(part)
        if process is None:
            return None
        at_s = time.monotonic()
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        if part == LEARNER:
            self.act(node.name, "learner-down", at_s)
        return f"kill -9 of {part} ({process.pid})", None

    def _stop(self, node: SwarmNode, processes: list[psutil.Process]) -> tuple[str, Callable[[], str]]:
        self.act(node.name, "stopped")
        node.remember_family()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

        def mend() -> str:
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
            self.act(node.name, "resumed")
            return "SIGCONT"

        return f"SIGSTOP of {len(processes)} of its processes", mend

    def _leave(self, node: SwarmNode) -> tuple[str, Callable[[], str]]:
        node.remember_family()
        self.act(node.name, "left")
        node.signal(signal.SIGTERM)
        return "SIGTERM: it says good-bye", lambda: self.start_again(node)

    def _replace(self, node: SwarmNode) -> tuple[str, Callable[[], str]]:
        self.act(node.name, "gone", node.kill())

        def mend() -> str:
            newcomer = self._swarm.add_node()
            newcomer.arguments += self._join()
            newcomer.wrapper, newcomer.listen = node.wrapper, node.listen
            if self._links is not None:
                self._links.reassign(node.name, newcomer.name)
            newcomer.start()
            self.newcomers.append(newcomer)
            self.act(newcomer.name, "starting")
            return f"{newcomer.name} joins in its place, with an empty folder"

        return "kill -9, and it never comes back", mend

    def _kill_bootstrap(self) -> tuple[str, Callable[[], str]] | None:
        bootstrap = self._swarm.bootstrap
        if not bootstrap.alive:
            return None
        bootstrap.kill()

        def mend() -> str:
            bootstrap.start()
            return "started again at the same address"

        return "kill -9 of the only bootstrap", mend

    # --- disk and links ------------------------------------------------------------------------------

    def _fill_disk(self, node: SwarmNode) -> tuple[str, Callable[[], str]] | None:
        if not hasattr(psutil.Process, "rlimit"):
            return None
        limits: list[tuple[psutil.Process, tuple[int, int]]] = []
        for process in (psutil.Process(node.pid), node.child(LEARNER)):
            if process is not None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    soft, hard = process.rlimit(psutil.RLIMIT_FSIZE)
                    process.rlimit(psutil.RLIMIT_FSIZE, (FULL_DISK_BYTES, hard))
                    limits.append((process, (soft, hard)))

        def mend() -> str:
            for process, limit in limits:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.rlimit(psutil.RLIMIT_FSIZE, limit)
            return "there is room again"

        return f"no file may grow beyond {FULL_DISK_BYTES} bytes", mend

    def _link(self, node: SwarmNode, cut: bool) -> tuple[str, Callable[[], str]] | None:
        links = self._links
        if links is None:
            return None
        if cut:
            self.act(node.name, "cut")
            links.cut(node.name)
        else:
            links.slow(node.name)

        def mend() -> str:
            links.restore(node.name)
            if cut:
                self.act(node.name, "resumed")
            return "the link is as before"

        return "its link is cut" if cut else links.SLOW_WORDS, mend
