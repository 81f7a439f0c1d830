"""The page of a run: templates, one script, one style sheet, and what is worded for them.

`Page` renders the whole document for the first paint, and those parts of it that changed since. The script
only puts parts in place: what is shown is worded here, once, for the first paint, for updates, and for
readers without scripts. The script counts ages, so that a part changes only when something happens. `drawing`
makes the loss curve for those who run no script: points of SVG lines, within a box that is stretched.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from msgspec import Struct

from p2pdiloco.daemon.display.snapshot import amendment_text, count, few_seats_text, proposed_text, short_peer
from p2pdiloco.errors import clean
from p2pdiloco.web.view import (
    BehindReason,
    Mark,
    MarkKind,
    MemberCondition,
    NodeCondition,
    PublicView,
    Pulse,
    RunView,
)

FOLDER = Path(__file__).with_name("page")
STATIC = FOLDER / "static"
"""Folder of the script and the style sheets."""
PARTS = ("head", "figures", "loss", "mine", "members", "fragments", "happened", "credits", "join")
"""Parts of a page, each a template and an element with that id. A part may be empty."""
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'"
)
"""Content security policy: in the page itself, which any web server may carry, and in our own answers."""

LiveMode = Literal["events", "poll"]
"""Way in which the page learns of changes: server-sent events of `events`, or by looking again."""


class Parts(Struct, frozen=True):
    """Parts of a page as they were rendered, by name."""

    html: dict[str, str] = {}

    def since(self, before: Parts) -> dict[str, str]:
        """List those that differ."""
        return {name: text for name, text in self.html.items() if before.html.get(name) != text}


class Page:
    """Page of a run, ready to render any view of it."""

    def __init__(self) -> None:
        self._env = Environment(
            loader=FileSystemLoader(FOLDER / "templates"),
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
            undefined=StrictUndefined,
            finalize=_shown,
        )
        self._env.filters.update(
            age=age,
            ago=ago,
            amount=amount,
            grouped=grouped,
            loss=loss,
            number=number,
            rate=rate,
            short=short_peer,
        )
        self._env.globals.update(
            percent=percent,
            amendment=amendment_text,
            few_seats=few_seats_text,
            proposed=proposed_text,
            why_words=REASON_TEXTS,
            tones=TONES,
            shapes=MEMBER_SHAPES,
            grave=GRAVE,
            drawing=drawing,
            series=series,
            lane=marks_on_axis,
            words={
                "node": NodeCondition,
                "pulse": Pulse,
                "member": MemberCondition,
                "mark": MarkKind,
                "why": BehindReason,
            },
            Pulse=Pulse,
            BehindReason=BehindReason,
            MemberCondition=MemberCondition,
            NodeCondition=NodeCondition,
            policy=POLICY,
            stamp=stamp,
        )

    def html(self, view: RunView, live: LiveMode = "events", every_s: float = 30.0) -> str:
        """Render the whole document. every_s: how often a page that polls looks again."""
        return self._env.get_template("page.html").render(
            **self._context(view, ticking=True), parts=PARTS, live=live, every_s=every_s
        )

    def parts(self, view: RunView) -> Parts:
        """Render the parts without ages."""
        context = self._context(view, ticking=False)
        return Parts({name: self._env.get_template(f"{name}.html").render(**context) for name in PARTS})

    def update(self, view: RunView, parts: dict[str, str] | None = None) -> bytes:
        """Encode parts for the script, by default all: one line of JSON."""
        parts = self.parts(view).html if parts is None else parts
        at_s = view.public.made_at_s if view.public is not None else None
        return msgspec.json.encode({"at": at_s, "version": view.version, "parts": parts})

    def _context(self, view: RunView, ticking: bool) -> dict[str, Any]:
        public = view.public
        now_s = public.made_at_s if public is not None else 0.0

        return {
            "view": view,
            "run": public,
            "own": view.own,
            "now_s": now_s,
            "ticking": ticking,
            "hues": _hues(view),
            "credited": {row.peer: row for row in public.credits} if public is not None else {},
        }


def _shown(value: Any) -> Any:
    """Make a text safe to read, unless it is a piece of the page; escaping is Jinja's."""
    return clean(value) if isinstance(value, str) and not hasattr(value, "__html__") else value


def _hues(view: RunView) -> dict[str, int]:
    """Give every syncer a colour of its own, as long as there are some: the same in every part."""
    if view.public is None:
        return {}
    syncers = sorted({row.syncer for row in view.public.fragments if row.syncer})
    return {peer: index % 8 for index, peer in enumerate(syncers)}


# The loss curve.

WIDTH, HEIGHT = 1000, 300


class Drawing(Struct, frozen=True):
    """Lines of a curve over tokens, in a box of WIDTH by HEIGHT."""

    curve: str
    """Points of the held-out loss."""
    forecast: str
    """Points of the forecast; empty: there is none."""
    band: str
    """Points of the area between the forecast's bounds."""
    low: float
    high: float
    """Losses at the bottom and at the top."""
    first: float
    last: float
    """Tokens at the left and at the right."""


def drawing(view: PublicView) -> Drawing | None:
    """Draw the curve and its forecast. Returns None with fewer than two points."""
    ahead = view.forecast
    xs = [float(tokens) for tokens in view.curve.tokens]
    ys = list(view.curve.loss)
    if len(xs) < 2:
        return None
    every = [*ys, *ahead.low, *ahead.high] if ahead else ys
    low, high = min(every), max(every)
    margin = 0.06 * (high - low) or 0.5
    low, high = low - margin, high + margin
    first, last = xs[0], max([*xs, *(map(float, ahead.tokens) if ahead else ())])
    box = _Box(first, last, low, high)
    edge = [*zip(ahead.tokens, ahead.high, strict=True)] if ahead else []
    under = [*zip(ahead.tokens, ahead.low, strict=True)] if ahead else []
    return Drawing(
        curve=box.line(list(zip(xs, ys, strict=True))),
        forecast=box.line(list(zip(ahead.tokens, ahead.loss, strict=True))) if ahead else "",
        band=box.line([*edge, *reversed(under)]),
        low=low,
        high=high,
        first=first,
        last=last,
    )


