"""The demo's processes: a bootstrap and nodes, started as a person would start them, and all of them ended.

Everything that one of our processes starts (p2pd, learner) is remembered while it runs, so that at the end
nothing is left even where its parent was killed. Only processes that were seen as descendants of ours are
ever signalled; psutil tells a reused process id apart. A guard process does the same when this one is killed.
`Chronicle` is what the nodes logged, by what is asked of it, and `Tail` reads a log
(docs/reference/events.md) while it grows. Times are seconds of the machine's monotonic clock, which all
processes of one machine share.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from math import inf
from pathlib import Path

import msgspec
import psutil

from p2pdiloco.adapters.data_dir import storage_errors
from p2pdiloco.adapters.event_reader import EventReader
from p2pdiloco.adapters.p2pd import socket_folder
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.presets import with_seats
from p2pdiloco.config.settings import ENVIRONMENT_PREFIX
from p2pdiloco.demo.guard import Guard
from p2pdiloco.errors import P2PDilocoError
from p2pdiloco.identity import Identity
from p2pdiloco.learner.lifeline import save_takes_s
from p2pdiloco.tasks.registry import numel_of, render_toml
from p2pdiloco.util import Action, Frozen

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
        with storage_errors("make", data_dir):
            data_dir.mkdir(parents=True)
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
        if self.alive:
            with suppress(psutil.NoSuchProcess):  # what it had started is known from the last time
                self._family |= set(psutil.Process(self.pid).children(recursive=True))

    def child(self, part: str) -> psutil.Process | None:
        """Find its learner ("p2pdiloco.learner") or its network process ("p2pd"), while they run."""
        with suppress(psutil.NoSuchProcess):  # ended in this moment
            for process in psutil.Process(self.pid).children() if self.alive else ():
                words = process.cmdline()
                if part in words or (words and Path(words[0]).name == part):
                    return process
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
        self.wait()
        return now

    def wait(self, most_s: float | None = None) -> None:
        """Wait for the end of the process, so long at most."""
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(most_s)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process, if it still runs."""
        if self._process is not None:
            self._process.send_signal(number)  # polls first: never hits a reused id

    def clear_away(self) -> int:
        """End what is left of the process and of what it started; how many of these there were."""
        self.remember_family()
        left = [process for process in self._family if process.is_running()]
        for process in left:
            with suppress(psutil.NoSuchProcess):  # ended by itself in between
                process.kill()
        self.signal(signal.SIGKILL)
        self.wait()
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
        """`run_file`: where the `manifest` is written, with a seat for each of these nodes. `temporary`: the
        folder goes even if we are killed. `min_step_s`: of every node's learner.

        Raises:
            StorageError: a data folder cannot be made, or the file not be written.
        """
        self._folder = folder
        self.leave_s = LEAVE_S + save_takes_s(numel_of(manifest))
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
        seated = with_seats(manifest, [*(node.peer for node in self.nodes), *manifest.admission.seats])
        with storage_errors("write", run_file):
            run_file.write_text(render_toml(seated), encoding="utf-8")

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

    def start_bootstrap(self, pause: Pause, stop: Action = stop_here) -> str:
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

    def _suspend(self, stop: Action) -> None:
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
            member.wait(max(0.1, until - time.monotonic()))  # clear_away ends it otherwise
        cleared = sum(member.clear_away() for member in members)
        self.guard.release()
        return cleared


# Chronicle: no processes and no clock here.

MAX_VERSIONS = 4096
"""Newest versions per node and fragment whose digests are kept for comparison."""
WARM_UP_LINES = 3
"""First progress lines of a learner that say nothing about pauses: libraries warm up, others start."""


class NodeTrace:
    """Account of one node: its lives, how far it trained, which chain it follows."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.state = "starting"
        self.lives: list[list[Line]] = [[]]
        """Progress lines, a list for each process that the node had."""
        self.evaluations: list[Line] = []
        self.merged: list[Line] = []
        """Contributions of the node that it saw merged."""
        self.chains: dict[int, dict[int, str]] = {}
        """Fragment -> version number -> digest, along the chain that the node now follows."""

    def started(self, state: str) -> None:
        """Begin another life of the node, in this state until it trains."""
        self.state = state
        self.lives.append([])

    @property
    def progress(self) -> list[Line]:
        """Progress lines of all lives."""
        return list(chain.from_iterable(self.lives))

    @property
    def last(self) -> Line | None:
        """Newest progress line; None: it has not trained yet."""
        return next((life[-1] for life in reversed(self.lives) if life), None)

    @property
    def inner_step(self) -> int:
        """Inner step that the node is at."""
        return self.last.inner_step if self.last else 0

    @property
    def trains_since_s(self) -> float | None:
        """Time of the first progress in the present life; None: not yet."""
        return self.lives[-1][0].mono if self.lives[-1] else None

    def feed(self, line: Line) -> None:
        """Take in one line of the node's log."""
        if line.kind == "progress":
            self.state = "training"
            self.lives[-1].append(line)
        elif line.kind == "evaluation":
            self.evaluations.append(line)
        elif line.kind == "shutdown":
            self.state = "saved, left"
        elif line.is_merged():
            self.merged.append(line)
        elif line.is_head():
            followed = self.chains.setdefault(line.fragment, {})
            if line.kind == "catchup":  # a whole state was copied, which breaks the chain
                followed.clear()
            for later in [n for n in followed if n > line.number or n <= line.number - MAX_VERSIONS]:
                del followed[later]
            followed[line.number] = line.digest

    def head(self, fragment: int) -> int:
        """Number of the newest version of a fragment."""
        return max(self.chains.get(fragment, {0: ""}))


