"""Goodput: the chip-level failure process against its closed form, and swarms of people who come and go."""

from __future__ import annotations

from random import Random

import pytest

from p2pdiloco.simulation.chips import ChipTimes, Learner, ReturnDelay, goodput

FAILURES = 6000


@pytest.mark.parametrize(("chips", "learners"), [(300_000, 1), (1_200_000, 1), (1_200_000, 8)])
def test_process_gives_the_closed_form(chips: int, learners: int) -> None:
    times = ChipTimes()
    tally = goodput(chips, learners, times, Random(f"{chips}/{learners}"), FAILURES)
    assert tally.goodput == pytest.approx(times.closed_form(chips, learners), abs=0.012)
    assert tally.downscales + tally.upscales < 2 * tally.failures


def test_rate_per_learner_is_all_that_counts() -> None:
    one = goodput(300_000, 1, ChipTimes(), Random("one"), FAILURES).goodput
    eight = goodput(2_400_000, 8, ChipTimes(), Random("eight"), FAILURES).goodput
    assert one == pytest.approx(eight, abs=0.012)


def test_constants_do_what_they_say() -> None:
    slow = ChipTimes(downscale_s=200.0)
    assert goodput(300_000, 1, slow, Random(1), 2000).goodput < 0.5
    impatient = Learner(30_000, ChipTimes(patience_s=0.0), Random(1)).run(2000)
    patient = Learner(30_000, ChipTimes(patience_s=3000.0), Random(1)).run(2000)
    assert impatient.upscales > 1.5 * patient.upscales


@pytest.mark.parametrize(("weibull", "exponent"), [(1.0, 1.0), (0.7, 2.0), (2.0, 3.0)])
def test_return_delays_have_the_given_mean(weibull: float, exponent: float) -> None:
    rng, delay = Random(3), ReturnDelay(60.0, weibull, exponent)
    drawn = [delay.draw(rng) for _ in range(20_000)]
    assert sum(drawn) / len(drawn) == pytest.approx(60.0, rel=0.05)


def test_what_is_undone_is_at_most_what_was_trained_since_the_last_failure() -> None:
    free = goodput(600_000, 1, ChipTimes(), Random(5), 3000)
    undone = goodput(600_000, 1, ChipTimes(), Random(5), 3000, lambda _rng: (0.0, 1e9))
    assert undone.useful_s < 0.1 * free.useful_s

    assert undone.useful_s > -1e-6
    assert undone.undone_s > 0.9 * free.useful_s
