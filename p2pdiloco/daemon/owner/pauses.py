"""Pauses of the learner for its machine's owner: sources of a reason, and the `Governor` that decides.

`outside_hours`, `on_battery`, `in_use`, `Heat` and `Power` each look at one thing; `OwnersMachine` makes
sources of them, from what the machine tells (`Idleness`, `Sensors`).
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from p2pdiloco.config.settings import DAY_MIN, Bounds, Span, next_begin_min
from p2pdiloco.daemon.budgets import begun
from p2pdiloco.daemon.display.snapshot import Finding, PauseReason, PauseRow, clock_text, duration
from p2pdiloco.errors import ConfigError
from p2pdiloco.util import MovingAverage

BEGINS_AFTER_S = {PauseReason.BATTERY: 5.0, PauseReason.TEMPERATURE: 10.0, PauseReason.POWER: 15.0}
"""Time for which other reasons must hold before the learner rests; it is 0 for who is not here."""
ENDS_AFTER_S = 30.0
"""Time for which other reasons must not hold before it goes on."""
LEAST_S = 60.0
"""Least time of a rest for other reasons: what is handed over, and begun again, has its price."""
_ORDER = {reason: number for number, reason in enumerate(PauseReason)}


class _Held:
    """Reason that was seen."""

    def __init__(self, finding: Finding, now: float, wall: float) -> None:
        self.finding = finding
        self.since = finding.since or wall
        self.seen_first_s = self.seen_last_s = now
        self.began_s: float | None = None
        """Time since which the learner rests for it; None: it does not, yet."""


Look = Callable[[float], Finding | None]
"""Source of one reason: looks at one thing, at a time in seconds since 1970, and finds whether the learner is
to pause for it now; None: nothing keeps the learner."""


class Governor:
    """Decides whether the learner pauses: puts what the sources find together, steadily, so that it does
    not flap."""

    def __init__(self, sources: Sequence[Look]) -> None:
        self._sources = list(sources)
        self._held: dict[PauseReason, _Held] = {}
        self._is_changed = False

    def use(self, sources: Sequence[Look]) -> None:
        """Go by these sources from now on. A reason that none of them finds ends with the next look."""
        self._sources, self._is_changed = list(sources), True

    def look(self, now: float, wall: float, words: Sequence[Finding] = ()) -> PauseRow | None:
        """Look at everything. `now` is a clock that is never set, `wall` the time of day. `words`: what
        people said.

        Returns the rest for the first reason that holds; None: it trains.
        """
        looked = (source(wall) for source in self._sources)
        found = [*words, *(finding for finding in looked if finding is not None)]
        for finding in found:
            held = self._held.setdefault(finding.reason, _Held(finding, now, wall))
            held.finding, held.seen_last_s = finding, now
            if held.began_s is None and now - held.seen_first_s >= BEGINS_AFTER_S.get(finding.reason, 0.0):
                held.began_s = now
        holding = {finding.reason for finding in found}
        stays = self._held.items() if not self._is_changed else ()
        lasting = {reason for reason, held in stays if _lasts(reason, held, now)}
        self._held = {r: h for r, h in self._held.items() if r in holding | lasting}
        self._is_changed = False
        resting = [held for held in self._held.values() if held.began_s is not None]
        if not resting:
            return None
        first = min(resting, key=lambda held: _ORDER[held.finding.reason])
        why, ends = first.finding.words, first.finding.ends
        line = f"idle: {why} since {clock_text(first.since)}, until {ends}"
        return PauseRow(reason=first.finding.reason, since=first.since, words=line[:240], ends=ends[:240])


def _lasts(reason: PauseReason, held: _Held, now: float) -> bool:
    """Tell whether a reason that is not found any more goes on to count."""
    if reason.is_at_once or held.began_s is None:
        return False
    return now - held.seen_last_s < ENDS_AFTER_S or now - held.began_s < LEAST_S


PROC, DEV, SESSIONS = Path("/proc"), Path("/dev"), Path("/run/systemd/sessions")
BUSY_SHARE = 0.25
"""Share of all processors, used by others, above which the machine is in use."""
LOAD_S = 30.0
"""Time over which that is measured."""
_INPUT = re.compile(r"i8042|hid|elan|synaptics|touchpad|wacom", re.IGNORECASE)


class Idleness:
    """Idleness of this machine: for how long nobody has used it, by input and by the work of other programs.

    Input is what the login manager says of sessions with a desktop (`IdleHint`), what the kernel counts of
    keyboard and mouse where they have an interrupt of their own (`/proc/interrupts`: PS/2, touchpads), and
    the time of the last key at a terminal (`/dev/pts`, `/dev/tty*`). Work is what other programs compute:
    more than a quarter of the machine over half a minute, without those that step back (niceness above 0), as
    this node's learner does.
    """

    def __init__(
        self,
        wall: Callable[[], float] = time.time,
        proc: Path = PROC,
        dev: Path = DEV,
        busy_s: Callable[[], float] | None = None,
        processors: int = 0,
        sessions: Path = SESSIONS,
    ) -> None:
        """`busy_s`: processor seconds of other programs since some time; None: as the kernel says."""
        self._wall, self._proc, self._dev, self._sessions = wall, proc, dev, sessions
        self._busy_s = busy_s or OthersWork().seconds
        self._processors = processors or psutil.cpu_count() or 1
        self._used_at = wall()
        self._interrupts = self._input_interrupts()
        self._load_since, self._load_before_s = wall(), self._busy_s()
        self.by = "not watched for long enough yet"
        """Use that was seen last."""

    @property
    def tells(self) -> bool:
        """True: this machine tells something of its use."""
        return (self._proc / "stat").exists() or bool(self._terminals())

    def idle_s(self) -> float:
        """Say for how long nobody has used it; no longer than this node has watched where only that
        tells."""
        now = self._wall()
        if now < self._used_at:  # the clock was set back
            self._used_at = now
        found = [(at, "a key at a terminal") for at in self._terminals() if at <= now]
        found += [(at, "the desktop") for at in self._desktops(now)]
        interrupts = self._input_interrupts()
        if interrupts != self._interrupts:
            self._interrupts = interrupts
            found.append((now, "keyboard or mouse"))
        if self._others_compute(now):
            found.append((now, "other programs compute"))
        for at, by in found:
            if at > self._used_at:
                self._used_at, self.by = at, by
        return now - self._used_at

    def _terminals(self) -> list[float]:
        """List when somebody last typed at each terminal."""
        found = []
        for pattern in ("pts/[0-9]*", "tty[0-9]*"):
            for path in self._dev.glob(pattern):
                with contextlib.suppress(OSError):
                    stat = path.stat()
                    if stat.st_uid != 0 or pattern.startswith("pts"):  # a tty that nobody is logged in at
                        found.append(stat.st_atime)
        return found

    def _desktops(self, now: float) -> list[float]:
        """List until when the login manager's sessions were in use, those with a desktop."""
        found = []
        with contextlib.suppress(OSError):
            for path in self._sessions.iterdir():
                lines = path.read_text(errors="replace").splitlines()[:64]
                said = dict(line.partition("=")[::2] for line in lines)
                if said.get("TYPE") not in ("x11", "wayland", "mir") or said.get("IS_DISPLAY") == "0":
                    continue
                if said.get("IDLE_HINT") == "0" and said.get("ACTIVE", "1") == "1":
                    found.append(now)
                elif (since := said.get("IDLE_SINCE_HINT", "")).isdigit() and int(since):
                    found.append(min(now, int(since) / 1e6))
        return found

    def _input_interrupts(self) -> int:
        try:
            lines = (self._proc / "interrupts").read_text(errors="replace").splitlines()
        except OSError:
            return 0
        words = (line.split() for line in lines if _INPUT.search(line))
        return sum(int(word) for line in words for word in line[1:] if word.isdigit())

    def _others_compute(self, now: float) -> bool:
        """Tell whether others had more than their share of the processors in the last `LOAD_S`."""
        passed_s = now - self._load_since
        if passed_s < 0:
            self._load_since = now
        if passed_s < LOAD_S:
            return False
        busy_s = self._busy_s()
        share = (busy_s - self._load_before_s) / passed_s / self._processors
        self._load_since, self._load_before_s = now, busy_s
        return share > BUSY_SHARE


