"""Moving averages and the grace window (algorithm.md section 1, "Grace window")."""

from __future__ import annotations

EMA_SHARE = 0.2
"""How much the newest sample counts."""


class Ema:
    """Exponential moving average; the first sample stands as it is."""

    def __init__(self, start: float = 0.0) -> None:
        self.value = start
        self._empty = True

    def add(self, sample: float) -> None:
        """Take one sample in."""
        self.value = sample if self._empty else (1 - EMA_SHARE) * self.value + EMA_SHARE * sample
        self._empty = False


def grace_window_s(
    delay_steps: int, step_s: float, quorum_s: float, sync_s: float, fraction: float, cap_s: float
) -> float:
    """How long a syncer waits after quorum: min(gamma * slack, cap), never negative.

    slack = tau * xi_step - (xi_quorum + xi_sync): the result is still back before step t + tau.
    """
    slack_s = delay_steps * step_s - (quorum_s + sync_s)
    return max(0.0, min(fraction * slack_s, cap_s))


def backoff_s(first_s: float, attempt: int) -> float:
    """Pause before attempt 1, 2, …: doubles, at most 16 times the first."""
    return first_s * min(16, 1 << min(attempt - 1, 4)) if attempt > 0 else 0.0
