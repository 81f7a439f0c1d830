"""`p2pdiloco chaos --scenario`: one fixed course of events with real processes, and its verdict.

survivor: all nodes but one are killed at once, later all are started again. split: the network falls into two
parts, later it is whole again. As in a chaos run, no node is told anything and nothing is repaired. The
verdicts (`survived`, `healed`) are pure: they ask a chronicle, whose times are seconds of the machine's
monotonic clock.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from math import inf
from pathlib import Path

import msgspec
from msgspec import Struct
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.demo.demo import write_file
from p2pdiloco.demo.judge import loss_unit
from p2pdiloco.demo.swarm import Chronicle, Line, SwarmNode
from p2pdiloco.errors import UserError
from p2pdiloco_lab.chaos import chaos_verdict
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
from p2pdiloco_lab.chaos.chaos_verdict import Facts, Fault
from p2pdiloco_lab.namespaces import Links, LinksRefused

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
        tape: Callable[[FaultLine], None],
        stop: threading.Event,
    ) -> None:
        """Raises: StorageError, LinksRefused."""
        course = ChaosCourse(
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
    def verdict(self, outcome: ChaosOutcome) -> SurvivorReport | SplitReport:
        """After `play`."""

    def _until(self, reached: Callable[[], bool], limit_s: float) -> None:
        """Watch on until then, at most so long."""
        until = time.monotonic() + limit_s
        while not reached() and time.monotonic() < until:
            self._tick()

    def _one_swarm(self, since_s: float) -> bool:
        """Tell whether work of all is merged, and all held one version made since, of every fragment."""
        nodes = [node.name for node in self._nodes()]
        if equal_at(self.facts.log, nodes, since_s) is None:
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
            first = first_rounds(log, (self._survivor.name,), self._killed_s, now)
            return len(first) == log.fragments and now - self._killed_s > ALONE_S

        self._until(went_on, ALONE_LIMIT_S)
        self._back_at_s = time.monotonic()
        self._mend(all_of_them=True)
        self._until(lambda: self._one_swarm(self._back_at_s), AFTER_LIMIT_S)

    def _others(self) -> list[SwarmNode]:
        return [node for node in self._nodes() if node is not self._survivor]

    def verdict(self, outcome: ChaosOutcome) -> SurvivorReport:
        """Judge the run (`survived`)."""
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
        self._sides = split_of([node.name for node in self._nodes()], settings.seed)
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
        again = last_resent(self.facts.log)
        done = all(merged_again(self.facts.log, one) is not None for one in again)
        return done and self._one_swarm(self._healed_s)

    def verdict(self, outcome: ChaosOutcome) -> SplitReport:
        """Judge the run (`healed`)."""
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

    def tape(taped: FaultLine) -> None:
        lines.append(line_of(taped))
        write_file(settings.out / "faults.jsonl", b"".join(lines))

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


def _show(
    settings: ChaosSettings, play: ScenarioRun, verdict: SurvivorReport | SplitReport, unit: str
) -> None:
    out = settings.out
    data = msgspec.json.format(msgspec.json.encode(verdict), indent=2) + b"\n"
    write_file(out / "report.json", data)
    title = f"p2pdiloco chaos --scenario {settings.scenario}: {settings.nodes} nodes"
    chaos_verdict.draw_run(out / "chaos.png", play.facts, None, title, unit)
    stdout = Console(soft_wrap=not os.isatty(1))
    if settings.json:
        stdout.print(data.decode(), markup=False, highlight=False, end="")
        return
    shown = Table(show_header=False, box=None)
    for name, value in report_rows(verdict):
        shown.add_row(name, escape(value))
    stdout.print(shown)
    stdout.print(f"written: report.json, faults.jsonl, chaos.png in {out}/", markup=False)


def report_rows(verdict: SurvivorReport | SplitReport) -> list[tuple[str, str]]:
    """The report for people."""
    if isinstance(verdict, SurvivorReport):
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


# Verdicts.


class SurvivorReport(Struct, kw_only=True, frozen=True):
    """report.json of `survivor`. Durations in seconds; what did not happen is null."""

    scenario: str = "survivor"
    nodes: int
    min_step_s: float = 0.0
    """Least time of an inner step; 0: as short as may be."""
    survivor: str
    next_version_s: float | None
    """Time from the kill to the first version of any fragment whose round the survivor closed after it."""
    all_fragments_s: float | None
    """Time from the kill to such a version of the slowest fragment."""
    versions_alone: int
    """Versions that the survivor made until the others were started again."""
    tokens_alone: int
    """Tokens by which the survivor's chain grew in that time; the least fragment."""
    back_s: dict[str, float]
    """Node -> from its relaunch (process start included) to the first merge of its work."""
    last_back_s: float | None
    equal_s: float | None
    """Time from the relaunch until all held one and the same new version of every fragment."""
    digests_agree: bool
    failures: tuple[str, ...]


