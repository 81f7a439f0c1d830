"""Answer times, time-outs, and the grace window (Decoupled DiLoCo, arXiv 2604.21428).

Rules: docs/protocol/rounds.md, section 3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

ANSWER_SHARE = 0.75
"""Share of the sync interval, H inner steps, that a round may wait for answers to its closing call."""

RHYTHM_SHARE = 0.5
"""Share of the time that the fastest learner takes for H inner steps: no round begins sooner after a
version."""
ARRIVAL_INTERVALS = 16
"""Sync intervals for which a round that no majority is in waits for payloads that are on their way."""
ARRIVAL_SHARE = 0.75
"""Share of the patience of those that are in for which a round waits so: a merge and a version follow."""


class AnswerTime:
    """Time until the last live learner has answered a closing call.

    Smoothed mean and mean deviation with the weights of TCP's retransmission timer (RFC 6298): samples have a
    long tail, and waiting for nearly all of them costs nothing in the rounds in which all answer sooner.
    """

    def __init__(self) -> None:
        self._mean_s: float | None = None
        self._deviation_s = 0.0

    def add(self, sample_s: float) -> None:
        """Take in how long after the call a round's last answer came (or had not come by then)."""
        if self._mean_s is None:
            self._mean_s, self._deviation_s = sample_s, sample_s / 2
            return
        self._deviation_s += (abs(sample_s - self._mean_s) - self._deviation_s) / 4
        self._mean_s += (sample_s - self._mean_s) / 8

    @property
    def expected_s(self) -> float:
        """Time in which nearly all answers are in; infinite while nothing is known. A new syncer's first
        round waits as long as it may: else it would close before anybody's answer and learn from that."""
        return math.inf if self._mean_s is None else self._mean_s + 4 * self._deviation_s


def grace_window_s(
    delay_steps: int,
    step_s: float,
    quorum_s: float,
    sync_s: float,
    fraction: float,
    cap_s: float,
    answer_s: float = 0.0,
) -> float:
    """Compute how long a syncer waits after quorum: min(max(gamma * slack, answer time), cap), never
    negative.

    slack = tau * xi_step - (xi_quorum + xi_sync), as in the paper: the result is still back before step t +
    tau. Where tau steps are shorter than a message's way there and back, nobody could answer in that time;
    hence `answer_s`, what answers are expected to take, within `answer_bound_s`.
    """
    slack_s = delay_steps * step_s - (quorum_s + sync_s)
    return max(0.0, min(max(fraction * slack_s, answer_s), cap_s))


def answer_bound_s(inner_steps: int, step_s: float, level: int = 0) -> float:
    """Compute the most that is waited beyond the slack: a share (`ANSWER_SHARE`) of the time between two
    contributions of a learner, so that a round has ended before the next one is due. Above the leaves, where
    those below have such a window first, half as much again."""
    return ANSWER_SHARE * inner_steps * step_s * (1.5 if level else 1.0)


def patience_s(floor_s: float, round_s: float, delay_steps: int, step_s: float) -> float:
    """Compute how long a learner waits for the version that contains what its syncer took: four times what
    such rounds take, their payloads' way included, or four times tau inner steps."""
    return max(floor_s, 4 * round_s, 4 * delay_steps * step_s)


def grace_cap_s(cap_s: float, level: int) -> float:
    """Compute the cap of the windows on that level: peers that are called there first have a window of their
    own."""
    return cap_s * (level + 1)


def earliest(times: Iterable[float | None]) -> float | None:
    """Find the first of these times, None if there is none. A loop, since it is asked after every event."""
    first_s = None
    for time_s in times:
        if time_s is not None and (first_s is None or time_s < first_s):
            first_s = time_s
    return first_s


def backoff_s(first_s: float, attempt: int) -> float:
    """Compute the pause before attempt 1, 2, …: doubles, at most 16 times the first."""
    return first_s * min(16, 1 << min(attempt - 1, 4)) if attempt > 0 else 0.0
