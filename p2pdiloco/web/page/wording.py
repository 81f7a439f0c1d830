"""Wording of a page: numbers, ages and rates, as its templates and its script write them."""

from __future__ import annotations

from datetime import UTC, datetime

from p2pdiloco.daemon.display.snapshot import count
from p2pdiloco.web.words import MarkKind, MemberWord, Pulse, Why

NOW_S = 2.0
"""Age up to which something happened just now."""
DAY_S = 86400.0

MEMBER_SHAPES = {
    MemberWord.HERE: "full",
    MemberWord.BEHIND: "half",
    MemberWord.RESTING: "ring",
    MemberWord.SILENT: "cross",
}
"""Shape beside a member's state: nothing is told by its colour alone."""
TONES = {
    MemberWord.HERE: "good",
    MemberWord.BEHIND: "warn",
    MemberWord.RESTING: "calm",
    MemberWord.SILENT: "bad",
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
WHY = {
    Why.SILENT: "not heard of",
    Why.CATCHING_UP: "catching up",
    Why.OLD_VERSIONS: "holds old versions",
    Why.NOT_MERGED: "in none of the last merges",
    Why.NO_DISK: "disk full: no vote",
    Why.THIN_UPLINK: "thin uplink",
    Why.NOT_TRAINING: "no learner runs there",
    Why.DISAGREES: "disagrees with the others",
    Why.EXPELLED: "expelled by this node",
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
