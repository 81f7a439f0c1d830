"""Series of what happened, bounded however long a run is: a curve that is thinned, and marks that join."""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from p2pdiloco.daemon.display.bounds import MAX_LOSS, Line, Natural, Seconds, Text, Words

MAX_POINTS = 256
MAX_MARKS = 128
CLOSE_S = 30.0
"""Time within which marks of one kind are one mark, but for those of different members."""
MAX_AGE_S = 20 * 365 * 86_400.0


class LossPoint(Struct, frozen=True, array_like=True):
    """Held-out loss of the result at a time."""

    at_s: Seconds
    """Seconds since 1970."""
    tokens: Natural
    """Tokens merged by then, the mean over fragments."""
    loss: float


class PastEvent(Struct, frozen=True, array_like=True):
    """Event on the time axis."""

    at_s: Seconds
    kind: Words
    words: Line = ""
    peer: Text = ""
    fragment: Natural | None = None
    times: Natural = 1
    """Number of events that this stands for."""
    name: Text = ""
    """Name of that peer then: who is gone has none any more."""


Points = Annotated[tuple[LossPoint, ...], Meta(max_length=MAX_POINTS)]
Events = Annotated[tuple[PastEvent, ...], Meta(max_length=MAX_MARKS)]


class Curve:
    """Curve over tokens: evenly thinned, and always with the newest point."""

    def __init__(self, points: Iterable[LossPoint] = (), most: int = MAX_POINTS) -> None:
        self._most, self._gap = most, 0.0
        self._points: list[LossPoint] = []
        for point in points:
            self.add(point)

    @property
    def points(self) -> tuple[LossPoint, ...]:
        """Points, oldest first."""
        return tuple(self._points)

    def add(self, point: LossPoint) -> None:
        """Take in a point. One that goes back, as after a fork, replaces what was later."""
        points = self._points
        if not abs(point.loss) <= MAX_LOSS:  # nor is what is no number
            return
        while points and points[-1].tokens >= point.tokens:
            points.pop()
        # The last one stays where it is far enough from the one before; else it was the newest, and no more.
        if len(points) > 1 and points[-1].tokens - points[-2].tokens < self._gap:
            points.pop()
        points.append(point)
        if len(points) > self._most:
            self._thin()

    def _thin(self) -> None:
        first, *_, last = points = self._points
        self._gap = max(1.0, 2 * (last.tokens - first.tokens) / self._most)
        kept = [first]
        for point in points[1:-1]:
            if point.tokens - kept[-1].tokens >= self._gap:
                kept.append(point)
        self._points = [*kept, last]


class PastMarks:
    """Marks of the time axis, the newest ones."""

    def __init__(self, events: Iterable[PastEvent] = (), most: int = MAX_MARKS) -> None:
        self._most = most
        self._events = list(events)[-most:]

    @property
    def events(self) -> tuple[PastEvent, ...]:
        """Events, oldest first."""
        return tuple(self._events)

    def add(self, event: PastEvent) -> None:
        """Take in an event, with those like it that came just before."""
        for place in range(len(self._events) - 1, -1, -1):
            before = self._events[place]
            if event.at_s - before.at_s > CLOSE_S:
                break
            if (before.kind, before.peer) == (event.kind, event.peer):
                del self._events[place]
                fragment = event.fragment if event.fragment == before.fragment else None
                times = before.times + event.times
                event = replace(event, fragment=fragment, times=times)
                break
        self._events.append(event)
        self._forget()

    def learn(self, events: Iterable[PastEvent]) -> None:
        """Take in what another saw. Of what is known here it may have heard a little earlier or later."""
        for event in events:
            alike = (known for known in self._events if (known.kind, known.peer) == (event.kind, event.peer))
            if all(abs(known.at_s - event.at_s) > CLOSE_S for known in alike):
                insort(self._events, event, key=lambda known: known.at_s)
                self._forget()

    def _forget(self) -> None:
        """Forget the oldest of the most frequent kind, if there are too many: terms end all the time, and
        must not hide a death."""
        if len(self._events) > self._most:
            kind, _ = Counter(event.kind for event in self._events).most_common(1)[0]
            self._events.remove(next(event for event in self._events if event.kind == kind))


def merged(one: Iterable[LossPoint], other: Iterable[LossPoint]) -> tuple[LossPoint, ...]:
    """Put two curves of one run together, by tokens; where both know something, the first one counts."""
    known = sorted(one, key=lambda point: point.tokens)
    if not known:
        return Curve(sorted(other, key=lambda point: point.tokens)).points
    first, last = known[0].tokens, known[-1].tokens
    outside = [point for point in other if not first <= point.tokens <= last]
    return Curve(sorted([*known, *outside], key=lambda point: point.tokens)).points


def sane(point: LossPoint, now_s: float) -> bool:
    """Tell whether a point of a stranger's can be one: a finite loss, and a time that has been."""
    return abs(point.loss) <= MAX_LOSS and now_s - MAX_AGE_S <= point.at_s <= now_s + 300
