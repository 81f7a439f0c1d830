"""A link's rate is known from transfers that are long enough, and from an earlier life."""

from __future__ import annotations

import math

import pytest
from metered_way import MeteredWay

from p2pdiloco.core.capacity import LEAST_BYTES, LEAST_S, LEAST_SAMPLES, LONG_S, SAMPLES

OVERHEAD = 1.0625


def test_the_meter_wants_long_transfers_and_takes_the_best_of_the_latest() -> None:
    up = MeteredWay(OVERHEAD)
    assert up.meter.bits_per_s == math.inf
    up.move(LEAST_BYTES - 1, 100.0)
    assert up.meter.bits_per_s == math.inf
    for took_s in (4.0, 1.0, 2.0) * (LEAST_SAMPLES // 3):
        up.now_s += 50.0  # idle time is not the link's
        up.move(LEAST_BYTES, took_s)
    assert up.meter.bits_per_s == 8 * OVERHEAD * LEAST_BYTES
    for _ in range(SAMPLES):
        up.move(LEAST_BYTES, 2.0)
    assert up.meter.bits_per_s == 4 * OVERHEAD * LEAST_BYTES


def test_transfers_that_overlap_count_together_and_a_link_that_is_never_idle_too() -> None:
    up = MeteredWay(OVERHEAD)
    for _ in range(LEAST_SAMPLES):
        assert up.meter.bits_per_s == math.inf
        with up.meter.moving():
            up.move(LEAST_BYTES, 1.0)
            assert up.meter.bits_per_s == math.inf  # what is under way has its share of that second
            up.bytes += LEAST_BYTES
    assert up.meter.bits_per_s == 16 * OVERHEAD * LEAST_BYTES
    with up.meter.moving():
        for _ in range(SAMPLES):
            up.move(LEAST_BYTES, LONG_S)
        assert up.meter.bits_per_s == pytest.approx(8 * OVERHEAD * LEAST_BYTES / LONG_S)


def test_an_uplink_is_what_the_better_of_its_meters_has_measured_and_else_what_is_remembered() -> None:
    up = MeteredWay(OVERHEAD, remembered=1e5)
    assert up.uplink.measured_bits_per_s == math.inf and up.uplink.bits_per_s == 1e5
    up.move(2 * LEAST_BYTES, LEAST_S, up.uplink.given)
    given = 16 * OVERHEAD * LEAST_BYTES / LEAST_S
    up.move(LEAST_BYTES, LEAST_S)  # held up elsewhere
    assert up.uplink.bits_per_s == up.uplink.measured_bits_per_s == given
    assert up.uplink.sure_bits_per_s == math.inf
    for _ in range(LEAST_SAMPLES):
        up.move(LEAST_BYTES, LEAST_S)
    assert up.uplink.sure_bits_per_s == given
