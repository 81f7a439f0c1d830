"""Idleness of this machine: for how long nobody has used it, by input and by the work of other programs.

Input is what the login manager says of sessions with a desktop (`IdleHint`), what the kernel counts of
keyboard and mouse where they have an interrupt of their own (`/proc/interrupts`: PS/2, touchpads), and the
time of the last key at a terminal (`/dev/pts`, `/dev/tty*`). Work is what other programs compute: more than
a quarter of the machine over half a minute, without those that step back (niceness above 0), as this node's
learner does.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import psutil

PROC, DEV, SESSIONS = Path("/proc"), Path("/dev"), Path("/run/systemd/sessions")
BUSY_SHARE = 0.25
"""Share of all processors, used by others, above which the machine is in use."""
LOAD_S = 30.0
"""Time over which that is measured."""
_INPUT = re.compile(r"i8042|hid|elan|synaptics|touchpad|wacom", re.IGNORECASE)


class Idleness:
    """Watch of who uses this machine."""

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
        """Count the interrupts of keyboards and mice."""
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
