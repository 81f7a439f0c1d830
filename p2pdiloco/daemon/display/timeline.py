"""Timeline of a run as one node saw it, for pages and reports: kept in the run's folder, over restarts.

Everything in it is bounded. It costs a few comparisons a version and nothing else; what is shown of it is
made when somebody looks. Here are also the bounds of what reports carry: texts, numbers and rows that may
come from strangers.
"""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from p2pdiloco.adapters.data_dir import FieldValue, Files
from p2pdiloco.core.api.versions import VersionHeader
from p2pdiloco.errors import StorageError, encoded
from p2pdiloco.util import BoundedDict, Frozen, MovingAverage, Now, clear_folder_at, read_note

logger = logging.getLogger(__name__)

MAX_LOSS = 1e6
"""Loss beyond which a number is no loss: one like 1e308 would spoil every mean."""
Text = Annotated[str, Meta(max_length=80)]
"""Peer ids, node and run names."""
Words = Annotated[str, Meta(max_length=48)]
"""Words for a table cell."""
Line = Annotated[str, Meta(max_length=240)]
HexDigest = Annotated[str, Meta(max_length=16)]
"""Hexadecimal digits of a digest as shown to people: the first 8, at most 16."""
Seconds = Annotated[float, Meta(ge=-1e11, le=1e11)]
"""Ages, and times since 1970: a number that is none, or is infinite, cannot be made a time."""
Share = Annotated[float, Meta(ge=0, le=1)]
Natural = Annotated[int, Meta(ge=0, le=1 << 62)]


class Row(Frozen, kw_only=True, forbid_unknown_fields=True):
    """Base of all rows: immutable, keyword-only, encoded as a map with the field names."""


MAX_POINTS = 256
MAX_MARKS = 128
CLOSE_S = 30.0
"""Time within which marks of one kind are one mark, but for those of different members."""
MAX_AGE_S = 20 * 365 * 86_400.0


class LossPoint(Frozen, array_like=True):
    """Held-out loss of the result at a time."""

    at_s: Seconds
    """Seconds since 1970."""
    tokens: Natural
    """Tokens merged by then, the mean over fragments."""
    loss: float


class PastEvent(Frozen, array_like=True):
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
    """Curve of the loss over tokens: evenly thinned, and always with the newest point."""

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


NAME = "timeline.json"
MAX_MERGED = 1024
"""Members of which it is known when their work was merged last."""
MAX_REASONS = 32
FAULTS = ("learner", "link", "disk", "p2pd", "health")
"""Kinds of the event log that are faults of this node. A learner's are those that `ENDS` begins."""
ENDS = ("ended", "lost")
ABOUT_PEERS = ("join", "leave", "silent")
"""Kinds that count when they are about another member; about this node they say what its state says."""
AS_THEY_ARE = ("election", "office", "suspicion", "fork", "course", "excluded")
OWN = ("election", "office")
"""Kinds that are about this node where they name nobody else."""
OF_OTHERS = {"we stand": "stands", "we are the syncer": "is the syncer", "follows": "is the syncer"}
"""Beginnings of our own words, as they are said to whoever looks at the page."""


class KeptTimeline(Frozen, forbid_unknown_fields=True):
    """Content of the file."""

    since_s: float
    curve: Points = ()
    marks: Events = ()


class NewestVersion(Frozen):
    """Version that came last, of whatever fragment."""

    fragment: int
    number: int
    at_s: float
    contributors: int


class OwnWork(Struct):
    """Contributions of this node, since it started."""

    merged: int = 0
    merged_tokens: int = 0
    merged_at_s: float | None = None
    given_up: int = 0
    refused: dict[str, int] = {}

    def take(self, reason: str, tokens: int, at_s: float) -> None:
        """Take in a `contribution` line of the event log."""
        if reason == "merged":
            self.merged += 1
            self.merged_tokens += tokens
            self.merged_at_s = at_s
        elif reason.startswith("given up"):
            self.given_up += 1
        elif reason.startswith("refused: "):
            word = reason.removeprefix("refused: ")[:80]
            if word in self.refused or len(self.refused) < MAX_REASONS:
                self.refused[word] = self.refused.get(word, 0) + 1