class Chronicle:
    """Account of all nodes. Lines of one kind are in the order in which they were read."""

    def __init__(self, fragments: int, names: Mapping[str, str] | None = None) -> None:
        """`names`: peer id -> node name, of the nodes that are known from the start."""
        self.fragments = fragments
        self.nodes: dict[str, NodeTrace] = {}
        self._names: dict[str, str] = {}
        for peer, name in (names or {}).items():
            self.meet(name, peer)
        self.merges: list[Line] = []
        """Rounds that were closed."""
        self.held: list[Line] = []
        """Versions that became some node's head."""
        self.published: list[Line] = []
        """Versions that were made: a part of `held`."""
        self.offices: list[Line] = []
        """Offices that were taken, and those that were laid down."""
        self.forks: list[Line] = []
        self.given_up: list[Line] = []
        """Ends of contributions whose work is in no chain."""
        self.refusals: Counter[str] = Counter()
        self._newest = dict.fromkeys(range(fragments), 0)
        self._in_office: dict[int, Line] = {}

    def meet(self, name: str, peer: str) -> None:
        """Make a node known."""
        self.nodes[name] = NodeTrace(name)
        self._names[peer] = name

    def feed(self, line: Line) -> None:
        """Take in one line of the log of `line.node`."""
        self.nodes[line.node].feed(line)
        if line.is_head():
            self.held.append(line)
        if line.is_made():
            self.published.append(line)
            self._newest[line.fragment] = max(self._newest[line.fragment], line.number)
        elif line.is_merge():
            self.merges.append(line)
        elif line.kind == "office" and (line.syncer or line.reason.startswith("laid down")):
            self.offices.append(line)
            if _rank(line) > _rank(self._in_office.get(line.fragment)):
                self._in_office[line.fragment] = line
        elif line.kind == "fork":
            self.forks.append(line)
        elif line.kind == "refusal":
            self.refusals[line.reason] += 1
        if line.lost or (line.kind == "fork" and line.reason.startswith("given up")):
            self.given_up.append(line)

    # --- offices -----------------------------------------------------------------------------------------

    def syncer(self, fragment: int, at_s: float = inf) -> str:
        """Name of the fragment's syncer at that time, as far as anybody knew; empty: none."""
        newest = self._in_office.get(fragment)
        if at_s < inf:
            known = [line for line in self.offices if line.fragment == fragment and line.mono <= at_s]
            newest = max(known, key=_rank, default=None)
        if newest is None or not newest.syncer:
            return ""
        return self._names.get(newest.syncer, f"…{newest.syncer[-6:]}")

    def offices_of(self, name: str, at_s: float = inf) -> list[int]:
        """Fragments whose syncer this node was at that time."""
        return [fragment for fragment in range(self.fragments) if self.syncer(fragment, at_s) == name]

    # --- versions ----------------------------------------------------------------------------------------

    def newest(self, fragment: int) -> int:
        """Highest number of a version of the fragment that anybody published."""
        return self._newest[fragment]

    def updates(self) -> int:
        """Outer updates so far: versions of all fragments."""
        return sum(self._newest.values())

    def published_after(self, fragment: int, at_s: float) -> float | None:
        """Time of the first version of a fragment that was published after `at_s`; None: none yet."""
        times = (line.mono for line in self.published if line.fragment == fragment and line.mono > at_s)
        return min(times, default=None)

    def participation(self) -> float | None:
        """Share of live learners whose work was merged, over all merges; None before the first merge."""
        live = sum(line.live for line in self.merges)
        return sum(line.contributors for line in self.merges) / live if live else None

    def wrong_digests(self) -> list[str]:
        """Sentence about states that nodes computed otherwise than a version's header says; empty: none."""
        count = self.refusals["digest-differs"] + self.refusals["false-state"]
        return [f"{count} times a node computed another state than the syncer"] if count else []

    def heldout_losses(self) -> list[tuple[float, float]]:
        """(time, held-out loss of the global parameters) as any node measured it, in the order of time."""
        lines = chain.from_iterable(trace.evaluations for trace in self.nodes.values())
        return sorted((line.mono, line.loss) for line in lines if line.loss is not None)


