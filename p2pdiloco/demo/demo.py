"""`p2pdiloco demo`: a bootstrap and nodes as real processes on this machine; a syncer is killed on the way.

The demo only starts programs, reads their event logs, and sends signals: what it shows is what the same
commands do when people type them on different machines.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from importlib.util import find_spec
from pathlib import Path

import msgspec
from rich.console import Console

from p2pdiloco.adapters.data_dir import try_file
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.presets import for_bytes, for_run, with_schedule, without_end
from p2pdiloco.config.settings import DemoSettings
from p2pdiloco.demo import plot as demo_plot
from p2pdiloco.demo import verdict
from p2pdiloco.demo.chronicle import Chronicle
from p2pdiloco.demo.command import Interrupted, demo_folder, stop_signals, write
from p2pdiloco.demo.event_log import Tail
from p2pdiloco.demo.holdings import conflicts, of_traces
from p2pdiloco.demo.judge import Judge, loss_unit, read_saved, schedule_steps
from p2pdiloco.demo.swarm import DemoFailed, Swarm
from p2pdiloco.demo.verdict import DemoSummary, Kill
from p2pdiloco.demo.view import Screen, render_summary, words_of
from p2pdiloco.errors import UserError, install_hint
from p2pdiloco.tasks.registry import render_toml

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


class Demo:
    """One demo from headline to summary."""

    def __init__(
        self,
        settings: DemoSettings,
        manifest: Manifest,
        folder: Path,
        plot: Path | None,
        console: Console,
        stop: threading.Event,
    ) -> None:
        self._settings = settings
        self._manifest = manifest
        self._folder = folder
        self._plot = plot
        self._stop = stop
        self._wants_kill = settings.kill and settings.nodes > 1
        self._screen = Screen(console, _headline(settings, manifest.run.task, self._wants_kill))
        self._kills: list[Kill] = []
        self._restarted_s: float | None = None
        self._told: set[int] = set()

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
        """run.toml with a schedule that fits this machine, and the loss of version 0."""
        settings, manifest = self._settings, self._manifest
        judge = Judge(manifest)
        loss_before = judge.loss_at_version_0()
        step_time_s = judge.step_time_s()
        steps = schedule_steps(step_time_s, settings.seconds, settings.nodes)
        self._manifest = with_schedule(manifest, steps, settings.nodes)
        (self._folder / "run.toml").write_text(render_toml(self._manifest), encoding="utf-8")
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
        while time.monotonic() < end_s or (self._recovering() and time.monotonic() < end_s + RECOVERY_S):
            elapsed_s = time.monotonic() - began_s
            if self._wants_kill and not self._kills and elapsed_s >= KILL_AT * settings.seconds:
                self._kill()
            if self._kills and self._restarted_s is None:
                self._perhaps_restart()
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
            self._swarm.watch(self._kills[-1].node if self._kills and self._restarted_s is None else "")
        self._screen.show(self._chronicle, phase)
        self._pause(TICK_S)

    def _pause(self, seconds: float) -> None:
        if self._stop.wait(seconds) or self._screen.is_left:
            raise Interrupted

    def _read(self) -> None:
        for tail in self._tails:
            for line in tail.lines():
                self._chronicle.feed(line)
                if words := words_of(line, self._chronicle.nodes[line.node]):
                    self._screen.note(words)
        for kill in self._kills:
            self._follow(kill)

    # --- the kill ----------------------------------------------------------------------------------------

    def _kill(self) -> None:
        self._read()  # the very latest offices
        chronicle = self._chronicle
        name = verdict.choose_victim(chronicle, [n.name for n in self._swarm.nodes if n.alive])
        if not name:
            return
        at_s = self._swarm.node(name).kill()
        self._read()  # the last lines of before, its own among them
        fragments = chronicle.offices_of(name, at_s)
        chronicle.nodes[name].started("killed")
        self._kills.append(Kill(name, at_s, tuple(fragments), {}, None))
        listed = ", ".join(map(str, fragments))
        self._screen.note(f"kill -9 {name}, which is the syncer of fragments {listed}")

    def _perhaps_restart(self) -> None:
        kill = self._kills[-1]
        if time.monotonic() - kill.at_s >= min(RESTART_AFTER_S, RESTART_AFTER * self._settings.seconds):
            self._restarted_s = time.monotonic()
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
        if kill.back_s is None and trains_s is not None and self._restarted_s is not None:
            back_s = trains_s - self._restarted_s
            self._kills[self._kills.index(kill)] = msgspec.structs.replace(kill, back_s=back_s)
            self._screen.note(f"{kill.node} has caught up, {back_s:.1f} s after its restart")

    def _recovering(self) -> bool:
        return any(k.back_s is None or len(k.resumed_s) < len(k.fragments) for k in self._kills)

    # --- after -------------------------------------------------------------------------------------------

    def _judge(self, judge: Judge, loss_before: float, began_s: float, ended_s: float) -> DemoSummary:
        chronicle, manifest = self._chronicle, self._manifest
        saved = [read_saved(manifest, n.name, n.data_dir) for n in self._swarm.nodes]
        logged, in_logs = conflicts(of_traces(chronicle.nodes.values()))
        on_disk, _ = conflicts([s.holdings for s in saved])
        wrong = [
            f"{s.holdings.name} saved other bytes of fragment {f} than its version"
            for s in saved
            for f in s.unsound
        ]
        disagreements = wrong + chronicle.wrong_digests() + on_disk + logged
        newest = max(saved, key=lambda s: sum(max(chain) for chain in s.holdings.versions.values()))
        loss_after = judge.loss_of(newest.vault)
        killed = {kill.node for kill in self._kills}
        survivors = [trace for trace in chronicle.nodes.values() if trace.name not in killed]
        pauses = verdict.pauses(survivors, began_s, ended_s)
        resumed = {str(f): round(s, 3) for kill in self._kills for f, s in sorted(kill.resumed_s.items())}
        backs = [kill.back_s for kill in self._kills if kill.back_s is not None]
        return DemoSummary(
            preset=self._settings.preset,
            nodes=self._settings.nodes,
            seconds=round(ended_s - began_s, 3),
            loss_before=loss_before,
            loss_after=loss_after,
            outer_updates=chronicle.updates(),
            inner_steps=sum(trace.inner_step for trace in chronicle.nodes.values()),
            tokens=sum(trace.last.tokens_total for trace in chronicle.nodes.values() if trace.last),
            kills=len(self._kills),
            participation=chronicle.participation(),
            longest_pause_s=pauses.longest_s if pauses else None,
            longest_aside_s=pauses.longest_aside_s if pauses else None,
            median_inner_step_s=pauses.median_step_s if pauses else None,
            t_resume_s=max(resumed.values(), default=None),
            t_resume_by_fragment_s=resumed,
            t_back_s=statistics.median(backs) if backs else None,
            digests_agree=not disagreements,
            versions_compared=in_logs,
            forks=len(chronicle.forks),
            refusals=dict(chronicle.refusals),
            failures=verdict.failures(loss_before, loss_after, disagreements, self._kills, self._wants_kill),
            sample=judge.sample(newest.vault),
        )

    def _conclude(self, summary: DemoSummary, began_s: float) -> None:
        settings = self._settings
        files = [str(self._plot)] if self._plot is not None else []
        restarts = [self._restarted_s] if self._restarted_s is not None else []
        losses = (summary.loss_before, summary.loss_after)
        title = f"p2pdiloco demo: {settings.nodes} nodes, preset {settings.preset}"
        unit = loss_unit(self._manifest.run.task)
        if self._plot is not None:
            demo_plot.draw(self._plot, self._chronicle, began_s, self._kills, restarts, losses, title, unit)
        if settings.report is not None:
            write(settings.report, msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
            files.append(str(settings.report))
        if settings.keep is not None:
            files.append(f"{settings.keep}/ (logs, events.jsonl and checkpoints of every process)")
        Console(soft_wrap=not os.isatty(1)).print(render_summary(summary, self._kills, files, unit))


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
