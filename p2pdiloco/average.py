"""Moving averages: what is measured again and again, the newest sample with a fixed weight."""

from __future__ import annotations

SHARE = 0.2
"""Weight of the newest sample."""


class MovingAverage:
    """Exponential moving average; the first sample stands as it is, before it the value is 0."""

    def __init__(self, share: float = SHARE) -> None:
        self._share = share
        self.value = 0.0
        self.empty = True

    def add(self, sample: float) -> None:
        """Take one sample in."""
        self.value = sample if self.empty else (1 - self._share) * self.value + self._share * sample
        self.empty = False
