"""`p2pdiloco chaos --scenario`: one fixed course of events with real processes, and its verdict.

survivor: all nodes but one are killed at once, later all are started again. split: the network falls into two
parts, later it is whole again. As in a chaos run, no node is told anything and nothing is repaired.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.demo.demo import write
from p2pdiloco.demo.judge import loss_unit, paced
from p2pdiloco.demo.swarm import SwarmNode
from p2pdiloco.errors import UserError
from p2pdiloco_lab.chaos import plot as chaos_plot
from p2pdiloco_lab.chaos.chaos_settings import ChaosSettings
from p2pdiloco_lab.chaos.plan import Fault
from p2pdiloco_lab.chaos.run import EXIT_VERDICT, ChaosRun, Course, Outcome, Taped, line_of
from p2pdiloco_lab.chaos.scenarios import story as chaos_story
from p2pdiloco_lab.chaos.scenarios.outcome import Healed, Survived, healed, survived
from p2pdiloco_lab.links.namespaces import Links, LinksRefused

BEFORE_S = 20.0
"""Training before anything happens, unless --seconds says otherwise."""
ALONE_LIMIT_S = 60.0
"""Time in which the survivor must have gone on with every fragment."""
ALONE_S = 15.0
"""Least time that the survivor is alone."""
AFTER_LIMIT_S = 150.0
"""Time in which all must be one swarm again. Generous: the report says how long it took."""


class ScenarioRun(ChaosRun):
    """A swarm that trains, what happens to it, and the wait until it is one again."""

    def __init__(
        self,
        settings: ChaosSettings,
        manifest: Manifest,
        min_step_s: float,
        folder: Path,
        links: Links | None,
        tell: Callable[[str], None],
        tape: Callable[[Taped], None],
        stop: threading.Event,
    ) -> None:
        """Raises: StorageError, LinksRefused."""
        course = Course(
            manifest=manifest,
            nodes=settings.nodes,
            seconds=settings.seconds,
            min_step_s=min_step_s,
            temporary=not settings.keep,
        )
        super().__init__(course, folder, links, tell, tape, stop)
        self._settings = settings
        self._scenario_links = links

    def _train(self) -> None:
        self.facts.began_s = time.monotonic()
        self._until(lambda: False, self._settings.seconds)
        self._happen()
        self.facts.ended_s = time.monotonic()

    def _settle(self) -> tuple[float | None, list[str]]:
        """Wait for nothing: `_happen` has waited. (None, nothing)"""
        return None, []

    @abstractmethod
    def _happen(self) -> None:
        """Let it happen, and wait until all are one swarm again or the time for that is over."""

    @abstractmethod
    def verdict(self, outcome: Outcome) -> Survived | Healed:
        """After `play`."""

    def _until(self, reached: Callable[[], bool], limit_s: float) -> None:
        """Watch on until then, at most so long."""
        until = time.monotonic() + limit_s
        while not reached() and time.monotonic() < until:
            self._tick()

    def _one_swarm(self, since_s: float) -> bool:
        """Tell whether work of all is merged, and all held one version made since, of every fragment."""
        nodes = [node.name for node in self._nodes()]
        if chaos_story.equal_at(self.facts.log, nodes, since_s) is None:
            return False
        return not self._watch.not_back(self._nodes())


class SurvivorRun(ScenarioRun):
    """Run in which all nodes but one are killed with -9."""

    def _happen(self) -> None:
        nodes = self._nodes()
        self._survivor = nodes[self._settings.seed % len(nodes)]
        self._killed_s = self._back_at_s = time.monotonic()
        others = self._others()
        for node in others:
            node.remember_family()
        self._killed_s = time.monotonic()
        for node in others:
            node.signal(signal.SIGKILL)
        self._due = [Fault(self._settings.seconds, "kill-daemon", i, 0.0) for i in range(len(others))]
        for index, node in enumerate(others):
            strike = self._striker.strike(index, self._due[0], node)
            if strike is not None:
                self._carried_out(strike)

        def went_on() -> bool:
            now, log = time.monotonic(), self.facts.log
            first = chaos_story.first_rounds(log, (self._survivor.name,), self._killed_s, now)
            return len(first) == log.fragments and now - self._killed_s > ALONE_S

        self._until(went_on, ALONE_LIMIT_S)
        self._back_at_s = time.monotonic()
        self._mend(all_of_them=True)
        self._until(lambda: self._one_swarm(self._back_at_s), AFTER_LIMIT_S)

    def _others(self) -> list[SwarmNode]:
        return [node for node in self._nodes() if node is not self._survivor]

    def verdict(self, outcome: Outcome) -> Survived:
        """Judge the run (`outcome.survived`)."""
        return survived(
            self.facts,
            self._survivor.name,
            self._killed_s,
            self._back_at_s,
            [node.name for node in self._others()],
            [*outcome.unexpected, *outcome.disagreements],
            not outcome.disagreements,
        )


class SplitRun(ScenarioRun):
    """Two parts of the network do not hear each other for a while; the bootstrap is in the larger one."""

    def _happen(self) -> None:
        settings, links = self._settings, self._scenario_links
        assert links is not None  # `run` makes them for this scenario
        self._sides = chaos_story.split_of([node.name for node in self._nodes()], settings.seed)
        smaller = self._sides[1]
        cut = Fault(settings.seconds, "cut-link", 0, settings.split_seconds)
        links.split(smaller)
        self._split_s = time.monotonic()
        for index, name in enumerate(smaller):
            self._striker.act(name, "cut", self._split_s)
            self._note(index, "struck", cut, name, f"cut from {len(self._sides[0])} others and the bootstrap")
        self._until(lambda: False, settings.split_seconds)
        links.heal(smaller)
        self._healed_s = time.monotonic()
        for index, name in enumerate(smaller):
            self._striker.act(name, "resumed", self._healed_s)
            self._note(index, "mended", cut, name, "the network is whole again")
        self._until(self._nothing_lost, AFTER_LIMIT_S)

    def _nothing_lost(self) -> bool:
        again = chaos_story.last_resent(self.facts.log)
        done = all(chaos_story.merged_again(self.facts.log, one) is not None for one in again)
        return done and self._one_swarm(self._healed_s)

    def verdict(self, outcome: Outcome) -> Healed:
        """Judge the run (`outcome.healed`)."""
        return healed(
            self.facts,
            self._sides,
            self._split_s,
            self._healed_s,
            [*outcome.unexpected, *outcome.disagreements],
            not outcome.disagreements,
        )


def run(
    settings: ChaosSettings, manifest: Manifest, folder: Path, console: Console, stop: threading.Event
) -> int:
    """Play the scenario, write and show its report. Exit status: 0 as promised; 1 not.

    Raises:
        UserError: too few nodes, or no permission for network namespaces.
        Interrupted, DemoFailed, LinksRefused, StorageError: as a chaos run.
    """
    settings = msgspec.structs.replace(settings, seconds=settings.seconds or BEFORE_S)
    split = settings.scenario == "split"
    if split and settings.nodes < 3:
        raise UserError("a split needs at least 3 nodes", "give --nodes 8")
    whole_s = settings.seconds + (settings.split_seconds if split else ALONE_S) + BEFORE_S
    links = _links() if split else None
    lines: list[bytes] = []

    def tape(taped: Taped) -> None:
        lines.append(line_of(taped))
        write(settings.out / "faults.jsonl", b"".join(lines))

    def tell(words: str) -> None:
        console.print(escape(words), highlight=False)

    try:
        manifest, step_s = paced(manifest, whole_s, settings.nodes, settings.load)
        kind = SplitRun if split else SurvivorRun
        play = kind(settings, manifest, step_s, folder / settings.scenario, links, tell, tape, stop)
        verdict = msgspec.structs.replace(play.verdict(play.play()), min_step_s=round(step_s, 4))
    finally:
        if links is not None:
            links.close()
    _show(settings, play, verdict, loss_unit(manifest.run.task))
    return EXIT_VERDICT if verdict.failures else 0


def _links() -> Links:
    try:
        return Links()
    except LinksRefused as error:
        raise UserError(
            f"a split needs network namespaces, which this system refuses: {error}",
            "run it as root on Linux with the programs ip and tc",
        ) from error


def _show(settings: ChaosSettings, play: ScenarioRun, verdict: Survived | Healed, unit: str) -> None:
    out = settings.out
    data = msgspec.json.format(msgspec.json.encode(verdict), indent=2) + b"\n"
    write(out / "report.json", data)
    title = f"p2pdiloco chaos --scenario {settings.scenario}: {settings.nodes} nodes"
    chaos_plot.draw(out / "chaos.png", play.facts, None, title, unit)
    stdout = Console(soft_wrap=not os.isatty(1))
    if settings.json:
        stdout.print(data.decode(), markup=False, highlight=False, end="")
        return
    shown = Table(show_header=False, box=None)
    for name, value in rows(verdict):
        shown.add_row(name, escape(value))
    stdout.print(shown)
    stdout.print(f"written: report.json, faults.jsonl, chaos.png in {out}/", markup=False)


def rows(verdict: Survived | Healed) -> list[tuple[str, str]]:
    """The report for people."""
    if isinstance(verdict, Survived):
        found = [
            (f"{verdict.nodes - 1} of {verdict.nodes} killed, left", verdict.survivor),
            ("its next version", _after(verdict.next_version_s)),
            ("  of every fragment", _after(verdict.all_fragments_s)),
            ("versions made alone", str(verdict.versions_alone)),
            ("last of the returned merged again", _after(verdict.last_back_s)),
            ("all equal after the relaunch", _after(verdict.equal_s)),
        ]
    else:
        found = [("split for", f"{verdict.split_s:.1f} s")]
        for side in verdict.sides:
            found += [
                (f"{len(side.nodes)} nodes: versions", str(sum(side.versions.values()))),
                ("  every fragment", _after(side.first_version_s)),
                ("  tokens trained / merged", f"{side.tokens_trained:,} / {side.tokens_merged:,}"),
            ]
        found += [
            ("equal heads after healing", _after(verdict.equal_s)),
            ("contributions sent again", f"{verdict.sent_again}, {verdict.tokens_sent_again:,} tokens"),
            ("  merged again", _after(verdict.merged_again_s)),
            ("given up", str(len(verdict.given_up))),
            ("whole run, trained / merged", f"{verdict.tokens_trained:,} / {verdict.tokens_merged:,}"),
        ]
    found.append(("digests agree", "yes" if verdict.digests_agree else "NO"))
    return found + [("FAILED", words) for words in verdict.failures]


def _after(seconds: float | None) -> str:
    return "never" if seconds is None else f"after {seconds:.1f} s"
