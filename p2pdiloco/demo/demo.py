"""`p2pdiloco demo`: a bootstrap and nodes as real processes on this machine; a syncer is killed on the way.

The demo only starts programs, reads their event logs, and sends signals: what it shows is what the same
commands do when people type them on different machines. `Screen` draws one live picture on a terminal, plain
lines elsewhere; `render_summary` draws the end. `chaos` of the lab shares the frame: folder, signals, files.
"""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import msgspec
from msgspec.structs import asdict
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from p2pdiloco.adapters.data_dir import storage_errors, try_file
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.presets import for_bytes, for_run, with_schedule, without_end
from p2pdiloco.config.settings import DemoSettings
from p2pdiloco.daemon.display.snapshot import count, duration, folded, loss_text, ranges, sparkline
from p2pdiloco.daemon.display.terminal import HELP, Keys, suspend
from p2pdiloco.demo import verdict
from p2pdiloco.demo.guard import stop_signals
from p2pdiloco.demo.judge import Judge, loss_unit, read_saved, schedule_steps
from p2pdiloco.demo.swarm import (
    Chronicle,
    DemoFailed,
    Line,
    NodeTrace,
    Swarm,
    Tail,
    conflicts,
    held_by_traces,
    stop_here,
)
from p2pdiloco.demo.verdict import DemoSummary, Kill
from p2pdiloco.errors import StorageError, UserError, clean, install_hint

EXIT_VERDICT = 1
EXIT_INTERRUPTED = 130
DEFAULT_PLOT = Path("p2pdiloco-demo.png")
START_TIMEOUT_S = 120.0
TICK_S = 0.25
KILL_AT = 0.4
"""Part of the time after which the kill comes."""
RESTART_AFTER_S = 15.0
RESTART_AFTER = 0.125
"""The victim is started again after so many seconds, or this part of a shorter demo."""
RECOVERY_S = 30.0
"""Time by which the demo is longer at most while a recovery is not complete."""


def run(settings: DemoSettings) -> int:
    """Run the demo. Exit status: 0 well, 1 the swarm failed at what it should show, 130 interrupted.

    Raises:
        UserError: a preset or a file of the settings cannot be used.
    """
    manifest = without_end(for_bytes(for_run(settings.preset, "demo")))
    plot = _plot(settings)
    if settings.report is not None:
        try_file(settings.report, "--report")
    console = Console(stderr=True)
    if plot is None:
        console.print(f"the plot needs matplotlib: {install_hint('plot')}", markup=False)
    with stop_signals() as stop, demo_folder(settings.keep) as folder:
        try:
            return Demo(settings, manifest, folder, plot, console, stop).run()
        except Interrupted:
            console.print("\ninterrupted: everything is ended")
            return EXIT_INTERRUPTED
        except DemoFailed as failure:
            console.print(f"\nFAILED: {failure}", style="bold red", markup=False)
            if settings.keep is None:
                console.print("--keep DIR keeps the logs of all processes")
            return EXIT_VERDICT


