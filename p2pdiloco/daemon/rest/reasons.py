"""Reasons why this node's learner rests: a closed list of what its machine's owner may want."""

from __future__ import annotations

import datetime
import enum

from msgspec import Struct


class RestReason(enum.Enum):
    """Reason of the machine's owner. The first that holds, in this order, is the one that is said."""

    FINISHING = "finishing"
    """Wish to leave, `p2pdiloco finish`: what was made is handed over, then the node leaves."""
    PAUSED = "paused"
    """Wish to rest, `p2pdiloco pause`."""
    TRANSFER = "transfer"
    """Budget, `--max-transfer`: this month's bytes are used up. The node leaves, and comes back by itself."""
    HOURS = "hours"
    """Schedule, `--hours`: it is outside of them."""
    BATTERY = "battery"
    """Battery, `--not-on-battery`: there is no mains power."""
    IN_USE = "in-use"
    """Use, `--when-idle`: somebody, or another program, uses the machine."""
    TEMPERATURE = "temperature"
    """Bound, `--max-temperature`: GPU or CPU are hotter."""
    POWER = "power"
    """Bound, `--max-power`: the GPU draws more."""

    @property
    def is_at_once(self) -> bool:
        """True: it begins and ends as it is said, by a person or a clock."""
        return self in _AT_ONCE

    @property
    def leaves(self) -> bool:
        """True: the node leaves its run for it, when all is handed over."""
        return self is RestReason.FINISHING or self is RestReason.TRANSFER


_AT_ONCE = frozenset({RestReason.FINISHING, RestReason.PAUSED, RestReason.TRANSFER, RestReason.HOURS})


class Finding(Struct, frozen=True):
    """Finding of one source: why the learner is to rest now."""

    reason: RestReason
    words: str
    """Words for people: "on battery", "the GPU is hotter than 80 °C"."""
    ends: str
    """Words on what ends it, for people: "mains power is back"."""
    since: float = 0.0
    """Time since which it is so, in seconds since 1970; 0: since it was found first."""


class Rest(Struct, frozen=True):
    """Rest of this node's learner."""

    reason: RestReason
    since: float
    """Seconds since 1970 by this machine's clock."""
    words: str
    ends: str
    handed_over: bool = False
    """True: all that was made is merged."""

    def line(self) -> str:
        """Say it in one line: "idle: on battery since 14:02, until mains power is back"."""
        return f"idle: {self.words} since {clock_text(self.since)}, until {self.ends}"


def clock_text(at: float, now: float | None = None) -> str:
    """Word a time for people: "14:02" within the last half a day, else with the day."""
    when = datetime.datetime.fromtimestamp(at)
    today = datetime.datetime.now() if now is None else datetime.datetime.fromtimestamp(now)
    near = abs((today - when).total_seconds()) < 12 * 3600
    return when.strftime("%H:%M" if near else "%Y-%m-%d %H:%M")
