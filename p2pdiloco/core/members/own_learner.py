"""Learner of this node, as it last said how it is doing."""

from __future__ import annotations

from p2pdiloco.core.api.events import LearnerStatus
from p2pdiloco.util import MovingAverage


class OwnLearner:
    """Newest word of this node's learner, and its pace."""

    def __init__(self) -> None:
        self.status = LearnerStatus(False, 0, 0, 0.0, 0.0, None)
        self.running = False
        self._step_time = MovingAverage()

    @property
    def step_s(self) -> float:
        """Moving average of its inner step time; 0: not known."""
        return self._step_time.value

    def said(self, status: LearnerStatus) -> bool:
        """Take in where it is. Tell whether others wait for that: it began, or its pace is known now."""
        news = status.running and not self.running
        self.status, self.running = status, status.running
        if status.running and status.step_time_s > 0:
            news = news or self.step_s == 0
            self._step_time.add(status.step_time_s)
        return news

    def lost(self) -> None:
        """Take in that it crashed."""
        self.running = False
