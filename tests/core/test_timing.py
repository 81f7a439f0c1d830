"""Moving averages, back-off and the grace window (arXiv 2604.21428)."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdiloco.core.base import AnswerTime, answer_bound_s, backoff_s, grace_window_s
from p2pdiloco.util import MovingAverage

seconds = st.floats(0, 1e6)


@pytest.mark.parametrize(
    ("tau", "step_s", "quorum_s", "sync_s", "gamma", "cap_s", "expected_s"),
    [
        (2, 1.0, 0.5, 0.5, 0.8, 10.0, 0.8),  # gamma x slack
        (2, 1.0, 0.5, 0.5, 0.8, 0.3, 0.3),  # the cap
        (2, 1.0, 1.5, 0.5, 0.8, 10.0, 0.0),  # no slack
        (2, 1.0, 9.0, 0.5, 0.8, 10.0, 0.0),  # less than none
        (2, 0.0, 0.0, 0.0, 0.8, 10.0, 0.0),  # nobody has made a step yet
    ],
)
def test_grace_window(
    tau: int, step_s: float, quorum_s: float, sync_s: float, gamma: float, cap_s: float, expected_s: float
) -> None:
    assert grace_window_s(tau, step_s, quorum_s, sync_s, gamma, cap_s) == pytest.approx(expected_s)


@given(st.integers(1, 100), seconds, seconds, seconds, st.floats(0, 0.99), st.floats(0, 100))
def test_the_result_is_back_in_time(
    tau: int, step_s: float, quorum_s: float, sync_s: float, gamma: float, cap_s: float
) -> None:
    grace_s = grace_window_s(tau, step_s, quorum_s, sync_s, gamma, cap_s)
    assert 0 <= grace_s <= cap_s
    assert grace_s == 0 or quorum_s + sync_s + grace_s <= tau * step_s * (1 + 1e-9)


def test_an_average_starts_at_the_first_sample_and_moves_by_a_fifth() -> None:
    average = MovingAverage()
    average.add(10.0)
    assert average.value == 10.0
    average.add(20.0)
    assert average.value == pytest.approx(12.0)


def test_backoff_doubles_and_is_bounded() -> None:
    assert [backoff_s(0.3, n) for n in (0, 1, 2, 3)] == pytest.approx([0.0, 0.3, 0.6, 1.2])
    assert backoff_s(0.3, 5) == backoff_s(0.3, 10_000) == pytest.approx(16 * 0.3)


@given(st.floats(-10, 10), st.floats(0, 100), seconds)
def test_the_answer_time_is_a_floor_of_the_window_below_the_cap(
    slack_s: float, cap_s: float, answer_s: float
) -> None:
    grace_s = grace_window_s(1, max(slack_s, 0.0), max(-slack_s, 0.0), 0.0, 0.8, cap_s, answer_s)
    assert min(answer_s, cap_s) <= grace_s <= cap_s
    assert grace_s == pytest.approx(min(cap_s, max(answer_s, 0.8 * slack_s)))


def test_the_answer_time_covers_nearly_all_answers_and_forgets() -> None:
    answers = AnswerTime()
    assert answers.expected_s == math.inf  # a new syncer waits as long as it may
    samples_s = [0.05 + 0.01 * (n % 7) for n in range(200)]
    for sample_s in samples_s:
        answers.add(sample_s)
    assert sum(s <= answers.expected_s for s in samples_s) >= 0.99 * len(samples_s)
    for _ in range(60):
        answers.add(0.01)
    assert answers.expected_s < 0.02
    assert answer_bound_s(8, 0.1) == pytest.approx(0.6)
