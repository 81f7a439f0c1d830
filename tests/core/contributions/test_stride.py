"""What comes back after an absence is merged in shares."""

from __future__ import annotations

from p2pdiloco.core.api.versions import LEAST_SHARE, MOST_GIVEN_UP, PERIODS, Stride


def test_one_long_interval_is_an_absence_and_two_are_the_pace() -> None:
    stride = Stride(10, at_step=7)
    assert stride.carried(15, 22) == 15 and stride.carried(100, 107) == PERIODS * 10
    assert stride.carried(1000, 1007) == 1000 // LEAST_SHARE
    stride.merged(20, at_step=57)
    assert stride.carried(100, 58) == PERIODS * 10
    stride.merged(20, at_step=107)
    assert stride.carried(120, 108) == PERIODS * 50
    stride.rarer(80)
    assert stride.carried(200, 108) == PERIODS * 80


def test_while_no_step_is_made_no_share_is_like_the_one_before() -> None:
    """Equal ones have the same bytes, and are refused as copies of what was merged last."""
    stride, left, shares = Stride(4), 24, []
    while share := stride.carried(left, 24):
        shares.append(share)
        stride.merged(share, 24)
        left -= share
    assert shares == [8, 7, 8, 1]
    stride.merged(8, 24)
    assert stride.carried(8, 25) == 8, "the next step changes all of it"


def test_what_is_given_up_again_and_again_waits_for_a_step() -> None:
    stride = Stride(4)
    for _ in range(MOST_GIVEN_UP):
        assert stride.carried(8, 8) == 8
        stride.given_up(8)
    assert not stride.carried(8, 8) and stride.carried(9, 9) == 8
    stride.given_up(9)
    assert stride.carried(9, 9) == 8
    stride.merged(8, 9)
    assert stride.carried(1, 9) == 1