class Timeline:
    """Timeline of one run on one node."""

    def __init__(self, kept: KeptTimeline | None = None, now_s: Now = time.time) -> None:
        """`kept`: of earlier lives."""
        self.now_s = now_s
        self.since_s = min(kept.since_s, now_s()) if kept is not None else now_s()
        """Time since which the run is watched here."""
        self.curve = Curve(kept.curve if kept is not None else ())
        self.marks = PastMarks(kept.marks if kept is not None else ())
        self.own = OwnWork()
        self.newest: NewestVersion | None = None
        self.merged_at_s: BoundedDict[str, float] = BoundedDict(MAX_MERGED)
        """Time of the newest version with work of a member, by peer id."""
        self.last_contributors: frozenset[str] = frozenset()
        """Members whose work is in the newest version."""
        self.version_at_s: dict[int, float] = {}
        """Time at which each fragment's head came here; those that were here from the start are missing."""
        self._numbers: list[int] = []
        self._usual = MovingAverage()
        self._loss: object = None

    @property
    def usual_s(self) -> float | None:
        """Usual time between two versions; None: not known yet."""
        return None if self._usual.empty else self._usual.value

    def age_s(self, at_s: float) -> float:
        """Compute how long ago that was."""
        return max(0.0, self.now_s() - at_s)

    def merged_age_s(self, peer: str) -> float | None:
        """Compute how long ago a version with work of that member came; None: none did since we started."""
        at_s = self.merged_at_s.get(peer)
        return None if at_s is None else round(self.age_s(at_s), 1)

    def look(self, headers: Iterable[VersionHeader]) -> None:
        """Look at the heads of all fragments: which are new?"""
        now_s = self.now_s()
        for index, header in enumerate(headers):
            if index == len(self._numbers):
                self._numbers.append(header.number)
            elif header.number != self._numbers[index]:
                self._numbers[index] = header.number
                self._came(header, now_s)

    def _came(self, header: VersionHeader, now_s: float) -> None:
        if self.newest is not None:
            self._usual.add(max(0.0, now_s - self.newest.at_s))
        names = [part.learner for part in header.contributors]
        self.newest = NewestVersion(header.fragment, header.number, now_s, len(names))
        self.last_contributors = frozenset(names)
        for name in names[:MAX_MERGED]:
            self.merged_at_s[name] = now_s
        self.version_at_s[header.fragment] = now_s

    def measured(self, measurement: object, loss: float, tokens: int) -> None:
        """Take in a held-out loss of the result, at so many merged tokens. `measurement`: tells one from the
        next."""
        if measurement is not self._loss:
            self._loss = measurement
            self.curve.add(LossPoint(self.now_s(), tokens, loss))

    def learn(self, curve: Iterable[LossPoint], marks: Iterable[PastEvent]) -> None:
        """Take in what somebody else tells of the run. What is known here already counts more."""
        self.curve = Curve(merged(self.curve.points, curve))
        self.marks.learn(marks)

    def note(
        self,
        kind: str,
        fragment: int | None,
        reason: str,
        fields: Mapping[str, FieldValue],
        name: Callable[[str], str] = lambda _peer: "",
        me: str = "",
    ) -> None:
        """Take in a line of the event log. `name`: finds a peer's. `me`: our own id."""
        now_s = self.now_s()
        if kind == "contribution":
            tokens = fields.get("tokens")
            self.own.take(reason, tokens if isinstance(tokens, int) else 0, now_s)
            return
        peer = str(fields.get("peer") or fields.get("syncer") or fields.get("candidate") or "")
        about_peer = kind in ABOUT_PEERS and bool(peer) and "basis" not in fields
        is_fault = kind in FAULTS and (kind != "learner" or reason.startswith(ENDS))
        if not (about_peer or is_fault or kind in AS_THEY_ARE):
            return
        # Everybody sees marks; a learner's last words, or which file cannot be saved, are this machine's own.
        word, words = ("fault", f"its {kind}; its log says more") if is_fault else (kind, _said_of(reason))
        peer = peer or (me if is_fault or kind in OWN else "")
        self.marks.add(PastEvent(now_s, word, words[:240], peer[:80], fragment, name=name(peer)[:80]))

    def kept(self) -> KeptTimeline:
        """Give what the next life goes on from."""
        return KeptTimeline(self.since_s, self.curve.points, self.marks.events)


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(KeptTimeline)


def _said_of(reason: str) -> str:
    beginning = next((ours for ours in OF_OTHERS if reason.startswith(ours)), "")
    return OF_OTHERS[beginning] + reason.removeprefix(beginning) if beginning else reason


def load_timeline(folder: Path) -> Timeline:
    """Load what an earlier life kept; an empty one if there is none, or it is damaged."""
    return Timeline(read_note(folder / NAME, _decoder.decode, logger.warning))


def save_timeline(folder: Path, timeline: Timeline) -> None:
    """Keep it for the next life. A failure is logged: it costs what a page shows, nothing else."""
    clear_folder_at(folder / NAME)
    try:
        Files().save(folder / NAME, [encoded(timeline.kept(), _encoder)], durable=False)
    except StorageError as error:
        logger.warning("what the web page shows of the past cannot be kept: %s", error)
