"""The verdict of one seed, what many seeds did together, and the trace of a seed.

A trace is one digest of all that happened and, when asked for, lines for people.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct, field, to_builtins

from p2pdiloco.core.api.events import Event, LearnerStatus, MessageReceived, Tick
from p2pdiloco.core.api.messages import Progress
from p2pdiloco_lab.simulation.lineage import Losses


class Violation(Exception):
    """An invariant of the protocol does not hold. `rule` names it; one bug has one rule."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule


class SeedResult(Struct, frozen=True, kw_only=True):
    """Course of a seed. `violation` names a broken rule, `stuck` what did not happen after the faults."""

    seed: int
    mix: str
    nodes: int
    digest: str
    virtual_s: float
    events: int
    messages: int
    versions: int
    elections: int
    split_terms: int
    """Terms in which two sides of a split each elected a syncer, by disjoint votes."""
    switches: int
    """Nodes that moved to a heavier chain which does not continue their own."""
    lost_to_forks: int
    """Inner steps (summed over fragments) of surviving learners that no chain has in the end: a violation."""
    faults: int
    fault_kinds: dict[str, int]
    records: dict[str, int]
    violation: str
    detail: str
    stuck: str
    losses: Losses | None = None
    """Losses of the global parameters, where numbers are simulated too."""
    tail: tuple[str, ...] = ()
    """Last decisions before the end of a failed seed."""

    @property
    def ok(self) -> bool:
        """No rule broken, everything live."""
        return not self.violation and not self.stuck


class Tally(Struct, kw_only=True):
    """Counters over many seeds."""

    seeds: int = 0
    violations: int = 0
    stuck: int = 0
    versions: int = 0
    elections: int = 0
    faults: int = 0
    switches: int = 0
    lost_to_forks: int = 0
    virtual_s: float = 0.0

    def count(self, result: SeedResult) -> None:
        """One more seed."""
        self.seeds += 1
        self.violations += bool(result.violation)
        self.stuck += bool(result.stuck)
        self.versions += result.versions
        self.elections += result.elections
        self.faults += result.faults
        self.switches += result.switches
        self.lost_to_forks += result.lost_to_forks
        self.virtual_s = round(self.virtual_s + result.virtual_s, 1)


class SeedsSummary(Tally, kw_only=True):
    """Course of many seeds together, and per mix."""

    fault_kinds: dict[str, int] = field(default_factory=dict)
    mixes: dict[str, Tally] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    """mix -> computing time of its seeds, where it was measured."""
    digests: list[str] = field(default_factory=list)
    """Digest of every seed's history, in order."""
    failed: list[SeedResult] = field(default_factory=list)
    trained: int = 0
    """Seeds whose learners really trained, and their mean losses."""
    start_loss: float = 0.0
    loss: float = 0.0
    loss_floor: float = 0.0

    def add(self, result: SeedResult, seconds: float = 0.0) -> None:
        """Count one seed in, which took so long to play."""
        self.count(result)
        self.mixes.setdefault(result.mix, Tally()).count(result)
        if result.losses is not None:
            self.trained += 1
            self.start_loss += (result.losses.start - self.start_loss) / self.trained
            self.loss += (result.losses.end - self.loss) / self.trained
            self.loss_floor += (result.losses.floor - self.loss_floor) / self.trained
        self.seconds[result.mix] = self.seconds.get(result.mix, 0.0) + seconds
        self.digests.append(result.digest)
        for kind, count in result.fault_kinds.items():
            self.fault_kinds[kind] = self.fault_kinds.get(kind, 0) + count
        if not result.ok:
            self.failed.append(result)

    @property
    def histories(self) -> str:
        """SHA-256 over the digests of all seeds in order: equal where two trees play every seed alike."""
        return hashlib.sha256("\n".join(self.digests).encode()).hexdigest()

    def sentence(self, seeds_per_minute: float) -> str:
        """Sum up for people."""
        trained = f"loss {self.start_loss:.3f} -> {self.loss:.3f} (floor {self.loss_floor:.3f}); "
        return (
            f"{counted(self.seeds, 'seed')}, {counted(self.violations, 'violation')}, {self.stuck} stuck; "
            f"{counted(self.versions, 'version')}, {counted(self.elections, 'election')}, "
            f"{counted(self.faults, 'fault')} "
            f"in {self.virtual_s:.0f} virtual seconds; "
            f"{trained if self.trained else ''}{seeds_per_minute:.0f} seeds per minute; "
            f"histories {self.histories[:16]}"
        )

    def as_dict(self, elapsed_s: float, nodes: int | None, mix: str | None) -> dict[str, Any]:
        """Sum up for machines: the counters, per mix too, and every failed seed with the command that replays
        it.

        A mix's seeds per minute are counted over its share of the computing time.
        """
        numbers: dict[str, Any] = to_builtins(self)
        if not self.trained:
            for name in ("trained", "start_loss", "loss", "loss_floor"):
                del numbers[name]
        for entry, result in zip(numbers["failed"], self.failed, strict=True):
            entry["replay"] = replay_command(result, nodes, mix)
        del numbers["digests"]
        computing_s = sum(numbers.pop("seconds").values())
        for name, entry in numbers["mixes"].items():
            share_s = elapsed_s * self.seconds[name] / computing_s if computing_s else elapsed_s
            entry["seeds_per_minute"] = rate(entry["seeds"], share_s)
        return {
            **numbers,
            "histories": self.histories,
            "seeds_per_minute": rate(self.seeds, elapsed_s),
        }


