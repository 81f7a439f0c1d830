"""Sources of rest: each looks at one thing, and says whether the learner is to rest for it now."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Protocol

from p2pdiloco.config.settings import DAY_MIN, Bounds, Span, next_begin_min
from p2pdiloco.daemon.apart import begun
from p2pdiloco.daemon.display.wording import duration
from p2pdiloco.daemon.rest.idleness import Idleness
from p2pdiloco.daemon.rest.readers import Sensors, mains
from p2pdiloco.daemon.rest.reasons import Finding, RestReason, clock_text
from p2pdiloco.errors import ConfigError
from p2pdiloco.util import MovingAverage

COOLER_C = 5.0
"""Degrees below the bound at which it is cool enough again."""
LESS_POWER = 0.8
"""Share of the bound at which little enough is drawn again."""
LOOK_EVERY_S = 5.0
"""Time between two looks at what takes a while to read."""


Begin = Callable[[Callable[[], Finding | None]], Future[Finding | None]]


class RestSource(Protocol):
    """RestSource of one reason."""

    def look(self, wall: float) -> Finding | None:
        """Say what it finds at that time, in seconds since 1970; None: nothing keeps the learner."""


class Hours:
    """Hours of the day, by this machine's clock."""

    def __init__(self, spans: tuple[Span, ...]) -> None:
        self._spans = spans

    def look(self, wall: float) -> Finding | None:
        """See `RestSource.look`."""
        when = datetime.datetime.fromtimestamp(wall)
        week_min = when.weekday() * DAY_MIN + when.hour * 60 + when.minute
        if any(span.holds(week_min) for span in self._spans):
            return None
        begins = wall - when.second + 60 * next_begin_min(self._spans, week_min)
        return Finding(RestReason.HOURS, "outside of its hours", clock_text(begins, wall))


class Battery:
    """Mains power."""

    def __init__(self, plugged: Callable[[], bool | None]) -> None:
        self._plugged = plugged

    def look(self, wall: float) -> Finding | None:
        """See `RestSource.look`."""
        if self._plugged() is not False:  # one that is not told any more keeps nobody
            return None
        return Finding(RestReason.BATTERY, "on battery", "mains power is back")


class InUse:
    """Use of the machine by people and other programs."""

    def __init__(self, idleness: Idleness, idle_s: float) -> None:
        self._idleness = idleness
        self._least_s = idle_s

    def look(self, wall: float) -> Finding | None:
        """See `RestSource.look`."""
        if self._idleness.idle_s() >= self._least_s:
            return None
        words = f"the machine is in use ({self._idleness.by})"
        return Finding(RestReason.IN_USE, words, f"nobody has used it for {duration(self._least_s)}")


class Heat:
    """Temperature of the hottest of GPU and CPU."""

    def __init__(self, hottest_c: Callable[[], tuple[float, str] | None], bound_c: float) -> None:
        self._hottest_c, self._bound_c = hottest_c, bound_c
        self._is_hot = False

    def look(self, wall: float) -> Finding | None:
        """See `RestSource.look`."""
        found = self._hottest_c()
        if found is None:
            return None
        degrees, where = found
        cool_c = self._bound_c - COOLER_C
        self._is_hot = degrees > (cool_c if self._is_hot else self._bound_c)
        if not self._is_hot:
            return None
        words = f"the {where} is hotter than {self._bound_c:g} °C"
        return Finding(RestReason.TEMPERATURE, words, f"it is at {cool_c:g} °C")


class Power:
    """Power that the GPUs draw, averaged."""

    def __init__(self, power_w: Callable[[], float | None], bound_w: float) -> None:
        self._power_w, self._bound_w = power_w, bound_w
        self._average_w = MovingAverage()
        self._is_over = False

    def look(self, wall: float) -> Finding | None:
        """See `RestSource.look`."""
        watts = self._power_w()
        if watts is None:
            return None
        self._average_w.add(watts)
        least_w = LESS_POWER * self._bound_w
        self._is_over = self._average_w.value > (least_w if self._is_over else self._bound_w)
        if not self._is_over:
            return None
        words = f"the GPU draws more than {self._bound_w:g} W"
        return Finding(RestReason.POWER, words, f"it draws {least_w:g} W")


class Seldom:
    """A source that is looked at every few seconds only, beside the event loop: /proc and drivers take their
    time on a loaded machine, and a driver may never answer. Until a look is done the one before holds."""

    def __init__(self, source: RestSource, begin: Begin = begun) -> None:
        """`begin`: begins a look."""
        self._source, self._begin = source, begin
        self._at = float("-inf")
        self._looking: Future[Finding | None] | None = None
        self._found: Finding | None = None

    def look(self, wall: float) -> Finding | None:
        """See `RestSource.look`."""
        if self._looking is None and not 0 <= wall - self._at < LOOK_EVERY_S:
            self._at = wall
            self._looking = self._begin(partial(self._source.look, wall))
        if self._looking is not None and self._looking.done():
            self._found, self._looking = self._looking.result(), None
        return self._found


class OwnersMachine:
    """Machine of its owner: makes the sources for the bounds, from what it tells."""

    def __init__(
        self,
        plugged: Callable[[], bool | None] = mains,
        sensors: Sensors | None = None,
        idleness: Callable[[], Idleness] = Idleness,
        begin: Begin = begun,
    ) -> None:
        self._begin = begin
        self._plugged, self._make_idleness = plugged, idleness
        self._sensors = sensors
        self._idleness: Idleness | None = None

    def sources(self, bounds: Bounds) -> list[RestSource]:
        """Make the sources.

        Raises:
            ConfigError: this machine does not tell what a bound is about.
        """
        found: list[RestSource] = []
        if bounds.hours:
            found.append(Hours(bounds.hours))
        if bounds.not_on_battery:
            if self._plugged() is None:
                raise _untold("--not-on-battery", "whether it is on battery", "it has none, or hides it")
            found.append(Seldom(Battery(self._plugged), self._begin))
        if bounds.idle_s:
            self._idleness = self._idleness or self._make_idleness()
            if not self._idleness.tells:
                raise _untold("--when-idle", "who uses it", "use --hours instead")
            found.append(Seldom(InUse(self._idleness, bounds.idle_s), self._begin))
        return found + self._of_sensors(bounds)

    def _of_sensors(self, bounds: Bounds) -> list[RestSource]:
        found: list[RestSource] = []
        if bounds.max_temperature_c or bounds.max_power_w:
            self._sensors = self._sensors or Sensors()
            hottest_c, power_w = self._sensors.hottest_c, self._sensors.power_w
            if bounds.max_temperature_c:
                if hottest_c() is None:
                    raise _untold("--max-temperature", "how hot it is", "containers often hide it")
                found.append(Seldom(Heat(hottest_c, bounds.max_temperature_c), self._begin))
            if bounds.max_power_w:
                if power_w() is None:
                    raise _untold(
                        "--max-power", "what its GPUs draw", "the driver does not say, or there is none"
                    )
                found.append(Seldom(Power(power_w, bounds.max_power_w), self._begin))
        return found


def _untold(flag: str, what: str, hint: str) -> ConfigError:
    return ConfigError(f"{flag}: this machine does not tell {what}", hint)
