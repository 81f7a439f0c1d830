"""One run of a swarm, with a schedule of faults or with none: start, strike, mend, settle, leave.

The supervisor (`ChaosRun`) is the person (or the service manager) who starts a node again after it died. It
does nothing else: no node is told anything, nothing is repaired. `Striker` carries faults out and mends them,
and `SwarmWatch` reads the nodes' logs while they grow.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import psutil
from msgspec import Struct

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.presets import with_schedule
from p2pdiloco.demo.demo import Interrupted
from p2pdiloco.demo.judge import Judge, cores, read_saved, schedule_steps
from p2pdiloco.demo.swarm import Chronicle, DemoFailed, Swarm, SwarmNode, Tail, conflicts, held_by_traces
from p2pdiloco.errors import StorageError
from p2pdiloco.tasks.registry import render_toml
from p2pdiloco_lab.chaos.chaos_verdict import Facts, Fault, State, StateChange
from p2pdiloco_lab.namespaces import Links, place

EXIT_VERDICT = 1
START_TIMEOUT_S = 180.0
WARM_UP_S = 5.0
"""Time that the whole swarm trains before anything counts."""
SETTLE_S = 90.0
"""After the last fault is mended: all nodes must train and hold equal new versions by then."""
TICK_S = 0.2
TELL_EVERY_S = 30.0
LONGEST_INTERVAL_S = 4.0
"""A pace that was asked for does not make H inner steps longer than that."""


def paced(manifest: Manifest, seconds: float, nodes: int, load: float) -> tuple[Manifest, float]:
    """Fit a manifest so that the learners of so many nodes here use that share of the processors.

    Returns the manifest with a learning rate schedule as long as they train, and the least seconds of an
    inner step (0 at a load of 1). Raises: UserError.
    """
    alone_s = Judge(manifest).step_time_s()
    min_step_s = 0.0
    if load < 1:
        # A larger model's rounds would take minutes at that load: it may use what it needs for shorter ones.
        longest_s = LONGEST_INTERVAL_S / manifest.sync.inner_steps
        min_step_s = max(alone_s, min(alone_s * nodes / (cores() * load), longest_s))
    steps = schedule_steps(alone_s, seconds, nodes)
    if min_step_s:
        steps = min(steps, max(1, round(seconds / min_step_s)))
    return with_schedule(manifest, steps, nodes), min_step_s


class FaultLine(Struct, frozen=True):
    """A line of faults.jsonl."""

    t: float
    """Wall clock, seconds since 1970."""
    mono: float
    """Monotonic, as in the nodes' event logs."""
    at_s: float
    """Time since all nodes trained."""
    fault: int
    """Number in the schedule; -1: not of it."""
    event: str
    """struck, mended, skipped, or unexpected (a process ended that nobody had struck)."""
    kind: str
    target: str
    lasts_s: float
    """Length of the fault as drawn; 0: the node mends itself."""
    what: str


class ChaosOutcome(Struct, kw_only=True):
    """Result of a run."""

    facts: Facts
    struck: int
    skipped: int
    unexpected: list[str]
    """Processes that ended though nobody had struck them, and nodes that did not leave in order."""
    disagreements: list[str]
    """Versions that two nodes hold with different bytes, in logs or on disk."""
    stuck: list[str]
    """Nodes and fragments that did not train or agree at the end, in words."""
    settled_s: float | None
    """Time from the last mending to equal new versions everywhere; None: not within the limit."""


class ChaosCourse(Struct, frozen=True, kw_only=True):
    """Course of a run, fixed before it starts."""

    manifest: Manifest
    nodes: int
    seconds: float
    """Length of the part that counts."""
    faults: Sequence[Fault] = ()
    min_step_s: float
    """Least time of an inner step of every learner; 0: as short as may be."""
    temporary: bool
    """The folder goes even if we are killed."""