def series(view: PublicView) -> dict[str, object]:
    """List what the script draws: curve, forecast, and times of what went wrong, with plain keys."""
    ahead = view.forecast
    return {
        "at": view.curve.at_s,
        "tokens": view.curve.tokens,
        "loss": view.curve.loss,
        "ahead": None
        if ahead is None
        else {
            "at": ahead.at_s,
            "tokens": ahead.tokens,
            "loss": ahead.loss,
            "low": ahead.low,
            "high": ahead.high,
        },
        "marks": [mark.at_s for mark in view.marks if mark.kind in GRAVE],
    }


def marks_on_axis(marks: Sequence[Mark], first_s: float, last_s: float) -> list[tuple[float, Mark]]:
    """Place marks on a time axis: (place from 0 to WIDTH, mark), those outside left out."""
    span = max(1.0, last_s - first_s)
    placed = [(WIDTH * (mark.at_s - first_s) / span, mark) for mark in marks]
    return [(round(x, 1), mark) for x, mark in placed if 0 <= x <= WIDTH]


class _Box:
    def __init__(self, first: float, last: float, low: float, high: float) -> None:
        self._first, self._span = first, max(1.0, last - first)
        self._low, self._height = low, high - low

    def x(self, tokens: float) -> float:
        return round(WIDTH * (tokens - self._first) / self._span, 1)

    def line(self, points: Sequence[tuple[float, float]]) -> str:
        return " ".join(f"{self.x(x)},{HEIGHT * (1 - (y - self._low) / self._height):.1f}" for x, y in points)


# Numbers, ages and rates, as templates and script write them.

NOW_S = 2.0
"""Age up to which something happened just now."""
DAY_S = 86400.0

MEMBER_SHAPES = {
    MemberCondition.HERE: "full",
    MemberCondition.BEHIND: "half",
    MemberCondition.RESTING: "ring",
    MemberCondition.SILENT: "cross",
}
"""Shape beside a member's state: nothing is told by its colour alone."""
TONES = {
    MemberCondition.HERE: "good",
    MemberCondition.BEHIND: "warn",
    MemberCondition.RESTING: "calm",
    MemberCondition.SILENT: "bad",
    Pulse.ALIVE: "good",
    Pulse.NEW: "calm",
    Pulse.LATE: "warn",
    Pulse.STILL: "bad",
    Pulse.PAUSED: "calm",
    Pulse.ENDED: "calm",
    Pulse.UNKNOWN: "bad",
}
GRAVE = (MarkKind.SILENT, MarkKind.SUSPICION, MarkKind.FORK, MarkKind.FAULT, MarkKind.EXCLUDED)
"""Kinds of marks that tell of something that went wrong."""
REASON_TEXTS = {
    BehindReason.SILENT: "not heard of",
    BehindReason.CATCHING_UP: "catching up",
    BehindReason.OLD_VERSIONS: "holds old versions",
    BehindReason.NOT_MERGED: "in none of the last merges",
    BehindReason.NO_DISK: "disk full: no vote",
    BehindReason.THIN_UPLINK: "thin uplink",
    BehindReason.NOT_TRAINING: "no learner runs there",
    BehindReason.DISAGREES: "disagrees with the others",
    BehindReason.EXPELLED: "expelled by this node",
}
"""Short words for a reason; `str` of it is the sentence."""


def age(seconds: float) -> str:
    """Word an age, or a time to come: "now", "42 s", "7 min", "2.5 h", "3 days", by the same rule as the
    script."""
    seconds = abs(seconds)
    if seconds < NOW_S:
        return "now"
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * DAY_S else f"{seconds / DAY_S:.0f} days"


def ago(seconds: float) -> str:
    """Word how long ago something was: "just now", "42 s ago"."""
    return "just now" if abs(seconds) < NOW_S else f"{age(seconds)} ago"


def stamp(at_s: float) -> str:
    """Word a time for machines and for a hint: ISO 8601, UTC; empty for what is no time of a calendar."""
    try:
        return datetime.fromtimestamp(at_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    except (ValueError, OverflowError, OSError):
        return ""


def rate(bits_per_s: float | None) -> str:
    """Word a rate: "12.4 Mbit/s"; "–" for unknown."""
    return "–" if bits_per_s is None else _with_unit(bits_per_s, "bit/s")


def amount(number_bytes: float) -> str:
    """Word an amount of data: "3.4 GB"."""
    return _with_unit(number_bytes, "B")


def percent(part: float, whole: float) -> str:
    """Word a share: "37.2 %". It is 100 only when nothing is left."""
    return "–" if whole <= 0 else f"{int(1000 * max(0.0, part) / whole) / 10:.1f} %"


def loss(value: float | None) -> str:
    """Word a loss: "3.214"; "–" for unknown."""
    return "–" if value is None else f"{value:.3f}"


def number(value: float | None) -> str:
    """Word a number with three digits: "15.2k"; "–" for unknown."""
    return "–" if value is None else count(value)


def grouped(value: int) -> str:
    """Word a whole number: "41,200"."""
    return f"{value:,}"


def _with_unit(value: float, unit: str) -> str:
    text = count(value)
    return f"{text[:-1]} {text[-1]}{unit}" if text[-1:].isalpha() else f"{text} {unit}"
