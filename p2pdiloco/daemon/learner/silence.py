"""Silence of a learner: whether it hangs (a driver, a disk, or somebody who stopped the process).

Time is counted in the daemon's own ticks: a daemon that was stopped itself, or a machine that slept, accuses
nobody.
"""

from __future__ import annotations

from typing import Literal

TICK_S = 5.0
DOUBT_S, DOUBT_STEPS = 60.0, 20
"""Silence, in seconds and in its usual inner steps, after which it is said."""
HANGS_S, HANGS_STEPS = 600.0, 100
"""Silence after which the learner is ended: evaluations and saves take some minutes at most."""


class Silence:
    """Time for which nothing has been heard of a learner."""

    def __init__(self) -> None:
        self.silent_s = 0.0
        self._doubted = False

    def heard(self) -> bool:
        """Note that it has said something; return whether it was doubted before."""
        doubted, self.silent_s, self._doubted = self._doubted, 0.0, False
        return doubted

    def tick(self, step_s: float) -> Literal["", "doubtful", "hangs"]:
        """Count `TICK_S`, which have gone by; return what is to be thought of the learner now.

        `step_s`: its usual inner step; 0: it has made none yet. Then it may compile, or load what is large,
        for as long as it likes.
        """
        self.silent_s += TICK_S
        if step_s and self.silent_s >= max(HANGS_S, HANGS_STEPS * step_s):
            return "hangs"
        if not self._doubted and self.silent_s >= max(DOUBT_S, DOUBT_STEPS * step_s):
            self._doubted = True
            return "doubtful"
        return ""