class ChaosRun:
    """One swarm from start to end."""

    def __init__(
        self,
        course: ChaosCourse,
        folder: Path,
        links: Links | None,
        tell: Callable[[str], None],
        tape: Callable[[FaultLine], None],
        stop: threading.Event,
    ) -> None:
        """Raises: StorageError, LinksRefused."""
        self._manifest = manifest = course.manifest
        self._seconds = course.seconds
        self._due = list(course.faults)
        self._links = links
        self._tell = tell
        self._tape = tape
        self._stop = stop
        folder.mkdir(parents=True, exist_ok=True)
        run_file = folder / "run.toml"
        run_file.write_text(render_toml(manifest), encoding="utf-8")
        self._swarm = Swarm(folder, run_file, manifest, course.nodes, course.temporary, course.min_step_s)
        if course.temporary:
            self._swarm.guard.adopt(folder.parent)
        self._address = ""
        self._watch = SwarmWatch(manifest.sync.fragments)
        self.facts = self._watch.facts
        self._striker = Striker(self._swarm, links, lambda: ["--join", self._address])
        self._active: list[Strike] = []
        self._gone: set[str] = set()
        self._unexpected: list[str] = []
        self._struck = self._skipped = 0
        self._tell_at_s = 0.0

    def play(self) -> ChaosOutcome:
        """Everything. Raises: Interrupted, DemoFailed, StorageError, LinksRefused."""
        try:
            self._start()
            self._train()
            settled_s, stuck = self._settle()
            late = self._swarm.leave(self._pause)
            self._unexpected += [f"{name} did not leave in good order" for name in late]
            self._read()
        finally:
            self._swarm.end()
        self.facts.sort()
        return ChaosOutcome(
            facts=self.facts,
            struck=self._struck,
            skipped=self._skipped,
            unexpected=self._unexpected,
            disagreements=self._watch.disagreements(self._manifest, self._nodes()),
            stuck=stuck,
            settled_s=settled_s,
        )

    # --- phases --------------------------------------------------------------------------------------

    def _start(self) -> None:
        swarm = self._swarm
        if self._links is not None:
            place(swarm, self._links)
        self._address = swarm.start_bootstrap(self._pause)
        # A bootstrap that is started again must be found where people have noted it.
        swarm.bootstrap.listen = self._address.partition("/p2p/")[0]
        swarm.start_nodes(self._address)
        for node in swarm.nodes:
            self._watch.meet(node)
            self._striker.act(node.name, "starting")
        until = time.monotonic() + START_TIMEOUT_S
        while not all(trace.last for trace in self.facts.log.nodes.values()):
            if time.monotonic() > until:
                raise DemoFailed(f"not all nodes trained within {START_TIMEOUT_S:.0f} s")
            self._tick()
        warm_s = time.monotonic() + WARM_UP_S
        while time.monotonic() < warm_s:
            self._tick()

    def _train(self) -> None:
        began_s = self.facts.began_s = time.monotonic()
        while (elapsed_s := time.monotonic() - began_s) < self._seconds:
            if self._due and self._due[0].at_s <= elapsed_s:
                self._strike()
            self._mend()
            self._tick()
        self.facts.ended_s = time.monotonic()
        for fault in self._due:
            self._skip(fault)
        self._due = []

    def _settle(self) -> tuple[float | None, list[str]]:
        """Mend everything, then wait until all agree: (how long that took, who did not)."""
        until = time.monotonic() + SETTLE_S
        while self._active and time.monotonic() < until:
            self._mend(all_of_them=True)
            self._tick()
        began_s = time.monotonic()
        heads = self._watch.heads()
        while missing := self._watch.not_back(self._nodes()) + self._watch.not_agreed(self._nodes(), heads):
            if time.monotonic() > until:
                return None, missing
            self._tick()
        return round(time.monotonic() - began_s, 3), []

    # --- faults --------------------------------------------------------------------------------------

    def _nodes(self) -> list[SwarmNode]:
        return [node for node in self._swarm.nodes if node.name not in self._gone]

    def _strike(self) -> None:
        """Carry out the next fault; with too many nodes disturbed it waits."""
        fault = self._due[0]
        disturbed = {strike.node for strike in self._active}
        nodes = self._nodes()
        if fault.kind != "kill-bootstraps" and len(disturbed - {"bootstrap"}) >= max(
            1, (len(nodes) - 1) // 2
        ):
            return
        index = fault.target
        if fault.kind == "kill-syncer":
            name = self.facts.log.syncer(fault.target)
            index = next((i for i, node in enumerate(nodes) if node.name == name), 0)
        order = nodes[index % len(nodes) :] + nodes[: index % len(nodes)]
        for node in order:
            if node.name in disturbed or not node.alive or not self._watch.trains(node.name):
                continue
            number = self._struck + self._skipped
            strike = self._striker.strike(number, fault, node)
            if strike is not None:
                self._carried_out(strike)
                return
            break  # not at this moment: the next tick tries again

    def _carried_out(self, strike: Strike) -> None:
        self._due.pop(0)
        self._struck += 1
        if strike.mend is not None:
            self._active.append(strike)
        if strike.fault.kind == "newcomer":
            self._gone.add(strike.node)
        self._note(strike.index, "struck", strike.fault, strike.node, strike.what)

    def _mend(self, all_of_them: bool = False) -> None:
        now = time.monotonic()
        for strike in list(self._active):
            if strike.mend is None or (now < strike.mend_at_s and not all_of_them):
                continue
            leaver = next((n for n in self._nodes() if n.name == strike.node), None)
            if strike.fault.kind == "leave" and leaver is not None:
                if leaver.alive and now < strike.at_s + strike.patience_s:
                    continue
                if leaver.alive or leaver.exit_status != 0:
                    self._unexpected.append(f"{strike.node} did not leave: status {leaver.exit_status}")
                    leaver.kill()
            self._active.remove(strike)
            self._note(strike.index, "mended", strike.fault, strike.node, strike.mend())
        for newcomer in self._striker.newcomers:
            self._watch.meet(newcomer)
        self._striker.newcomers.clear()

    def _skip(self, fault: Fault) -> None:
        self._note(self._struck + self._skipped, "skipped", fault, "", "no node could be struck in its time")
        self._skipped += 1

    def _note(self, index: int, event: str, fault: Fault, target: str, what: str) -> None:
        now = time.monotonic()
        at_s = round(now - self.facts.began_s, 3)
        self._tape(FaultLine(time.time(), now, at_s, index, event, fault.kind, target, fault.lasts_s, what))
        self._tell(f"{at_s:7.1f} s  {event} {target}: {fault.kind}, {what}")

    # --- watching ------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._read()
        self._look_after()
        now = time.monotonic()
        if now >= self._tell_at_s:
            self._tell_at_s = now + TELL_EVERY_S
            self._tell(self._watch.status(self._nodes(), now - TELL_EVERY_S))
        self._pause(TICK_S)

    def _look_after(self) -> None:
        """Start again what ended though nobody struck it, and remember that."""
        down = {strike.node for strike in self._active}
        for member in (self._swarm.bootstrap, *self._nodes()):
            if (
                member.alive
                or member.name in down
                or not (self._watch.knows(member.name) or member is self._swarm.bootstrap)
            ):
                continue
            words = f"{member.name} ended by itself with status {member.exit_status}: {member.last_words()}"
            self._unexpected.append(words)
            self._note(-1, "unexpected", Fault(0.0, "kill-daemon", 0, 0.0), member.name, words)
            if member.name != "bootstrap":
                self._striker.act(member.name, "killed")
                self._striker.start_again(member)
            else:
                member.start()

    def _read(self) -> None:
        self._watch.read(self._striker.acts)
        self._striker.acts.clear()

    def _pause(self, seconds: float) -> None:
        if self._stop.wait(seconds):
            raise Interrupted


