"""Whether a learner hangs: a driver that never answers, a disk that is gone, a process that somebody stopped.

Time is counted in the daemon's own ticks: one that was stopped itself, or a machine that slept, accuses
nobody.
"""

from __future__ import annotations

from typing import Literal

TICK_S = 5.0
DOUBT_S, DOUBT_STEPS = 60.0, 20
"""After so long, and so many of its usual inner steps, it is said."""
HANGS_S, HANGS_STEPS = 600.0, 100
"""And after so long it is ended: evaluations and saves take some minutes at most."""


class Silence:
    """How long nothing has been heard of a learner."""

    def __init__(self) -> None:
        self.silent_s = 0.0
        self._doubted = False

    def heard(self) -> bool:
        """It has said something. Whether it was doubted before."""
        doubted, self.silent_s, self._doubted = self._doubted, 0.0, False
        return doubted

    def tick(self, step_s: float) -> Literal["", "doubtful", "hangs"]:
        """`TICK_S` have gone by. `step_s`: its usual inner step; 0: it has made none yet, and may compile, or
        load what is large, for as long as it likes."""
        self.silent_s += TICK_S
        if step_s and self.silent_s >= max(HANGS_S, HANGS_STEPS * step_s):
            return "hangs"
        if not self._doubted and self.silent_s >= max(DOUBT_S, DOUBT_STEPS * step_s):
            self._doubted = True
            return "doubtful"
        return ""