class OthersWork:
    """Processor seconds of all programs that do not step back, without this node's own."""

    def __init__(self) -> None:
        self._own: dict[int, float] = {}
        """Seconds of each of our processes; of those that have ended, the last that was seen."""

    def seconds(self) -> float:
        """Count them since the machine's start. It may go back a little: what is told is rounded."""
        times = psutil.cpu_times()
        total = times.user + times.system
        with contextlib.suppress(psutil.Error):
            me = psutil.Process(os.getpid())
            for process in (me, *me.children(recursive=True)):
                with contextlib.suppress(psutil.Error):
                    if process.nice() <= 0:
                        used = process.cpu_times()
                        self._own[process.pid] = used.user + used.system
        return float(total - sum(self._own.values()))


HWMON = Path("/sys/class/hwmon")
CPU_CHIPS = ("coretemp", "k10temp", "zenpower", "cpu_thermal", "acpitz")
GPU_CHIPS = ("amdgpu", "i915", "xe", "nouveau")
NVML = "libnvidia-ml.so.1"
MAX_GPUS = 64


def mains() -> bool | None:
    """Tell whether there is mains power; None: this machine has no battery, or does not tell."""
    if not hasattr(psutil, "sensors_battery"):
        return None
    try:
        battery = psutil.sensors_battery()
    except (OSError, ValueError):
        return None
    plugged = battery.power_plugged if battery is not None else None
    return bool(plugged) if plugged is not None else None


