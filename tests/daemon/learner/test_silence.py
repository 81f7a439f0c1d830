"""Silence of a learner, and when it is taken for one that hangs."""

from __future__ import annotations

import pytest

from p2pdiloco.daemon.learner_host import TICK_S, Silence

TICKS = 400


def said(step_s: float) -> list[tuple[float, str]]:
    """List what a silence comes to, and when."""
    silence = Silence()
    found = []
    for _ in range(TICKS):
        if word := silence.tick(step_s):
            found.append((silence.silent_s, word))
        if word == "hangs":
            break
    return found


@pytest.mark.parametrize(
    ("step_s", "expected"),
    [
        (0.1, [(60.0, "doubtful"), (600.0, "hangs")]),
        (6.0, [(120.0, "doubtful"), (600.0, "hangs")]),
        (12.0, [(240.0, "doubtful"), (1200.0, "hangs")]),
        (0.0, [(60.0, "doubtful")]),  # no step yet: it may compile for as long as it likes
    ],
)
def test_it_takes_time_and_many_of_its_own_steps(step_s: float, expected: list[tuple[float, str]]) -> None:
    assert said(step_s) == expected


def test_a_word_ends_a_silence_and_it_is_told_once_that_somebody_doubted() -> None:
    silence = Silence()
    assert not silence.heard()
    while not silence.tick(0.1):
        pass
    assert silence.heard() and not silence.heard()
    assert not silence.tick(0.1) and silence.silent_s == TICK_S