def _rank(line: Line | None) -> tuple[int, bool]:
    """Order of what is known of an office: by term, and within one the end of it counts."""
    return (line.term, not line.syncer) if line else (-1, False)


# Event logs: typed records, of a growing or a whole file.

NO_FRAGMENT = -1
HEAD_KINDS = ("publish", "apply", "catchup")
"""Kinds of line that name the version which became the node's head, if they have a digest."""


class Line(Frozen, kw_only=True, omit_defaults=True):
    """One line of an event log. A field that lines of its kind do not carry has its default."""

    node: str = ""
    """Name of the node whose log it is, given by the reader."""
    mono: float
    kind: str
    reason: str = ""
    about: int | None = msgspec.field(default=None, name="fragment")
    number: int = -1
    digest: str = ""
    term: int = 0
    tokens: int = 0
    syncer: str = ""
    group: int | str = ""
    """Name of a group; in lines of kind `groups`, the number of the node's leaf group."""
    contributors: int = 0
    live: int = 0
    stamp: int = 0
    contributions: int = 0
    lost: bool = False
    inner_step: int = 0
    tokens_total: int = 0
    tokens_per_s: float | None = None
    step_time_s: float = 0.0
    longest_gap_s: float = 0.0
    longest_aside_s: float = 0.0
    cpu_s: float = 0.0
    loss: float | None = None
    metrics: dict[str, float] = msgspec.field(default_factory=dict)
    pushed_bytes: int = 0
    updates_given_bytes: int = 0
    updates_passed_on_bytes: int = 0
    device: str = ""
    code: int | None = None
    every: int = 1
    peer: str = ""

    @property
    def fragment(self) -> int:
        """Fragment that the line is about; NO_FRAGMENT: none."""
        return NO_FRAGMENT if self.about is None else self.about

    @property
    def version(self) -> tuple[int, int]:
        """(fragment, number) of the version that the line names."""
        return self.fragment, self.number

    def is_head(self) -> bool:
        """Tell whether the node's head became this version."""
        return self.kind in HEAD_KINDS and bool(self.digest)

    def is_made(self) -> bool:
        """Tell whether the node made and published this version."""
        return self.kind == "publish" and bool(self.digest)

    def is_merge(self) -> bool:
        """Tell whether the node, as syncer, closed a round with these contributors."""
        return self.kind == "merge" and self.contributors > 0

    def is_merged(self) -> bool:
        """Tell whether a contribution of the node was merged."""
        return self.kind == "contribution" and self.reason == "merged"


class Tail:
    """Complete lines that a growing log has gained, its rotated part first; torn lines are left out."""

    def __init__(self, path: Path, node: str = "") -> None:
        """`node`: name that the lines are to carry."""
        self._reader, self._node = EventReader(path), node

    def lines(self) -> list[Line]:
        """Return the lines completed since the last call.

        Raises:
            msgspec.ValidationError: a line is not of our format.
        """
        return [msgspec.convert(event | {"node": self._node}, Line) for event in self._reader.events()]


def read_log(path: Path, node: str = "") -> list[Line]:
    """Read all complete lines of a log, its rotated part first."""
    return Tail(path, node).lines()


def of_kind(lines: Iterable[Line], *kinds: str) -> list[Line]:
    """Pick the lines of these kinds."""
    return [line for line in lines if line.kind in kinds]


# Versions that nodes have, by their logs or on their disks, and where two differ.


class HeldVersions(Frozen):
    """Versions that somebody holds: fragment -> number -> digest (of the version's header)."""

    name: str
    versions: dict[int, dict[int, str]]


def conflicts(holdings: Sequence[HeldVersions]) -> tuple[list[str], int]:
    """Versions that two of them hold with different digests, in words; and how many were compared."""
    found, compared = [], 0
    seen: dict[tuple[int, int], dict[str, list[str]]] = {}
    for held in holdings:
        for fragment, versions in held.versions.items():
            for number, digest in versions.items():
                seen.setdefault((fragment, number), {}).setdefault(digest, []).append(held.name)
    for (fragment, number), by_digest in sorted(seen.items()):
        compared += sum(map(len, by_digest.values())) > 1
        if len(by_digest) > 1:
            camps = " against ".join(", ".join(names) for names in by_digest.values())
            found.append(f"version {number} of fragment {fragment} differs: {camps}")
    return found, compared


def held_by_traces(traces: Iterable[NodeTrace]) -> list[HeldVersions]:
    """List what the nodes hold by their logs."""
    return [HeldVersions(trace.name, trace.chains) for trace in traces]