class Sensors:
    """Sensors of CPU and GPUs, looked for once."""

    def __init__(self, hwmon: Path = HWMON, nvml: str = NVML) -> None:
        self._hwmon = hwmon
        self._nvml = _Nvml.load(nvml)

    def hottest_c(self) -> tuple[float, str] | None:
        """Find the hottest of GPU and CPU, in degrees Celsius, and which it is."""
        found = [(value, "CPU") for value in self._chips(CPU_CHIPS, "temp*_input", 1000)]
        found += [(value, "GPU") for value in self._chips(GPU_CHIPS, "temp*_input", 1000)]
        if self._nvml is not None:
            found += [(value, "GPU") for value in self._nvml.temperatures_c()]
        return max(found, default=None)

    def power_w(self) -> float | None:
        """Add up what the GPUs draw, in watts."""
        found = list(self._chips(GPU_CHIPS, "power1_average", 1e6))
        if self._nvml is not None:
            found += self._nvml.powers_w()
        return sum(found) if found else None

    def _chips(self, names: tuple[str, ...], pattern: str, scale: float) -> Iterator[float]:
        with contextlib.suppress(OSError):  # a chip that goes away, or no such folder
            for chip in sorted(self._hwmon.iterdir()):
                if _line(chip / "name") in names:
                    for path in sorted(chip.glob(pattern)):
                        with contextlib.suppress(ValueError):
                            yield float(_line(path)) / scale


def _line(path: Path) -> str:
    try:
        with path.open(encoding="ascii", errors="replace") as file:
            return file.read(64).strip()
    except OSError:  # a sensor that sleeps
        return ""


class _Nvml:
    """NVIDIA's management library, which comes with the driver: the few functions that are needed."""

    def __init__(self, library: Any) -> None:
        self._library = library

    @classmethod
    def load(cls, name: str) -> _Nvml | None:
        """Load and begin it; None: there is none, or no GPU of NVIDIA's."""
        try:
            library = ctypes.CDLL(name)
            return cls(library) if library.nvmlInit_v2() == 0 else None
        except (OSError, AttributeError):
            return None

    def temperatures_c(self) -> list[float]:
        """List the GPUs' temperatures, in degrees Celsius."""
        return [v for d in self._devices() if (v := self._number("nvmlDeviceGetTemperature", d, 0)) > 0]

    def powers_w(self) -> list[float]:
        """List what each GPU draws, in watts."""
        found = (self._number("nvmlDeviceGetPowerUsage", device) for device in self._devices())
        return [milliwatts / 1000 for milliwatts in found if milliwatts > 0]

    def _devices(self) -> list[ctypes.c_void_p]:
        count = ctypes.c_uint()
        if self._library.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return []
        found = []
        for index in range(min(count.value, MAX_GPUS)):
            device = ctypes.c_void_p()
            if self._library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0:
                found.append(device)
        return found

    def _number(self, function: str, device: ctypes.c_void_p, *arguments: int) -> float:
        value = ctypes.c_uint()
        call = getattr(self._library, function, None)
        if call is None or call(device, *arguments, ctypes.byref(value)) != 0:
            return 0.0
        return float(value.value)


COOLER_C = 5.0
"""Degrees below the bound at which it is cool enough again."""
LESS_POWER = 0.8
"""Share of the bound at which little enough is drawn again."""
LOOK_EVERY_S = 5.0
"""Time between two looks at what takes a while to read."""


Begin = Callable[[Callable[[], Finding | None]], Future[Finding | None]]


def outside_hours(spans: tuple[Span, ...], wall: float) -> Finding | None:
    """Look at the hours of the day, by this machine's clock."""
    when = datetime.datetime.fromtimestamp(wall)
    week_min = when.weekday() * DAY_MIN + when.hour * 60 + when.minute
    if any(span.holds(week_min) for span in spans):
        return None
    begins = wall - when.second + 60 * next_begin_min(spans, week_min)
    return Finding(PauseReason.HOURS, "outside of its hours", clock_text(begins, wall))


def on_battery(plugged: Callable[[], bool | None], _wall: float) -> Finding | None:
    """Look at mains power."""
    if plugged() is not False:  # one that is not told any more keeps nobody
        return None
    return Finding(PauseReason.BATTERY, "on battery", "mains power is back")


