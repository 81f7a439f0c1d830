"""Rates, by which peers are chosen: moving averages that are forgotten."""

from __future__ import annotations

from p2pdiloco.daemon.bulk.pushes import FORGET_S, MAX_PEERS, Rates


def test_the_newest_transfer_counts_half_and_old_ones_are_forgotten() -> None:
    now_s = 0.0
    rates = Rates(lambda: now_s)
    assert rates.of("a", 7.0) == 7.0 and "a" not in rates
    assert rates.measured("a", 100, 1.0) == 100.0
    rates.measured("a", 100, 0.5)
    assert rates.of("a", 7.0) == 150.0
    now_s = FORGET_S + 1
    assert rates.of("a", 7.0) == 7.0, "who was slow once is tried again"
    rates.measured("a", 100, 1.0)
    assert rates.of("a", 7.0) == 100.0
    for number in range(MAX_PEERS):
        rates.measured(str(number), 1, 1.0)
    assert "a" not in rates and "0" in rates