class SplitSide(Struct, kw_only=True, frozen=True):
    """One side of a split, while it lasted."""

    nodes: tuple[str, ...]
    versions: dict[int, int]
    """Fragment -> how many were made."""
    first_version_s: float | None
    """Time from the split until every fragment had a version whose round was closed after it."""
    tokens_trained: int
    tokens_merged: int
    """Tokens by which the side's chain grew; the least fragment."""


class SplitReport(Struct, kw_only=True, frozen=True):
    """report.json of `split`. Durations in seconds; what did not happen is null."""

    scenario: str = "split"
    nodes: int
    min_step_s: float = 0.0
    """Least time of an inner step; 0: as short as may be."""
    split_s: float
    sides: tuple[SplitSide, SplitSide]
    equal_s: float | None
    """Time from the healing until all held one and the same version of every fragment, made after it."""
    sent_again: int
    """Merged contributions whose chain lost the fork: each is counted once."""
    tokens_sent_again: int
    merged_again_s: float | None
    """Time from the healing until the last of them was in everybody's chain; null also if there were none."""
    not_merged_again: tuple[str, ...]
    given_up: tuple[str, ...]
    tokens_trained: int
    """Tokens that all nodes trained in the whole run."""
    tokens_merged: int
    """Tokens merged of the fragment that has the least."""
    digests_agree: bool
    failures: tuple[str, ...]


def side_of(facts: Facts, nodes: tuple[str, ...], since_s: float, until_s: float) -> SplitSide:
    """Sum up one side between the split and the healing."""
    log = facts.log
    fragments = range(log.fragments)
    first = first_rounds(log, nodes, since_s, until_s)
    versions = dict.fromkeys(fragments, 0)
    for made in log.published:
        if made.node in nodes and since_s < made.mono <= until_s:
            versions[made.fragment] += 1
    grown = [chain_tokens(log, nodes, f, until_s) - chain_tokens(log, nodes, f, since_s) for f in fragments]
    whole = len(first) == log.fragments
    return SplitSide(
        nodes=nodes,
        versions=versions,
        first_version_s=round(max(first.values()) - since_s, 3) if whole else None,
        tokens_trained=sum(trained(log.nodes[node].progress, since_s, until_s) for node in nodes),
        tokens_merged=min(grown),
    )


def survived(
    facts: Facts,
    survivor: str,
    killed_s: float,
    back_at_s: float,
    others: Sequence[str],
    wrong: Sequence[str],
    agree: bool,
) -> SurvivorReport:
    """The verdict on `survivor`: it was alone from `killed_s` to `back_at_s`. `wrong`: what else failed."""
    log = facts.log
    first = first_rounds(log, (survivor,), killed_s, back_at_s)
    made = [v for v in log.published if v.node == survivor and killed_s < v.mono <= back_at_s]
    grown = [
        chain_tokens(log, (survivor,), f, back_at_s) - chain_tokens(log, (survivor,), f, killed_s)
        for f in range(log.fragments)
    ]
    back = {}
    for node in others:
        times = [line.mono for line in log.nodes[node].merged if line.mono > back_at_s]
        if times:
            back[node] = round(min(times) - back_at_s, 3)
    whole, all_back = len(first) == log.fragments, len(back) == len(others)
    equal_s = equal_at(log, [survivor, *others], back_at_s)
    failures = list(wrong)
    if not whole:
        failures.append(f"{survivor} did not go on with every fragment while it was alone")
    failures += [f"{node}: nothing of it was merged after it returned" for node in others if node not in back]
    if equal_s is None:
        failures.append("not all nodes came to hold one new version of every fragment")
    return SurvivorReport(
        nodes=1 + len(others),
        survivor=survivor,
        next_version_s=round(min(first.values()) - killed_s, 3) if first else None,
        all_fragments_s=round(max(first.values()) - killed_s, 3) if whole else None,
        versions_alone=len(made),
        tokens_alone=min(grown),
        back_s=back,
        last_back_s=max(back.values(), default=None) if all_back else None,
        equal_s=round(equal_s - back_at_s, 3) if equal_s is not None else None,
        digests_agree=agree,
        failures=tuple(failures),
    )


