"""`p2pdiloco chaos`: real processes under a seeded schedule of faults, and what the swarm made of it.

What it shows is what happens when the same commands run on machines that fail (docs/lab/chaos.md).
"""

from __future__ import annotations

import os
import threading
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape

from p2pdiloco.adapters.data_dir import try_folder
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.presets import for_bytes, for_run, without_end
from p2pdiloco.demo.demo import Interrupted, demo_folder, write_file
from p2pdiloco.demo.guard import stop_signals
from p2pdiloco.demo.judge import loss_unit
from p2pdiloco.demo.swarm import DemoFailed
from p2pdiloco.errors import StorageError
from p2pdiloco_lab.chaos import chaos_verdict, scenarios
from p2pdiloco_lab.chaos.chaos_run import (
    EXIT_VERDICT,
    ChaosCourse,
    ChaosOutcome,
    ChaosRun,
    FaultLine,
    line_of,
    paced,
)
from p2pdiloco_lab.chaos.chaos_settings import ChaosSettings
from p2pdiloco_lab.namespaces import Links, LinksRefused

EXIT_INTERRUPTED = 130
TOLD = 3


def run(settings: ChaosSettings) -> int:
    """Run it. Exit status: 0 well; 1 somebody was stuck, digests differ, or a process ended by itself.

    Raises:
        UserError: a preset or the folder cannot be used.
    """
    try_folder(settings.out, "--out")
    manifest = without_end(for_bytes(for_run(settings.preset, "chaos", settings.seed)))
    try:
        settings.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{settings.out}: cannot be used: {error.strerror}") from error
    console = Console(stderr=True)
    keep = settings.out / "nodes" if settings.keep else None
    with stop_signals() as stop, demo_folder(keep) as folder:
        try:
            if settings.scenario != "none":
                return scenarios.run(settings, manifest, folder, console, stop)
            return Chaos(settings, manifest, folder, console, stop).run()
        except Interrupted:
            console.print("\ninterrupted: everything is ended")
            return EXIT_INTERRUPTED
        except (DemoFailed, LinksRefused) as failure:
            console.print(f"\nFAILED: {failure}", style="bold red", markup=False)
            return EXIT_VERDICT


class Chaos:
    """Two runs, with and without faults, and the report."""

    def __init__(
        self,
        settings: ChaosSettings,
        manifest: Manifest,
        folder: Path,
        console: Console,
        stop: threading.Event,
    ) -> None:
        self._settings = settings
        self._seconds = settings.seconds or 60 * settings.minutes
        self._manifest, self._step_s = paced(manifest, self._seconds, settings.nodes, settings.load)
        self._folder = folder
        self._console = console
        self._stop = stop

    def run(self) -> int:
        """Everything. Raises: Interrupted, DemoFailed, LinksRefused, UserError."""
        settings = self._settings
        links = settings.netns and self._links_work()
        faults = chaos_verdict.draw(
            settings.seed,
            settings.nodes,
            self._manifest.sync.fragments,
            self._seconds,
            settings.faults_per_hour,
            links,
        )
        free = None
        if settings.compare:
            free_s = 60 * settings.compare_minutes or self._seconds
            self._say(f"first without faults, {free_s:.0f} s, to compare with")
            free = self._play("without", (), links, free_s)
        self._say(f"now with {len(faults)} faults in {self._seconds:.0f} s, seed {settings.seed}")
        faulty = self._play("with", faults, links, self._seconds)
        report = self._report(faulty, free)
        self._write(report, faulty, free)
        return EXIT_VERDICT if report.failures else 0

    def _links_work(self) -> bool:
        try:
            links = Links()
            try:
                links.add("probe")  # some containers allow a bridge and no namespace
            finally:
                links.close()
        except LinksRefused as error:
            self._say(f"links stay as they are: {error}")
            return False
        return True

    def _play(
        self, name: str, faults: tuple[chaos_verdict.Fault, ...], links: bool, seconds: float
    ) -> ChaosOutcome:
        tape = self._settings.out / ("faults.jsonl" if faults else "faults-none.jsonl")
        lines: list[bytes] = []

        def note(taped: FaultLine) -> None:
            lines.append(line_of(taped))
            write_file(tape, b"".join(lines))

        if faults:
            write_file(tape, b"")
        made = Links() if links else None
        try:
            course = ChaosCourse(
                manifest=self._manifest,
                nodes=self._settings.nodes,
                seconds=seconds,
                faults=faults,
                min_step_s=self._step_s,
                temporary=not self._settings.keep,
            )
            return ChaosRun(course, self._folder / name, made, self._say, note, self._stop).play()
        finally:
            if made is not None:
                made.close()

    def _report(self, faulty: ChaosOutcome, free: ChaosOutcome | None) -> chaos_verdict.ChaosReport:
        figures = chaos_verdict.figures(faulty.facts)
        comparison = chaos_verdict.compare(faulty.facts, free.facts) if free else None
        failures = [*faulty.unexpected, *first_of(faulty.disagreements), *faulty.stuck]
        failures += [f"{name} was started again and nothing of it was merged" for name in figures.never_back]
        if figures.never_resumed:
            failures.append(f"{figures.never_resumed} times a fragment stood still after its syncer's death")
        if free is not None:
            found = [*free.unexpected, *first_of(free.disagreements), *free.stuck]
            failures += [f"without faults: {words}" for words in found]
        return chaos_verdict.ChaosReport(
            nodes=self._settings.nodes,
            preset=self._settings.preset,
            seed=self._settings.seed,
            load=self._settings.load,
            min_step_s=round(self._step_s, 4),
            seconds=figures.seconds,
            faults=faulty.struck,
            skipped=faulty.skipped,
            faults_per_hour=3600 * faulty.struck / figures.seconds,
            faulty=figures,
            fault_free=chaos_verdict.figures(free.facts) if free else None,
            comparison=comparison,
            settled_s=faulty.settled_s,
            digests_agree=not faulty.disagreements,
            failures=tuple(failures),
            goals=chaos_verdict.goals(figures, comparison),
        )

    def _write(
        self, report: chaos_verdict.ChaosReport, faulty: ChaosOutcome, free: ChaosOutcome | None
    ) -> None:
        out, settings = self._settings.out, self._settings
        data = msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n"
        write_file(out / "report.json", data)
        title = f"p2pdiloco chaos: {settings.nodes} nodes, {report.faults_per_hour:.0f} faults an hour"
        unit = loss_unit(self._manifest.run.task)
        chaos_verdict.draw_run(out / "chaos.png", faulty.facts, free.facts if free else None, title, unit)
        stdout = Console(soft_wrap=not os.isatty(1))
        if settings.json:
            stdout.print(data.decode(), markup=False, highlight=False, end="")
        else:
            stdout.print(chaos_verdict.table(report))
            stdout.print(f"written: report.json, faults.jsonl, chaos.png in {out}/", markup=False)

    def _say(self, words: str) -> None:
        self._console.print(escape(words), highlight=False)


def first_of(disagreements: list[str]) -> list[str]:
    """Two branches differ in every version: a few say it all."""
    more = [f"and {len(disagreements) - TOLD} more of the kind"] if len(disagreements) > TOLD else []
    return disagreements[:TOLD] + more
