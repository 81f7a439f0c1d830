"""Forecast of the held-out loss: a + b · tokens^-c through the later half of what was measured.

A cosine schedule ends lower than that says, so it is a cautious guess; the page calls it a forecast, with its
scatter around it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from msgspec import Struct

from p2pdiloco.daemon.display.timeline import LossPoint
from p2pdiloco.web.view import Forecast

LEAST_POINTS = 8
STEPS = 32
EXPONENTS = tuple(step / 20 for step in range(2, 25))
SCATTERS = 2.0


class Fit(Struct, frozen=True):
    """Power law through points."""

    floor: float
    factor: float
    exponent: float
    scatter: float
    """Root of the mean squared distance from the points."""

    def at(self, tokens: float) -> float:
        """Compute the loss at so many tokens."""
        return self.floor + self.factor * float(tokens**-self.exponent)


@lru_cache(maxsize=16)
def fit(points: tuple[LossPoint, ...]) -> Fit | None:
    """Fit the later half of the points, by tokens; None: they are too few, or do not fall."""
    known = [point for point in points if point.tokens > 0]
    if len(known) < LEAST_POINTS:
        return None
    later = [point for point in known if point.tokens >= known[-1].tokens / 2]
    used = later if len(later) >= LEAST_POINTS else known[-LEAST_POINTS:]
    fits = [found for exponent in EXPONENTS if (found := _line(used, exponent)) is not None]
    return min(fits, key=lambda found: found.scatter, default=None)


def _line(points: Sequence[LossPoint], exponent: float) -> Fit | None:
    xs, ys = [point.tokens**-exponent for point in points], [point.loss for point in points]
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    if spread <= 0:
        return None
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(xs, ys, strict=True)) / spread
    floor = mean_y - slope * mean_x
    if slope <= 0 or floor < 0:
        return None
    squares = sum((floor + slope * x - y) ** 2 for x, y in zip(xs, ys, strict=True))
    return Fit(floor, slope, exponent, math.sqrt(squares / len(xs)))


def forecast(
    points: tuple[LossPoint, ...], tokens: int, schedule_tokens: int, now_s: float, ends_at_s: float | None
) -> Forecast | None:
    """Forecast the curve from the last point to the end of the schedule; None: nothing is left, or known."""
    found = fit(points)
    if found is None or schedule_tokens <= max(tokens, points[-1].tokens):
        return None
    first = points[-1].tokens
    ahead = [first + (schedule_tokens - first) * step // STEPS for step in range(STEPS + 1)]
    expected = [found.at(token) for token in ahead]
    # The fit need not go through the newest point, but what is drawn does: the step fades out.
    step = points[-1].loss - expected[0]
    loss = [value + step * (1 - place / STEPS) for place, value in enumerate(expected)]
    band = SCATTERS * found.scatter
    left = schedule_tokens - tokens
    pace_s = None if ends_at_s is None else (ends_at_s - now_s) / left
    return Forecast(
        tokens=tuple(ahead),
        at_s=tuple(None if pace_s is None else round(now_s + (t - tokens) * pace_s, 1) for t in ahead),
        loss=tuple(round(value, 5) for value in loss),
        low=tuple(round(value - band, 5) for value in loss),
        high=tuple(round(value + band, 5) for value in loss),
    )
