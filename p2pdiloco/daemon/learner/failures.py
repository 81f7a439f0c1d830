"""Failures of learners: whether there is another one, and after what pause."""

from __future__ import annotations

import math

from p2pdiloco.daemon.learner.host import LearnerExited
from p2pdiloco.learner.lifeline import EXIT_DATA, EXIT_TOO_LARGE

RESTART_MAX_S = 30.0
HEALTHY_S = 60.0
"""Life of a learner after which it died of something new: the back-off begins again."""
FAILED_STARTS = 3
"""Number of learners in a row without an inner step after which there is none."""


class Failures:
    """Count of learners' ends."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._by_data = 0
        """Learners in a row that ended for data that cannot be read."""
        self._without_step = 0
        """Learners in a row that ended before they had made an inner step."""
        self.stepped = False
        """True: the present one has made an inner step, so nothing was lacking for one."""
        self._ready_s = math.inf
        """Time at which the present one began to make inner steps."""

    def ready(self, now: float) -> None:
        """Note that the learner begins to make inner steps."""
        self._ready_s = now

    def made_step(self) -> None:
        """Note that the learner has made an inner step."""
        self.stepped, self._without_step = True, 0

    def ended(self, exited: LearnerExited, guest: bool, now: float) -> float:
        """Return the seconds until the next one is started; infinite: never, a learner cannot train here.

        A `guest`'s start is its owner's.
        """
        if now - self._ready_s >= HEALTHY_S:
            self._in_a_row = self._by_data = 0
        by_data = exited.code == EXIT_DATA and not guest
        self._by_data = self._by_data + 1 if by_data else 0
        # Of one that had trained a read may have failed for once: the next one comes to the same place soon.
        no_data = by_data and (self._by_data > 1 or not self.stepped)
        fits_now = exited.code == EXIT_TOO_LARGE  # the next one takes less: it need not be waited for
        self._in_a_row += not fits_now
        self._without_step += not self.stepped and not guest and not fits_now
        self.reset()
        if self._without_step >= FAILED_STARTS or no_data:
            return math.inf
        return 0.0 if guest else min(RESTART_MAX_S, 0.2 * 4 ** min(max(self._in_a_row - 1, 0), 4))

    def reset(self) -> None:
        """Note that there is no learner."""
        self.stepped, self._ready_s = False, math.inf
