"""What comes back after an absence is merged in shares."""

from __future__ import annotations

from p2pdiloco.core.contributions.stride import LEAST_SHARE, PERIODS, Stride


def test_one_long_interval_is_an_absence_and_two_are_the_pace() -> None:
    stride = Stride(10)
    assert stride.carried(15) == 15 and stride.carried(100) == PERIODS * 10
    assert stride.carried(1000) == 1000 // LEAST_SHARE
    stride.merged(50)
    assert stride.carried(100) == PERIODS * 10
    stride.merged(50)
    assert stride.carried(120) == PERIODS * 50
    stride.rarer(80)
    assert stride.carried(200) == PERIODS * 80
