"""Hours of a week in which a node may train, as people write them: "22-7", "sat-sun 0-24"."""

from __future__ import annotations

import re

from msgspec import Struct

from p2pdiloco.errors import ConfigError

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
DAY_MIN = 24 * 60
WEEK_MIN = 7 * DAY_MIN
MAX_SPANS = 16
_SPAN = re.compile(
    r"(?:([a-z]{3})(?:\s*-\s*([a-z]{3}))?\s+)?(\d{1,2})(?::(\d\d))?\s*-\s*(\d{1,2})(?::(\d\d))?"
)


class Span(Struct, frozen=True):
    """Span of time on each of some days; one that ends the next morning belongs to the day of its
    beginning."""

    days: tuple[int, ...]
    """Days, 0 is Monday."""
    begin_min: int
    """Minutes since midnight."""
    length_min: int

    def holds(self, week_min: int) -> bool:
        """Tell whether that minute of the week is in it."""
        return any((week_min - d * DAY_MIN - self.begin_min) % WEEK_MIN < self.length_min for d in self.days)


def parse_hours(text: str, flag: str = "--hours") -> tuple[Span, ...]:
    """Parse the hours; none are no bound.

    Raises:
        ConfigError: they cannot be made out; names the flag.
    """
    if not text.strip():
        return ()
    parts = text.strip().lower().split(",")
    spans = [_span(part.strip()) for part in parts[:MAX_SPANS]]
    found = tuple(span for span in spans if span is not None)
    if len(found) != len(parts):
        raise ConfigError(
            f'{flag} must be hours of the day, it is "{text}"',
            'for example 22-7, or "mon-fri 18:30-8, sat-sun 0-24": by the clock of this machine',
        )
    return found


def _span(text: str) -> Span | None:
    found = _SPAN.fullmatch(text)
    if found is None:
        return None
    first, last = found[1], found[2] or found[1]
    if first is not None and not {first, last} <= set(DAYS):
        return None
    days = range(7) if first is None else _days(DAYS.index(first), DAYS.index(last))
    begin, end = (int(found[n]) * 60 + int(found[n + 1] or 0) for n in (3, 5))
    minutes_are_right = int(found[4] or 0) < 60 and int(found[6] or 0) < 60
    if not minutes_are_right or begin >= DAY_MIN or end > DAY_MIN or begin == end:
        return None
    return Span(tuple(days), begin, (end - begin) % DAY_MIN or DAY_MIN)


def _days(first: int, last: int) -> tuple[int, ...]:
    return tuple((first + n) % 7 for n in range((last - first) % 7 + 1))


def next_begin_min(spans: tuple[Span, ...], week_min: int) -> int:
    """Find in how many minutes the next span begins, of one or more."""
    return min((day * DAY_MIN + s.begin_min - week_min) % WEEK_MIN for s in spans for day in s.days)