def counted(number: int, noun: str) -> str:
    """Word so many of something: "1 seed", "2 seeds"."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def rate(count: int, seconds: float) -> float:
    """Per minute."""
    return round(60.0 * count / max(seconds, 1e-9), 1)


def replay_command(result: SeedResult, nodes: int | None, mix: str | None) -> str:
    """The one command that plays a seed again, with its trace."""
    options = f" --nodes {nodes}" if nodes else ""
    options += f" --mix {mix}" if mix else ""
    options += " --vectors" if result.losses else ""
    return f"p2pdiloco simulate --seed {result.seed}{options} --trace"


# Trace.

TAIL_LINES = 30
"""Decisions that are kept for the report of a failed seed."""
BUFFERED = 512
Decision = tuple[float, str, int | None, str, str]
QUIET = (Tick, LearnerStatus)
SKIPPED = ("signature", "run", "codec", "payload_digest", "update_digest", "votes")
"""Fields that say nothing to a reader."""


class Trace:
    """Every event that a core handled, in order. Equal seeds give equal digests, in any process.

    `write` gets one line per decision; with `verbose`, events and effects too, indented."""

    def __init__(self, write: Callable[[str], None] | None = None, verbose: bool = False) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._buffer: list[str] = []
        self._tail: deque[Decision] = deque(maxlen=TAIL_LINES)
        self._last: tuple[float, str, Event] | None = None
        self.write = write
        self.verbose = verbose and write is not None

    def _hashed(self, text: str) -> None:
        self._buffer.append(text)
        if len(self._buffer) >= BUFFERED:
            self._flush()

    def _flush(self) -> None:
        self._hash.update("\n".join(self._buffer).encode())
        self._buffer = [""]

    def event(self, now: float, peer: str, event: Event) -> None:
        """A core is about to handle this event."""
        name = type(event).__name__
        if type(event) is MessageReceived:
            name = type(event.message).__name__ + "<" + event.sender
        self._last = (now, peer, event)
        self._hashed(f"{now!r} {peer} {name}")
        if self.verbose:
            self._show(now, peer, "<-", name, event.message if type(event) is MessageReceived else event)

    def decision(
        self,
        now: float,
        peer: str,
        text: str,
        fragment: int | None = None,
        fields: Iterable[tuple[str, object]] = (),
    ) -> None:
        """Something that a node decided, with its reason, or that the world did to it."""
        where = "" if fragment is None else f"f{fragment}"
        self._hashed(f"{peer} {where} {text}")
        more = ", ".join(f"{name} {brief(value)}" for name, value in fields) if self.write else ""
        decision = (now, peer, fragment, text, more)
        self._tail.append(decision)
        if self.write is not None:
            self.write(line_of(decision))

    def fact(self, peer: str, text: str) -> None:
        """Something that only the digest has to say: people see the decision that led to it."""
        self._hashed(f"{peer} {text}")

    def effect(self, now: float, peer: str, effect: object) -> None:
        """Show an effect of a core; its consequences are in the digest."""
        if self.verbose:
            message = getattr(effect, "message", None)
            name = type(effect).__name__ if message is None else f"{type(message).__name__}>{effect.peer}"  # type: ignore[attr-defined]
            self._show(now, peer, "->", name, effect if message is None else message)

    def _show(self, now: float, peer: str, arrow: str, name: str, what: object) -> None:
        if self.write is not None and not isinstance(what, (*QUIET, Progress)) and name != "Record":
            self.write(f"{now:9.3f}  {peer:<4}     {arrow} {name} {brief(what)}"[:200])

    def tail(self) -> tuple[str, ...]:
        """The last decisions, and the event that was being handled at the end."""
        lines = [line_of(decision) for decision in self._tail]
        if self._last is not None:
            now, peer, event = self._last
            shown = event.message if isinstance(event, MessageReceived) else event
            lines.append(f"{now:9.3f}  {peer:<4} while handling {type(shown).__name__} {brief(shown)}"[:200])
        return tuple(lines)

    def digest(self) -> str:
        """Return the digest of everything so far."""
        self._flush()
        return self._hash.hexdigest()


def line_of(decision: Decision) -> str:
    """Virtual time, node, fragment, decision: reason (and what else it says)."""
    now, peer, fragment, text, more = decision
    where = "" if fragment is None else f"f{fragment}"
    return f"{now:9.3f}  {peer:<4} {where:<4} {text}" + (f"  ({more})" if more else "")


def brief(value: object) -> str:
    """A struct with its digests cut short and without signatures."""
    fields = getattr(value, "__struct_fields__", None)
    if isinstance(value, bytes):
        return value.hex()[:8]
    if isinstance(value, tuple):
        return "[" + ", ".join(brief(item) for item in value[:8]) + ("…]" if len(value) > 8 else "]")
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(map(brief, value))) + "}"
    if fields is None and type(value).__repr__ is object.__repr__:  # it would say where it lies in memory
        return type(value).__name__
    if fields is None:
        return f"{value:.3f}" if isinstance(value, float) else str(value)
    return ", ".join(f"{name}={_part(getattr(value, name))}" for name in fields if name not in SKIPPED)


def _part(value: object) -> str:
    text = brief(value)
    return f"({text})" if hasattr(value, "__struct_fields__") else text