def healed(
    facts: Facts,
    sides: tuple[tuple[str, ...], tuple[str, ...]],
    split_s: float,
    healed_s: float,
    wrong: Sequence[str],
    agree: bool,
) -> SplitReport:
    """The verdict on `split`, which lasted from `split_s` to `healed_s`. `wrong`: what else failed."""
    log, nodes = facts.log, (*sides[0], *sides[1])
    made = side_of(facts, sides[0], split_s, healed_s), side_of(facts, sides[1], split_s, healed_s)
    equal_s = equal_at(log, nodes, healed_s)
    again = last_resent(log)
    done = [merged_again(log, one) for one in again]
    given_up = [
        f"{line.node}, fragment {line.fragment}: {line.reason}, {line.tokens} tokens" for line in log.given_up
    ]
    missing = [
        f"{a.node}, fragment {a.fragment}" for a, at_s in zip(again, done, strict=True) if at_s is None
    ]
    in_all = sum(trained(log.nodes[node].progress, -inf, inf) for node in nodes)
    merged = min(chain_tokens(log, nodes, f, facts.ended_s) for f in range(log.fragments))
    failures = list(wrong)
    failures += [
        f"{', '.join(side.nodes)} did not make a version of every fragment alone"
        for side in made
        if side.first_version_s is None
    ]
    if equal_s is None:
        failures.append("not all nodes came to hold one version of every fragment made after the healing")
    failures += [f"{who}: what the fork cost was not merged again" for who in missing]
    failures += [f"given up: {words}" for words in given_up]
    # What is under way at the end is far less; a lost branch would be at least all of it.
    if equal_s is not None and in_all - merged > min(side.tokens_trained for side in made) / 2:
        failures.append(f"{in_all} tokens were trained, only {merged} are merged")
    times = [at_s for at_s in done if at_s is not None]
    return SplitReport(
        nodes=len(nodes),
        split_s=round(healed_s - split_s, 3),
        sides=made,
        equal_s=round(equal_s - healed_s, 3) if equal_s is not None else None,
        sent_again=sum(one.contributions for one in again),
        tokens_sent_again=sum(one.tokens for one in again),
        merged_again_s=round(max(times) - healed_s, 3) if times and not missing else None,
        not_merged_again=tuple(missing),
        given_up=tuple(given_up),
        tokens_trained=in_all,
        tokens_merged=merged,
        digests_agree=agree,
        failures=tuple(failures),
    )


# Questions that the verdicts ask of a chronicle.


def split_of(names: Sequence[str], seed: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Divide the nodes into (the larger side, the smaller one): 5 and 3 of 8."""
    start = seed % len(names)
    order = (*names[start:], *names[:start])
    larger = len(names) // 2 + 1
    return order[:larger], order[larger:]


# --- when ----------------------------------------------------------------------------------------------


def first_rounds(log: Chronicle, nodes: Iterable[str], since_s: float, until_s: float) -> dict[int, float]:
    """Fragment -> when one of these nodes first published a version whose round it closed after `since_s`."""
    closed_s = {(line.node, line.version): line.mono for line in log.merges}
    found: dict[int, float] = {}
    for made in log.published:
        later = closed_s.get((made.node, made.version), since_s) > since_s
        if later and made.node in nodes and made.mono <= until_s:
            found[made.fragment] = min(made.mono, found.get(made.fragment, until_s))
    return found


def equal_at(log: Chronicle, nodes: Sequence[str], since_s: float) -> float | None:
    """Time by which all of these nodes had held one version, made after `since_s`, of every fragment.

    None: not yet. They need not hold it at one moment: heads move on while the last ones follow.
    """
    holders: dict[tuple[int, int, str], dict[str, float]] = {}
    made: set[tuple[int, int, str]] = set()
    for held in log.held:
        if held.mono > since_s:
            version = (*held.version, held.digest)
            holders.setdefault(version, {}).setdefault(held.node, held.mono)
            if held.is_made():
                made.add(version)
    whole: dict[int, float] = {}
    for version, by_node in holders.items():
        if version in made and set(nodes) <= set(by_node):
            last_s = max(by_node.values())
            whole[version[0]] = min(last_s, whole.get(version[0], last_s))
    return max(whole.values()) if len(whole) == log.fragments else None


def merged_again(log: Chronicle, again: Line) -> float | None:
    """Time from which the node's own chain contained what it sent again; None: not yet."""
    times = [
        line.mono
        for line in log.nodes[again.node].merged
        if line.fragment == again.fragment and line.mono >= again.mono and line.stamp >= again.stamp
    ]
    return min(times, default=None)


def last_resent(log: Chronicle) -> list[Line]:
    """List what nodes sent again as one contribution, because their chain was replaced by one that lacks it.

    Of every node and fragment the last one: a later switch of chains sends what is still lost again.
    """
    return list({(fork.node, fork.fragment): fork for fork in log.forks if fork.contributions}.values())


# --- how much ------------------------------------------------------------------------------------------


def trained(progress: Sequence[Line], since_s: float, until_s: float) -> int:
    """Tokens by which a learner's count grew between the last progress lines before these times."""
    before = [line.tokens_total for line in progress if line.mono <= since_s]
    after = [line.tokens_total for line in progress if line.mono <= until_s]
    return max(after, default=0) - max(before, default=0)


def chain_tokens(log: Chronicle, nodes: Iterable[str], fragment: int, at_s: float) -> int:
    """Tokens of the heaviest version of a fragment that any of these nodes held by that time."""
    held = [line for line in log.held if line.fragment == fragment and line.mono <= at_s]
    return max((line.tokens for line in held if line.node in nodes), default=0)
