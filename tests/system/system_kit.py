"""A swarm of real processes on loopback, watched through what they write, ended whatever happens.

Every process that descends from a test inherits one environment variable with a fresh value; so what is
left over is found by that, also when its parent is long dead. Waiting is always for a condition with a
deadline, never for a time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
from deadlines import Deadline, within_s
from launcher import TAG, Launched, Launcher, Shared, is_fork, is_learner, nursed

from p2pdiloco.adapters.data_dir import own_peer
from p2pdiloco.adapters.p2pd import socket_folder
from p2pdiloco.cli.status_command import Search, visitor
from p2pdiloco.daemon.run_files.known_runs import peers_of
from p2pdiloco.demo.swarm import Line, Tail, of_kind
from p2pdiloco.errors import json_line

POLL_S = 0.05
LEARNER = "p2pdiloco.learner"
SWARMS = ("demo", "chaos")
"""Commands that start swarms of their own: they start as a person starts them."""
START_S = 90.0
EXIT_S = 30.0
"""Who hangs at its end is not waited for longer. That leaving takes 9.5 s at most is the daemon's own rule:
else its status is 75 (`daemon.start.UNFINISHED`)."""
ORPHANS_S = 10.0
ANSWER_S = 60.0
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
PACE = ("--threads", "1", "--min-step-s", "0.05")
"""Learners that do not take the cores which other swarms and processes that start need."""
SMALLER = {
    "layers = 2": "layers = 1",
    "tokens_per_step = 256": "tokens_per_step = 128",
    "warmup_tokens = 15360": "warmup_tokens = 7680",
    "schedule_tokens = 153600": "schedule_tokens = 76800",
}
"""What swarms train where a preset's own learning is not what is tested: an inner step of the micro preset
takes twice the processor time. Fragments, and inner steps of the schedule, are as many."""
LAUNCHERS = Shared()
"""What swarms start nodes with, until one fails (`Swarm.__exit__`) or the folder is left (conftest.py)."""


class Daemon:
    """One `p2pdiloco bootstrap` or `p2pdiloco node`."""

    def __init__(
        self,
        name: str,
        arguments: list[str],
        folder: Path,
        run: Callable[[list[str], Path, Path], subprocess.Popen[bytes] | Launched],
    ) -> None:
        """`run`: how a command is started whose output is to go to these two files."""
        self.name = name
        self.data_dir = folder
        logs = folder.parent / f"{name}.logs"
        logs.mkdir(exist_ok=True)
        life = len(list(logs.glob("*.err")))
        self._out, self._err = logs / f"{life}.out", logs / f"{life}.err"
        self._log = Tail(folder / "events.jsonl", name)
        self._log.lines()  # what an earlier process wrote
        self._process = run(arguments, self._out, self._err)
        self.expected_to_live = True
        self._lines: list[Line] = []

    # --- what it says --------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> int | None:
        """Exit status, None while it runs."""
        return self._process.poll()

    def said(self) -> str:
        """Everything on stderr in this life."""
        return self._err.read_text(errors="replace")

    def printed(self) -> str:
        """Everything on stdout in this life."""
        return self._out.read_text()

    def address(self) -> str | None:
        """Its best address, of those that it prints first; None while they are not printed."""
        _, found, addresses = self.printed().partition("--initial_peers ")
        return addresses.split()[0] if found and "\n" in addresses else None

    def page(self) -> str:
        """Address of its web page, with the owner's token; empty while it is not printed."""
        _, found, rest = self.printed().partition("web page: ")
        return rest.split()[0] if found and "\n" in rest else ""

    def events(self, *kinds: str) -> list[Line]:
        """Lines of the event log in this life, of these kinds or of all."""
        self._lines += self._log.lines()
        return of_kind(self._lines, *kinds) if kinds else list(self._lines)

    def heads(self) -> dict[tuple[int, int], str]:
        """(fragment, version number) -> digest, of every version that this node held; the latest counts."""
        return {line.version: line.digest for line in self.events() if line.is_head()}

    def number(self, fragment: int) -> int:
        """Newest version of a fragment that it held in this life; -1: none yet."""
        return max((n for f, n in self.heads() if f == fragment), default=-1)

    def inner_step(self) -> int:
        progress = self.events("progress")
        return progress[-1].inner_step if progress else 0

    def is_syncer_of(self) -> list[int]:
        """Fragments whose office it holds, as it says."""
        syncers: dict[int, bool] = {}
        for event in self.events("office", "election"):
            syncers[event.fragment] = event.kind == "office" and event.syncer == self.peer_id
        return [fragment for fragment, holds in syncers.items() if holds]

    @property
    def peer_id(self) -> str:
        address = self.address()
        assert address is not None
        return address.rsplit("/", 1)[-1]

    def full_merges(self, members: int) -> int:
        """How many versions it merged, as syncer, from that many learners: all of them took part."""
        return sum(line.contributors == members for line in self.events("merge"))

    def participation(self) -> tuple[int, int]:
        """(contributions merged, live learners) over its merges as syncer."""
        merges = self.events("merge")
        return sum(line.contributors for line in merges), sum(line.live for line in merges)

    # --- processes -----------------------------------------------------------------------------------

    def child(self, part: str) -> psutil.Process | None:
        """Its learner (`LEARNER`) or its network process ("p2pd")."""
        for process in psutil.Process(self.pid).children():
            try:
                words = process.cmdline()
                if part == LEARNER and is_learner(process):
                    return process
            except psutil.Error:
                continue  # it has just ended
            if part in words or (words and Path(words[0]).name == part):
                return process
        return None

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL: no good-bye."""
        self.expected_to_live = False
        self._process.kill()
        self._process.wait()

    def terminate(self) -> None:
        """SIGTERM; must end with status 0."""
        self.expected_to_live = False
        self._process.terminate()
        self.wait_exit(0)

    def wait_exit(self, status: int, timeout_s: float = EXIT_S) -> None:
        """It must end with that status."""
        self.expected_to_live = False
        try:
            got = self._process.wait(within_s(timeout_s))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} did not end within {timeout_s:g} s\n{self.tail()}") from None
        assert got == status, f"{self.name} ended with {got}, not {status}\n{self.tail()}"

    def tail(self) -> str:
        """For messages of failed assertions."""
        quiet = [line for line in self.events() if line.kind not in ("progress", "apply", "contribution")]
        lines = [msgspec.json.encode(line).decode() for line in quiet[-12:]]
        return "\n".join([f"--- {self.name}", self.said()[-1500:], *lines])


class Swarm:
    """Starts processes, waits for what they do, ends them all."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.all: dict[str, Daemon] = {}
        self.tag = uuid.uuid4().hex
        self._used: set[Path] = set()
        self._killed: set[Path] = set()
        self._forks: list[Launched] = []
        self._commands = itertools.count(1)
        self._launcher: Launcher | None = None
        clean = {k: v for k, v in os.environ.items() if not k.startswith("P2PDILOCO_")}
        self.environment = clean | {TAG: self.tag, "OMP_NUM_THREADS": "1"}

    # --- starting ------------------------------------------------------------------------------------

    def launcher(self) -> Launcher:
        """One of its own, which ends with the swarm."""
        self._launcher = self._launcher or Launcher(self.environment)
        return self._launcher

    def manifest(self, name: str = "test", *options: str, seats: Sequence[str] = ("one", "two")) -> Path:
        """A run.toml of a model smaller than the micro preset's, unless `options` name a preset, or a
        model to begin with. `seats`: names of nodes that have one, which need not have started yet."""
        path = self.folder / f"{name}-{len(list(self.folder.glob('*.toml')))}.toml"
        said = path.with_suffix(".said")
        key = path.with_suffix(".recovery.key")
        for before in sorted(self.folder.glob(f"{name}-*.recovery.key"))[:1]:
            key.write_bytes(before.read_bytes())  # it is part of the run's id
            key.chmod(0o600)
        first, *others = seats
        words = ["run", "new", name, "--preset", "micro", "--out", str(path), *options]
        words += [] if "--admission" in options else ["--open"]
        words += ["--data-dir", str(self.folder / first)]
        words += [word for seat in others for word in ("--seat", own_peer(self.folder / seat))]
        status = self._fork(words, said, said).wait(within_s(EXIT_S))
        assert status == 0, said.read_text()
        if {"--preset", "--from"}.isdisjoint(options):
            text = path.read_text()
            for line, smaller in SMALLER.items():
                assert text.count(f"\n{line}\n") == 1, line
                text = text.replace(f"\n{line}\n", f"\n{smaller}\n")
            path.write_text(text)
        return path

    def command(
        self, *arguments: str, timeout_s: float = 90.0, within: Sequence[str] = ()
    ) -> subprocess.CompletedProcess[str]:
        """A command that ends by itself; threads may run several. `within`: words that run it somewhere else.
        Raises: AssertionError (it does not end in time)."""
        number = next(self._commands)
        out, err = (self.folder / f"command-{number}.{which}" for which in ("out", "err"))
        apart = within or arguments[0] in SWARMS
        process = (
            self._run_within(within, list(arguments), out, err) if apart else self._fork(arguments, out, err)
        )
        try:
            status = process.wait(within_s(timeout_s))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(within_s(EXIT_S))
            what = f"p2pdiloco {' '.join(arguments)}: did not end within {timeout_s:g} s"
            raise AssertionError(f"{what}\n{err.read_text()[-1500:]}\n{self.tails()}") from None
        return subprocess.CompletedProcess(arguments, status, out.read_text(), err.read_text())

    def begin(self, *arguments: str, out: Path | None = None) -> subprocess.Popen[bytes]:
        """A command that the test ends. `out`: what it writes goes there."""
        command = [sys.executable, "-m", "p2pdiloco", *arguments]
        if out is None:
            return subprocess.Popen(command, env=self.environment)
        with out.open("wb") as file:
            return subprocess.Popen(command, env=self.environment, stdout=file)

    def start(
        self,
        name: str,
        role: str,
        *options: str,
        listen: str = LOOPBACK,
        within: Sequence[str] = (),
        by: Sequence[str] = (),
    ) -> Daemon:
        """Start a process in the data folder of that name. A second time: the same node again.
        `within`: words that run a command somewhere else; `by`: of a program that runs it here."""
        data_dir = self.folder / name
        self._used.add(data_dir)
        arguments = [role, "--data-dir", str(data_dir), "--listen", listen, "--log", "text", *options]
        run = partial(self._run_within, within) if within else partial(self._fork, by=by)
        self.all[name] = daemon = Daemon(name, arguments, data_dir, run)
        return daemon

    def _fork(self, arguments: Sequence[str], out: Path, err: Path, by: Sequence[str] = ()) -> Launched:
        fork = LAUNCHERS.get().start(arguments, out, err, environment=self.environment, by=by)
        self._forks.append(fork)
        return fork

    def _run_within(
        self, within: Sequence[str], arguments: list[str], out: Path, err: Path
    ) -> subprocess.Popen[bytes]:
        with out.open("wb") as stdout, err.open("wb") as stderr:
            return subprocess.Popen(
                [*within, sys.executable, "-m", "p2pdiloco", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                env=self.environment,
            )

    def bootstrap(self, *options: str, seats: Sequence[str] = ("one", "two")) -> Daemon:
        """A bootstrap that serves the micro run (or whatever `options` say), with its address printed."""
        options = options or ("--run", str(self.manifest(seats=seats)))
        daemon = self.start("bootstrap", "bootstrap", *options)
        self.until(lambda: daemon.address() is not None, "the bootstrap's address", START_S)
        return daemon

    def second_bootstrap(self, first: Daemon) -> Daemon:
        """A bootstrap that serves the run of the first, which may be dead, under an address of its own."""
        second = self.start("second", "bootstrap", "--join", first.address() or "")
        self.until(lambda: f"--join {second.address()} --run " in second.printed(), "its join line", START_S)
        return second

    def node(self, name: str, join: Daemon | None, *options: str) -> Daemon:
        """A node; it is not waited for."""
        joined = ["--join", join.address() or ""] if join is not None else []
        return self.start(name, "node", *joined, *PACE, "--name", name, *options)

    # --- waiting -------------------------------------------------------------------------------------

    def until(self, condition: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
        """Wait until it holds and return its value; fails early when a process ends that should live."""
        deadline = Deadline(timeout_s)
        while not (value := condition()):
            dead = [d for d in self.all.values() if d.expected_to_live and d.ended() is not None]
            if dead or deadline.over():
                why = f"{dead[0].name} ended with {dead[0].ended()}" if dead else f"not within {deadline}"
                raise AssertionError(f"waiting for {what}: {why}\n" + self.tails())
            time.sleep(POLL_S)
        return value

    def training(self, *daemons: Daemon) -> None:
        """Wait until they make inner steps."""
        for daemon in daemons:
            self.until(lambda d=daemon: d.inner_step() > 1, f"{daemon.name} to train", START_S)

    def advance(self, daemon: Daemon, fragments: list[int], versions: int, timeout_s: float = 60.0) -> None:
        """Wait until that node holds that many further versions of these fragments."""
        goals = {fragment: daemon.number(fragment) + versions for fragment in fragments}
        self.until(
            lambda: all(daemon.number(f) >= goal for f, goal in goals.items()),
            f"{versions} more versions of {fragments} at {daemon.name}",
            timeout_s,
        )

    def tails(self) -> str:
        """The end of everybody's logs."""
        return "\n".join(daemon.tail() for daemon in self.all.values())

    # --- ending --------------------------------------------------------------------------------------

    def kill(self, daemon: Daemon) -> None:
        """SIGKILL to a daemon; its helpers must end by themselves."""
        helpers = psutil.Process(daemon.pid).children(recursive=True)
        daemon.kill()
        self._killed.add(daemon.data_dir)
        _, alive = psutil.wait_procs(helpers, within_s(ORPHANS_S))
        assert not alive, f"outlived {daemon.name}: {alive}"

    def __enter__(self) -> Swarm:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """End everything. What the product promises of an end is checked."""
        failed = kind is not None
        try:
            if not failed:
                self._end_in_order()
        finally:
            # Before we look whom they have started.
            if self._launcher is not None:
                self._launcher.kill(within_s(EXIT_S))
            if failed:
                LAUNCHERS.end(within_s(EXIT_S))
            leftovers = list(self.processes())
            for process in leftovers:
                process.kill()
            psutil.wait_procs(leftovers, within_s(5))
            folders = [socket_folder(data_dir) for data_dir in self._used]
            stale = [f for f in folders if f.exists()]
            for folder in stale:
                shutil.rmtree(folder, ignore_errors=True)
        if not failed:
            assert not leftovers, f"processes were left: {leftovers}"
            # Who had no time to tidy up leaves that to his next start.
            hurried = {d.data_dir for d in self.all.values() if d.ended() != 0}
            excused = {socket_folder(data_dir) for data_dir in self._killed | hurried}
            assert not set(stale) - excused, f"socket folders were left: {stale}"

    def _end_in_order(self) -> None:
        living = [daemon for daemon in self.all.values() if daemon.ended() is None]
        for daemon in living:
            daemon.expected_to_live = False
            daemon.signal(signal.SIGTERM)
        for daemon in living:
            daemon.wait_exit(0)
        if self._launcher is not None:
            self._launcher.close(within_s(EXIT_S))
        deadline = Deadline(ORPHANS_S)
        while list(self.processes()) and not deadline.over():
            time.sleep(POLL_S)

    def processes(self) -> Iterator[psutil.Process]:
        """What runs now and was started here, by whomever."""
        for process in psutil.process_iter():
            try:
                tagged = process.environ().get(TAG) == self.tag or nursed(process, self.tag)
                if (tagged or self._forked(process)) and process.status() != psutil.STATUS_ZOMBIE:
                    yield process
            except psutil.Error:
                continue  # somebody else's, or gone in this moment

    def _forked(self, process: psutil.Process) -> bool:
        """A fork shows the environment of its parent."""
        return any(f.pid == process.pid and f.poll() is None for f in self._forks) and is_fork(process)


@contextmanager
def asking(node: Daemon, run: str = "") -> Iterator[Callable[[], dict[str, Any]]]:
    """What `status --join` finds out from that node, as often as somebody wants to know, of one visitor: the
    command starts a p2pd each time, which takes half a CPU-second."""
    loop, visit = asyncio.new_event_loop(), AsyncExitStack()
    thread = threading.Thread(target=loop.run_forever)

    def call(what: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(what, within_s(ANSWER_S)), loop).result()

    join = (node.address() or "",)

    def ask() -> dict[str, Any]:
        deadline = Deadline(ANSWER_S)
        while not deadline.over():
            (report, *_) = call(Search(run, peers_of(join)).reports(transport, enough=1))
            told: dict[str, Any] = json.loads(json_line(report))
            if told["answered_by"] == node.peer_id:
                return told
        raise AssertionError(f"{node.name} does not answer within {deadline}\n{node.tail()}")

    thread.start()
    try:
        transport = call(visit.enter_async_context(visitor(join)))
        yield ask
    finally:
        call(visit.aclose())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
