"""One run of a swarm, with a schedule of faults or with none: start, strike, mend, settle, leave.

The supervisor is the person (or the service manager) who starts a node again after it died. It does
nothing else: no node is told anything, nothing is repaired.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.demo.demo import Interrupted
from p2pdiloco.demo.swarm import DemoFailed, Swarm, SwarmNode
from p2pdiloco.tasks.registry import render_toml
from p2pdiloco_lab.chaos.facts import Facts
from p2pdiloco_lab.chaos.plan import Fault
from p2pdiloco_lab.chaos.strikes import Strike, Striker
from p2pdiloco_lab.chaos.watch import SwarmWatch
from p2pdiloco_lab.links.namespaces import Links, place

EXIT_VERDICT = 1
START_TIMEOUT_S = 180.0
WARM_UP_S = 5.0
"""Time that the whole swarm trains before anything counts."""
SETTLE_S = 90.0
"""After the last fault is mended: all nodes must train and hold equal new versions by then."""
TICK_S = 0.2
TELL_EVERY_S = 30.0


class Taped(Struct, frozen=True):
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


class Outcome(Struct, kw_only=True):
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


class Course(Struct, frozen=True, kw_only=True):
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
        course: Course,
        folder: Path,
        links: Links | None,
        tell: Callable[[str], None],
        tape: Callable[[Taped], None],
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

    def play(self) -> Outcome:
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
        return Outcome(
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
        self._tape(Taped(time.time(), now, at_s, index, event, fault.kind, target, fault.lasts_s, what))
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


def line_of(taped: Taped) -> bytes:
    """The JSON line."""
    return msgspec.json.encode(taped) + b"\n"
