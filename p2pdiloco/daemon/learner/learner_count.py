"""Number of learners that train in the run, as a learner is told it: it reckons by it where the run is.

Told a second late, a whole swarm's first steps were a fourth as long as they should be, and the next ones
four times as long: a run of 700 steps ended 1 to 4 % worse.
"""

from __future__ import annotations

from typing import Protocol

from p2pdiloco.core.api.effects import CommitVersion
from p2pdiloco.core.api.types import MAX_CONTRIBUTORS
from p2pdiloco.core.chain import most_learners


class KnowsLearners(Protocol):
    """Source of how many train (`core.shared.Shared`)."""

    @property
    def expected_members(self) -> int:
        """Members that the run was to have at its start; 0: nobody knows."""

    def training(self, now: float) -> int:
        """Return how many learners are known to train, this one included."""


class LearnerCount:
    """Number of learners of the run, as versions and the swarm show it."""

    def __init__(self, swarm: KnowsLearners) -> None:
        self._swarm = swarm
        self._merged_together = 0
        """Number of contributors of the version made last: in a run of many groups we hear of our
        neighbours only."""
        self._most = MAX_CONTRIBUTORS

    def committed(self, effect: CommitVersion) -> None:
        """Take in a version that is being committed."""
        header = effect.version.header
        self._merged_together = len(header.contributors)
        self._most = most_learners(header.number, effect.watermarks, self._swarm.expected_members)

    def at(self, now: float) -> int:
        """Count all learners, ours included."""
        return max(1, min(self._swarm.training(now), self._most), self._merged_together)