def in_use(idleness: Idleness, least_s: float, _wall: float) -> Finding | None:
    """Look at the use of the machine by people and other programs."""
    if idleness.idle_s() >= least_s:
        return None
    words = f"the machine is in use ({idleness.by})"
    return Finding(PauseReason.IN_USE, words, f"nobody has used it for {duration(least_s)}")


@dataclass
class Heat:
    """Temperature of the hottest of GPU and CPU."""

    _hottest_c: Callable[[], tuple[float, str] | None]
    _bound_c: float

    def __post_init__(self) -> None:
        self._is_hot = False

    def look(self, wall: float) -> Finding | None:
        found = self._hottest_c()
        if found is None:
            return None
        degrees, where = found
        cool_c = self._bound_c - COOLER_C
        self._is_hot = degrees > (cool_c if self._is_hot else self._bound_c)
        if not self._is_hot:
            return None
        words = f"the {where} is hotter than {self._bound_c:g} °C"
        return Finding(PauseReason.TEMPERATURE, words, f"it is at {cool_c:g} °C")


@dataclass
class Power:
    """Power that the GPUs draw, averaged."""

    _power_w: Callable[[], float | None]
    _bound_w: float

    def __post_init__(self) -> None:
        self._average_w = MovingAverage()
        self._is_over = False

    def look(self, wall: float) -> Finding | None:
        watts = self._power_w()
        if watts is None:
            return None
        self._average_w.add(watts)
        least_w = LESS_POWER * self._bound_w
        self._is_over = self._average_w.value > (least_w if self._is_over else self._bound_w)
        if not self._is_over:
            return None
        words = f"the GPU draws more than {self._bound_w:g} W"
        return Finding(PauseReason.POWER, words, f"it draws {least_w:g} W")


@dataclass
class Seldom:
    """A source that is looked at every few seconds only, beside the event loop: /proc and drivers take their
    time on a loaded machine, and a driver may never answer. Until a look is done the one before holds."""

    _source: Look
    _begin: Begin
    """Function that begins a look."""

    def __post_init__(self) -> None:
        self._at = float("-inf")
        self._looking: Future[Finding | None] | None = None
        self._found: Finding | None = None

    def look(self, wall: float) -> Finding | None:
        if self._looking is None and not 0 <= wall - self._at < LOOK_EVERY_S:
            self._at = wall
            self._looking = self._begin(partial(self._source, wall))
        if self._looking is not None and self._looking.done():
            self._found, self._looking = self._looking.result(), None
        return self._found


@dataclass
class OwnersMachine:
    """Machine of its owner: makes the sources for the bounds, from what it tells."""

    _plugged: Callable[[], bool | None] = mains
    _sensors: Sensors | None = None
    _make_idleness: Callable[[], Idleness] = Idleness
    begin: Begin = begun

    def __post_init__(self) -> None:
        self._idleness: Idleness | None = None

    def sources(self, bounds: Bounds) -> list[Look]:
        """Make the sources.

        Raises:
            ConfigError: this machine does not tell what a bound is about.
        """
        found: list[Look] = []
        if bounds.hours:
            found.append(partial(outside_hours, bounds.hours))
        if bounds.not_on_battery:
            if self._plugged() is None:
                raise _untold("--not-on-battery", "whether it is on battery", "it has none, or hides it")
            found.append(self._seldom(partial(on_battery, self._plugged)))
        if bounds.idle_s:
            self._idleness = self._idleness or self._make_idleness()
            if not self._idleness.tells:
                raise _untold("--when-idle", "who uses it", "use --hours instead")
            found.append(self._seldom(partial(in_use, self._idleness, bounds.idle_s)))
        return found + self._of_sensors(bounds)

    def _seldom(self, source: Look) -> Look:
        return Seldom(source, self.begin).look

    def _of_sensors(self, bounds: Bounds) -> list[Look]:
        found: list[Look] = []
        if bounds.max_temperature_c or bounds.max_power_w:
            self._sensors = self._sensors or Sensors()
            hottest_c, power_w = self._sensors.hottest_c, self._sensors.power_w
            if bounds.max_temperature_c:
                if hottest_c() is None:
                    raise _untold("--max-temperature", "how hot it is", "containers often hide it")
                found.append(self._seldom(Heat(hottest_c, bounds.max_temperature_c).look))
            if bounds.max_power_w:
                if power_w() is None:
                    raise _untold(
                        "--max-power", "what its GPUs draw", "the driver does not say, or there is none"
                    )
                found.append(self._seldom(Power(power_w, bounds.max_power_w).look))
        return found


def _untold(flag: str, what: str, hint: str) -> ConfigError:
    return ConfigError(f"{flag}: this machine does not tell {what}", hint)