@dataclass
class Demo:
    """One demo from headline to summary."""

    _settings: DemoSettings
    _manifest: Manifest
    _folder: Path
    _plot: Path | None
    _console: Console
    _stop: threading.Event
    _kill: Kill | None = None

    def __post_init__(self) -> None:
        self._wants_kill = self._settings.kill and self._settings.nodes > 1
        headline = _headline(self._settings, self._manifest.run.task, self._wants_kill)
        self._screen = Screen(self._console, headline)

    def run(self) -> int:
        """Everything. Raises: Interrupted, DemoFailed, UserError."""
        screen = self._screen
        screen.start()
        try:
            judge, loss_before = self._prepare()
            temporary = self._settings.keep is None
            self._swarm = Swarm(
                self._folder, self._folder / "run.toml", self._manifest, self._settings.nodes, temporary
            )
            peers = {node.peer: node.name for node in self._swarm.nodes}
            self._chronicle = Chronicle(self._manifest.sync.fragments, peers)
            self._tails = [Tail(node.events, node.name) for node in self._swarm.nodes]
            try:
                began_s, ended_s = self._train()
            finally:
                self._swarm.end()
            self._read()
            screen.note("all processes have ended; what they saved is checked and evaluated")
            screen.show(self._chronicle, "ended", lines=False)
            self._pause(0)
        finally:
            screen.stop()
        summary = self._judge(judge, loss_before, began_s, ended_s)
        self._conclude(summary, began_s)
        return EXIT_VERDICT if summary.failures else 0

    # --- before ------------------------------------------------------------------------------------------

    def _prepare(self) -> tuple[Judge, float]:
        """A schedule that fits this machine, and the loss of version 0."""
        settings, manifest = self._settings, self._manifest
        judge = Judge(manifest)
        loss_before = judge.loss_at_version_0()
        step_time_s = judge.step_time_s()
        steps = schedule_steps(step_time_s, settings.seconds, settings.nodes)
        self._manifest = with_schedule(manifest, steps, settings.nodes)
        self._screen.note(
            f"an inner step takes {step_time_s * 1000:.0f} ms here: schedule for {steps} of each node"
        )
        self._pause(0)
        return judge, loss_before

    # --- the swarm ---------------------------------------------------------------------------------------

    def _train(self) -> tuple[float, float]:
        """Run from first process to last saved state: (when all trained, when they were told to leave)."""
        swarm, settings, screen = self._swarm, self._settings, self._screen
        address = swarm.start_bootstrap(self._pause, screen.suspend)
        screen.note(f"bootstrap listens at {address.partition('/p2p/')[0]}; starting the nodes")
        swarm.start_nodes(address)
        self._wait_for_training()
        began_s = time.monotonic()
        screen.began_s = began_s
        end_s = began_s + settings.seconds
        while time.monotonic() < end_s or (
            self._kill and not self._kill.is_over and time.monotonic() < end_s + RECOVERY_S
        ):
            elapsed_s = time.monotonic() - began_s
            if self._wants_kill and self._kill is None and elapsed_s >= KILL_AT * settings.seconds:
                self._kill = self._strike()
            if self._kill and self._kill.restarted_s is None:
                self._perhaps_restart(self._kill)
            left_s = max(0.0, end_s - time.monotonic())
            self._tick(f"training, {left_s:.0f} s to go" if left_s else "waiting for the recovery")
        ended_s = time.monotonic()
        screen.note("time is up: the nodes are told to leave; each hands over and saves")
        late = swarm.leave(lambda _: self._tick("leaving", watch=False))
        if late:
            raise DemoFailed(
                f"{', '.join(late)} did not leave in good order: {swarm.node(late[0]).last_words()}"
            )
        return began_s, ended_s

    def _wait_for_training(self) -> None:
        until = time.monotonic() + START_TIMEOUT_S
        while not all(trace.last for trace in self._chronicle.nodes.values()):
            if time.monotonic() > until:
                raise DemoFailed(f"not all nodes trained within {START_TIMEOUT_S:.0f} s")
            self._tick("setting up")

    def _tick(self, phase: str, watch: bool = True) -> None:
        """Read what is new, show it, wait a little."""
        self._read()
        if watch:
            kill = self._kill
            self._swarm.watch(kill.node if kill is not None and kill.restarted_s is None else "")
        self._screen.show(self._chronicle, phase)
        self._pause(TICK_S)

    def _pause(self, seconds: float) -> None:
        if self._stop.wait(seconds) or self._screen.is_left:
            raise Interrupted

    def _read(self) -> None:
        for tail in self._tails:
            for line in tail.lines():
                self._chronicle.feed(line)
                if words := event_text(line, self._chronicle.nodes[line.node]):
                    self._screen.note(words)
        if self._kill is not None:
            self._follow(self._kill)

    # --- the kill ----------------------------------------------------------------------------------------

    def _strike(self) -> Kill | None:
        """Kill a syncer; None: there is none."""
        self._read()  # the very latest offices
        chronicle = self._chronicle
        name = verdict.choose_victim(chronicle, [n.name for n in self._swarm.nodes if n.alive])
        if not name:
            return None
        at_s = self._swarm.node(name).kill()
        self._read()  # the last lines of before, its own among them
        fragments = chronicle.offices_of(name, at_s)
        chronicle.nodes[name].started("killed")
        listed = ", ".join(map(str, fragments))
        self._screen.note(f"kill -9 {name}, which is the syncer of fragments {listed}")
        return Kill(name, at_s, tuple(fragments))

    def _perhaps_restart(self, kill: Kill) -> None:
        if time.monotonic() - kill.at_s >= min(RESTART_AFTER_S, RESTART_AFTER * self._settings.seconds):
            kill.restarted_s = time.monotonic()
            self._swarm.node(kill.node).start()
            self._chronicle.nodes[kill.node].started("starting again")
            self._screen.note(f"{kill.node} is started again, with the same folder")

    def _follow(self, kill: Kill) -> None:
        """Note which of the victim's fragments go on, and whether it is back."""
        for fragment in kill.fragments:
            published_s = self._chronicle.published_after(fragment, kill.at_s)
            if published_s is not None and fragment not in kill.resumed_s:
                kill.resumed_s[fragment] = published_s - kill.at_s
                number = self._chronicle.newest(fragment)
                self._screen.note(
                    f"fragment {fragment} goes on: version {number}, "
                    f"{published_s - kill.at_s:.1f} s after the kill"
                )
        trains_s = self._chronicle.nodes[kill.node].trains_since_s
        if kill.back_s is None and trains_s is not None and kill.restarted_s is not None:
            kill.back_s = trains_s - kill.restarted_s
            self._screen.note(f"{kill.node} has caught up, {kill.back_s:.1f} s after its restart")

    # --- after -------------------------------------------------------------------------------------------

    def _judge(self, judge: Judge, loss_before: float, began_s: float, ended_s: float) -> DemoSummary:
        chronicle, manifest = self._chronicle, self._manifest
        saved = [read_saved(manifest, n.name, n.data_dir) for n in self._swarm.nodes]
        logged, in_logs = conflicts(held_by_traces(chronicle.nodes.values()))
        on_disk, _ = conflicts([s.holdings for s in saved])
        wrong = [
            f"{s.holdings.name} saved other bytes of fragment {f} than its version"
            for s in saved
            for f in s.unsound
        ]
        disagreements = wrong + chronicle.wrong_digests() + on_disk + logged
        newest = max(saved, key=lambda s: sum(max(chain) for chain in s.holdings.versions.values()))
        loss_after = judge.loss_of(newest.vault)
        kill = self._kill
        survivors = [t for t in chronicle.nodes.values() if kill is None or t.name != kill.node]
        resumed = {str(f): round(s, 3) for f, s in sorted(kill.resumed_s.items())} if kill else {}
        return DemoSummary(
            preset=self._settings.preset,
            nodes=self._settings.nodes,
            seconds=round(ended_s - began_s, 3),
            loss_before=loss_before,
            loss_after=loss_after,
            outer_updates=chronicle.updates(),
            inner_steps=sum(trace.inner_step for trace in chronicle.nodes.values()),
            tokens=sum(trace.last.tokens_total for trace in chronicle.nodes.values() if trace.last),
            kills=int(kill is not None),
            participation=chronicle.participation(),
            **asdict(verdict.pauses(survivors, began_s, ended_s)),
            t_resume_s=max(resumed.values(), default=None),
            t_resume_by_fragment_s=resumed,
            t_back_s=kill.back_s if kill else None,
            digests_agree=not disagreements,
            versions_compared=in_logs,
            forks=len(chronicle.forks),
            refusals=dict(chronicle.refusals),
            failures=verdict.failures(loss_before, loss_after, disagreements, kill, self._wants_kill),
            sample=judge.sample(newest.vault),
        )

    def _conclude(self, summary: DemoSummary, began_s: float) -> None:
        settings = self._settings
        files = [str(self._plot)] if self._plot is not None else []
        losses = (summary.loss_before, summary.loss_after)
        title = f"p2pdiloco demo: {settings.nodes} nodes, preset {settings.preset}"
        unit = loss_unit(self._manifest.run.task)
        if self._plot is not None:
            verdict.draw(self._plot, self._chronicle, began_s, self._kill, losses, title, unit)
        if settings.report is not None:
            write_file(settings.report, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
            files.append(str(settings.report))
        if settings.keep is not None:
            files.append(f"{settings.keep}/ (logs, events.jsonl and checkpoints of every process)")
        Console(soft_wrap=not os.isatty(1)).print(render_summary(summary, self._kill, files, unit))


def _plot(settings: DemoSettings) -> Path | None:
    """Path of the plot; None where nothing here can draw it and nobody asked for it.

    Raises:
        UserError: it was asked for, and cannot be drawn, or not be written.
    """
    if find_spec("matplotlib") is None:
        if settings.plot is not None:
            raise UserError("--plot needs matplotlib, which is not installed here", install_hint("plot"))
        return None
    plot = settings.plot or DEFAULT_PLOT
    try_file(plot, "--plot")
    return plot


def _headline(settings: DemoSettings, task: str, kills: bool) -> str:
    images = task == "image-classification"
    model, data = (
        ("image model", "scikit-learn's digits") if images else ("language model", "Python's own source")
    )
    if settings.nodes == 1:
        return f"One node trains one {model} alone on {data} (--nodes 3 shows more)."
    words = f"{settings.nodes} nodes on this machine train one {model} together, peer to peer, on {data}"
    if kills:
        return f"{words}. Then the one that merges most for the others gets a kill -9, and training goes on."
    return f"{words}."


# Frame of the commands demo and chaos: their folder, signals, files that can be written.


class Interrupted(BaseException):
    """The person wants to stop. Not an `Exception`: no handler on the way may take it for a failure."""


def write_file(path: Path, data: bytes) -> None:
    """Raises: StorageError."""
    with storage_errors("write", path):
        path.write_bytes(data)


@contextmanager
def demo_folder(keep: Path | None) -> Iterator[Path]:
    """The folder of all processes: the one to keep, or a temporary one."""
    if keep is None:
        folder = Path(tempfile.mkdtemp(prefix="p2pdiloco-demo-"))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return
    try:
        keep.mkdir(parents=True, exist_ok=True)
        if any(keep.iterdir()):
            raise UserError(f"{keep} is not empty", "give --keep a new folder")
    except OSError as error:
        raise StorageError(f"{keep}: cannot be used: {error.strerror}") from error
    yield keep.resolve()


# View.

LINE_EVERY_S = 10.0
KEPT_NOTES = 30
CURVE_CELLS = 20
GAP_CELLS = 2
LEFT_OUT = (4, 6, 5)
"""Columns of the table of nodes that narrow terminals do without: the curve, the speed, the held-out loss."""
EXPLAINED = (
    "q or Ctrl-C: end it all. ?: back to what happened.",
    "step: inner steps of a node. held-out: loss of the merged parameters on text that nobody trains on.",
    "syncer of: fragments, parts of the model, that this node merges. newest merge: learners in it.",
)
STATE_STYLES = {"training": "green", "killed": "bold red", "starting": "yellow", "starting again": "yellow"}


def event_text(line: Line, trace: NodeTrace) -> str:
    """Tell people of a line that its node's `trace` has just taken in; empty if it is not worth it."""
    name, reason = line.node, line.reason
    match line.kind:
        case "progress" if len(trace.lives[-1]) == 1:
            return f"{name} trains, from inner step {line.inner_step}"
        case "join" if reason.startswith("full member"):
            return f"{name} joins: {reason.partition(': ')[2]}"
        case "refusal" if reason in ("digest-differs", "false-state"):
            return f"{name} computes another state of fragment {line.fragment} than its syncer"
        case "fork":
            return f"{name}: fragment {line.fragment} has two heads: {reason}"
        case "learner" if reason.startswith(("ended: ", "lost")) and "stopped" not in reason:
            return f"{name}: learner {reason}"
    return ""


class Screen:
    """start, show often, note what happens, stop."""

    def __init__(self, console: Console, headline: str) -> None:
        self._console = console
        self._headline = headline
        self._live: Live | None = None
        self._notes: deque[tuple[float, str]] = deque(maxlen=KEPT_NOTES)
        self._opened_s = time.monotonic()
        self._next_line_s = 0.0
        self._keys = Keys()
        self._explains = False
        self.is_left = False
        """True: a person pressed q."""
        self.began_s: float | None = None
        """Time at which training began; before that, times count from the start."""

    def start(self) -> None:
        """Say what the demo shows, and begin the picture if this is a terminal."""
        self._console.print(Text(self._headline, style="bold"))
        self._console.print()
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
            self._keys.start()

    def stop(self) -> None:
        """Give the terminal back; the last picture stays."""
        self._keys.stop()
        if self._live is not None:
            self._live.stop()
            self._live = None

    def suspend(self) -> None:
        """Stop this process, as Ctrl-Z asks for."""
        if self._live is None:
            stop_here()
        else:
            suspend(self._live, self._keys)

    def note(self, text: str) -> None:
        """Something has happened."""
        self._notes.append((self._elapsed_s(), clean(text)))
        if self._live is None:
            self._console.print(_note(*self._notes[-1]), soft_wrap=True)

    def show(self, chronicle: Chronicle, phase: str, lines: bool = True) -> None:
        """The present state; on no terminal a line now and then, if `lines`."""
        for key in self._keys.pressed():
            self._explains ^= key == "?"
            self.is_left |= key in "qQ"
        if self._live is not None:
            self._live.update(self._picture(chronicle, phase), refresh=True)
        elif lines and self.began_s is not None and self._elapsed_s() >= self._next_line_s:
            self._next_line_s = self._elapsed_s() + LINE_EVERY_S
            self._console.print(Text(_line(chronicle, self._elapsed_s())), soft_wrap=True)

    def _elapsed_s(self) -> float:
        return time.monotonic() - (self._opened_s if self.began_s is None else self.began_s)

    def _picture(self, chronicle: Chronicle, phase: str) -> RenderableType:
        first = Text.assemble((phase, "bold"), f"   {HELP}   {chronicle.updates()} outer updates")
        if (participation := chronicle.participation()) is not None:
            first.append(f", {participation:.0%} of the live learners in the average merge")
        others = 6 + len(chronicle.nodes) + _fragment_rows(chronicle)
        room = max(4, self._console.size.height - others - 1)
        notes = [_note(at_s, text) for at_s, text in list(self._notes)[-room:]]
        width = self._console.size.width
        if self._explains:
            notes = [Text(line) for text in EXPLAINED for line in folded(text, width)]
        parts: list[RenderableType] = [
            first,
            Text(),
            _nodes(chronicle, width),
            Text(),
            _fragments(chronicle, width),
            Text(),
        ]
        return Group(*parts, *notes)


def _note(at_s: float, text: str) -> Text:
    style = "bold red" if "kill -9" in text else "green" if "goes on" in text or "caught up" in text else ""
    return Text.assemble((f"{at_s:6.1f} s  ", "dim"), (text, style))


def _line(chronicle: Chronicle, elapsed_s: float) -> str:
    measured = [f"held-out {loss_text(loss)}" for _, loss in chronicle.heldout_losses()[-1:]]
    nodes = [f"{n.name} {_step(n)}" for n in chronicle.nodes.values()]
    return "  ".join([f"{elapsed_s:6.1f} s", *measured, f"{chronicle.updates()} outer updates", *nodes])


def _step(node: NodeTrace) -> str:
    if node.state != "training" or node.last is None:
        return node.state
    return f"step {node.last.inner_step} loss {loss_text(node.last.loss)}"


def _nodes(chronicle: Chronicle, width: int) -> Table:
    """A row for every node. Where they do not all fit, columns are left out, and none is cut."""
    headings = ("node", "state", ">step", ">loss", "loss so far", ">held-out", ">tokens/s", "syncer of")
    rows: list[list[Text]] = []
    for node in chronicle.nodes.values():
        losses = [line.loss for line in node.progress if line.loss is not None]
        thinned = losses[:: max(1, len(losses) // CURVE_CELLS)]
        last = node.last
        speed = last.tokens_per_s if last and node.state == "training" else None
        rows.append(
            [
                Text(clean(node.name), style="bold"),
                Text(node.state, style=STATE_STYLES.get(node.state, "")),
                Text(str(node.inner_step)),
                Text(loss_text(last.loss if last else None)),
                Text(sparkline(thinned, CURVE_CELLS), style="cyan"),
                Text(loss_text(node.evaluations[-1].loss if node.evaluations else None)),
                Text(count(speed)),
                Text(ranges(chronicle.offices_of(node.name))),
            ]
        )
    return _fitting(headings, rows, LEFT_OUT, width)


def _fitting(headings: Sequence[str], rows: list[list[Text]], left_out: Sequence[int], width: int) -> Table:
    """Make a table without so many of the columns `left_out`, in this order, that the others fit."""
    wide = [
        max([len(heading.lstrip(">")), *(row[index].cell_len for row in rows)]) + GAP_CELLS
        for index, heading in enumerate(headings)
    ]
    kept = list(range(len(headings)))
    for index in left_out:
        if sum(wide[column] for column in kept) <= width:
            break
        kept.remove(index)
    table = _table(*(headings[index] for index in kept))
    for row in rows:
        table.add_row(*(row[index] for index in kept))
    return table


def _fragments(chronicle: Chronicle, width: int) -> Table:
    """Two fragments a line: version, syncer, and how many took part in the newest merge."""
    headings = [">fragment", ">version", "syncer", "newest merge"] * 2
    rows: list[list[Text]] = []
    half = (chronicle.fragments + 1) // 2
    for index in range(_fragment_rows(chronicle)):
        cells: list[Text] = []
        for fragment in (index, index + half):
            if fragment < chronicle.fragments:
                cells += _fragment(chronicle, fragment)
        rows.append(cells + [Text()] * (len(headings) - len(cells)))
    return _fitting(headings, rows, (3, 7), width)


def _fragment_rows(chronicle: Chronicle) -> int:
    return min((chronicle.fragments + 1) // 2, 12)


def _fragment(chronicle: Chronicle, fragment: int) -> list[Text]:
    syncer = chronicle.syncer(fragment) or "-"
    merge = next((line for line in reversed(chronicle.merges) if line.fragment == fragment), None)
    dead = syncer in chronicle.nodes and chronicle.nodes[syncer].state == "killed"
    return [
        Text(str(fragment)),
        Text(str(chronicle.newest(fragment))),
        Text(f"{syncer} (killed)" if dead else syncer, style="bold red" if dead else ""),
        Text(f"{merge.contributors} of {merge.live}" if merge else "-"),
    ]


def _table(*headings: str) -> Table:
    """A heading that starts with ">" is of a column of numbers."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, GAP_CELLS, 0, 0))
    for heading in headings:
        table.add_column(heading.lstrip(">"), justify="right" if heading[0] == ">" else "left", no_wrap=True)
    return table


def render_summary(
    summary: DemoSummary, kill: Kill | None, files: Sequence[str], unit: str
) -> RenderableType:
    """Render the end of the demo. `unit`: of losses."""
    rows = Table(box=None, pad_edge=False, show_header=False, padding=(0, 3, 0, 0))
    rows.add_column(style="dim", no_wrap=True)
    rows.add_column()
    fell = Text(f"{summary.loss_before:.3f} → {summary.loss_after:.3f} {unit}", style="bold")
    rows.add_row("held-out loss", fell)
    nodes = "one node" if summary.nodes == 1 else f"{summary.nodes} nodes"
    rows.add_row(
        "trained",
        f"{summary.inner_steps} inner steps, {count(summary.tokens)} tokens, "
        f"{summary.outer_updates} outer updates by {nodes} in {duration(summary.seconds)}",
    )
    if summary.participation is not None:
        rows.add_row(
            "participation", f"{summary.participation:.1%} of the live learners in the average merge"
        )
    who = "a survivor" if kill else "a node"
    if summary.median_inner_step_s is not None:
        rows.add_row(
            "longest pause",
            f"{duration(summary.longest_pause_s)} between two inner steps of {who} "
            f"(median inner step {duration(summary.median_inner_step_s)}); "
            f"{duration(summary.longest_aside_s)} for a measurement or a checkpoint",
        )
    if kill is not None:
        rows.add_row("killed", _recovery(kill))
    agree = f"yes: {summary.versions_compared} versions compared, and the bytes of all final states checked"
    if summary.nodes == 1:
        agree = (
            "the bytes of the final state are those that its digests say (one node: nobody to compare with)"
        )
    rows.add_row("digests agree", Text(agree) if summary.digests_agree else Text("NO", style="bold red"))
    for file in files:
        rows.add_row("written", file)
    parts: list[RenderableType] = [Text(), rows]
    if summary.sample:
        written = Text(summary.sample.rstrip(), style="cyan")
        parts += [Text(), Text("what the model writes by now:", style="dim"), written]
    parts += [Text(f"\nFAILED: {failure}", style="bold red") for failure in summary.failures]
    return Group(*parts, Text())


def _recovery(kill: Kill) -> str:
    words = f"{kill.node}, the syncer of fragments {ranges(kill.fragments)}"
    if kill.resumed_s:
        times = sorted(kill.resumed_s.values())
        words += f": their next versions came after {duration(times[0])}"
        words += f" to {duration(times[-1])}" if len(times) > 1 else ""
    if kill.back_s is not None:
        words += f"; restarted, it trained again after {duration(kill.back_s)}"
    return words
