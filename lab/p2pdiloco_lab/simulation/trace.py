"""Trace of a seed: one digest of all that happened and, when asked for, lines for people."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable

from p2pdiloco.core.api.events import Event, LearnerStatus, MessageReceived, Tick
from p2pdiloco.core.api.messages import Progress

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
