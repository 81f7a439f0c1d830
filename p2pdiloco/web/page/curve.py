"""Drawing of a loss curve for whoever runs no script: points of SVG lines, within a box that is stretched."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from p2pdiloco.web.page.wording import GRAVE
from p2pdiloco.web.view import Mark, PublicView

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


def lane(marks: Sequence[Mark], first_s: float, last_s: float) -> list[tuple[float, Mark]]:
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