def line_of(taped: FaultLine) -> bytes:
    """The JSON line."""
    return msgspec.json.encode(taped) + b"\n"


# Strikes.

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
    """Carries faults out and mends them; every change of a node's state is a `StateChange` in `acts`.

    A strike knows processes only: it kills, stops, limits and starts again, exactly as a power cut, a busy
    machine, a full disk or a person would. It never talks to a node.
    """

    def __init__(self, swarm: Swarm, links: Links | None, join: Callable[[], list[str]]) -> None:
        """`join`: arguments with which a newcomer finds the swarm."""
        self._swarm = swarm
        self._links = links
        self._join = join
        self.acts: list[StateChange] = []
        self.newcomers: list[SwarmNode] = []
        """Started on the way, not yet known to whoever reads the logs."""

    def act(self, node: str, state: State, at_s: float | None = None) -> float:
        """Note a node's new state; the monotonic time of it."""
        at_s = time.monotonic() if at_s is None else at_s
        self.acts.append(StateChange(at_s, node, state))
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


# Watch.


class SwarmWatch:
    """Facts of all nodes, up to date after every `read`."""

    def __init__(self, fragments: int) -> None:
        self._log = Chronicle(fragments)
        self.facts = Facts(self._log)
        self._tails: list[Tail] = []

    def meet(self, node: SwarmNode) -> None:
        """Read this node's log from now on."""
        self._log.meet(node.name, node.peer)
        self._tails.append(Tail(node.events, node.name))

    def knows(self, name: str) -> bool:
        """Tell whether the node was met."""
        return name in self._log.nodes

    def read(self, acts: Sequence[StateChange]) -> None:
        """Take in what the nodes wrote since, and what was done to them."""
        for tail in self._tails:
            for line in tail.lines():
                self.facts.feed(line)
        self.facts.acts += acts

    # --- questions -----------------------------------------------------------------------------------

    def trains(self, name: str) -> bool:
        """Tell whether the node's learner runs and nothing is done to it at present."""
        last = next((act.state for act in reversed(self.facts.acts) if act.node == name), "")
        return last in ("training", "resumed")

    def heads(self) -> dict[int, int]:
        """Fragment -> newest version number that any node ever held."""
        traces = self._log.nodes.values()
        return {f: max((t.head(f) for t in traces), default=0) for f in range(self._log.fragments)}

    def status(self, nodes: Sequence[SwarmNode], since_s: float) -> str:
        """One line for people."""
        recent = [merge for merge in self._log.merges[-500:] if merge.mono > since_s]
        if not recent:
            return "waiting for the first merges"
        mean = sum(merge.contributors for merge in recent) / len(recent)
        alive = sum(self.trains(node.name) for node in nodes)
        return f"{alive} of {len(nodes)} nodes train, {mean:.1f} contributors a merge"

    def not_back(self, nodes: Sequence[SwarmNode]) -> list[str]:
        """Nodes of whose work nothing was merged since they were last struck, in words."""
        struck_s = {act.node: act.at_s for act in self.facts.acts}
        return [
            f"{node.name}: nothing of it is merged since it was last struck"
            for node in nodes
            if max((line.mono for line in self._log.nodes[node.name].merged), default=0.0)
            < struck_s.get(node.name, 0.0)
        ]

    def not_agreed(self, nodes: Sequence[SwarmNode], heads: dict[int, int]) -> list[str]:
        """Fragments of which not all nodes hold one version, newer than these, with equal digests."""
        chains = [self._log.nodes[node.name].chains for node in nodes]
        missing = []
        for fragment, head in heads.items():
            held = [{item for item in chain.get(fragment, {}).items() if item[0] > head} for chain in chains]
            if not set.intersection(*held):
                without = [node.name for node, have in zip(nodes, held, strict=True) if not have]
                who = f"nothing new at {', '.join(without)}" if without else "no common version"
                missing.append(f"fragment {fragment}: {who} after version {head}")
        return missing

    def disagreements(self, manifest: Manifest, nodes: Sequence[SwarmNode]) -> list[str]:
        """Find disagreements in the logs of these nodes, who have ended, and between the bytes that they
        saved.

        A node that is gone for good does not count: perhaps nobody heard of its last version.
        """
        found, _ = conflicts(held_by_traces(self._log.nodes[node.name] for node in nodes))
        found += self._log.wrong_digests()
        saved = []
        for node in nodes:
            try:
                saved.append(read_saved(manifest, node.name, node.data_dir))
            except StorageError as error:
                found.append(f"{node.name}: {error}")
        found += [f"{s.holdings.name} saved other bytes of fragment {f}" for s in saved for f in s.unsound]
        return found + conflicts([s.holdings for s in saved])[0]


# Settings of `p2pdiloco chaos`.
