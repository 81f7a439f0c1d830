"""Limits of a machine's owner, as they are written."""

import pytest

from p2pdiloco.config.settings import (
    DAY_MIN,
    FIELDS,
    NodeSettings,
    OwnLimits,
    bounds_of,
    changed,
    next_begin_min,
    parse_hours,
    value_text,
)
from p2pdiloco.errors import ConfigError


def inside(text, day, hour, minute=0):
    return any(span.holds(day * DAY_MIN + hour * 60 + minute) for span in parse_hours(text))


@pytest.mark.parametrize(
    ("text", "yes", "no"),
    [
        ("22-7", [(0, 22), (3, 23), (4, 0), (6, 6)], [(0, 21), (0, 7), (2, 12)]),
        ("9:30-17", [(0, 10), (6, 16)], [(0, 9), (0, 17)]),
        ("0-24", [(0, 0), (6, 23)], []),
        ("mon-fri 22-7", [(4, 23), (5, 6)], [(5, 22), (0, 6), (6, 23)]),  # Friday's night ends on Saturday
        ("mon-fri 22-7, sat-sun 0-24", [(5, 12), (0, 23), (6, 23)], [(0, 12), (0, 3)]),
        ("sat-mon 0-6", [(5, 1), (6, 1), (0, 1)], [(1, 1)]),
        ("SUN 23-1", [(6, 23), (0, 0)], [(0, 23), (6, 0)]),
        ("22-7, 12-13", [(2, 12), (2, 23)], [(2, 13)]),
    ],
)
def test_hours_of_the_week(text, yes, no):
    assert all(inside(text, *at) for at in yes)
    assert not any(inside(text, *at) for at in no)


@pytest.mark.parametrize(
    "text",
    ["22", "22-25", "22-22", "-", "24-7", "9:60-17", "mo 1-2", "22-7;", "22-7,", "a" * 300, "1-2," * 40],
)
def test_hours_that_cannot_be_are_one_sentence(text):
    with pytest.raises(ConfigError, match="--hours must be hours"):
        parse_hours(text)


def test_it_is_known_when_hours_begin():
    spans = parse_hours("mon-fri 22-7")
    assert next_begin_min(spans, 12 * 60) == 10 * 60
    assert next_begin_min(spans, 5 * DAY_MIN + 8 * 60) == 2 * DAY_MIN + 14 * 60
    assert next_begin_min(parse_hours("22-7, 12-13"), 8 * 60) == 4 * 60


def test_limits_as_numbers():
    limits = OwnLimits(
        max_upload="20Mbit", max_transfer="200GB/month", when_idle="10min", hours="22-7", max_power=200.0
    )
    bounds = bounds_of(limits)
    assert (bounds.upload_bits_per_s, bounds.download_bits_per_s) == (20e6, 0)
    assert (bounds.transfer_bytes, bounds.idle_s, bounds.max_power_w) == (200_000_000_000, 600, 200)
    assert bounds_of(OwnLimits(max_transfer="2 GiB / Month")).transfer_bytes == 2 << 30
    assert bounds_of(OwnLimits()).hours == ()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"max-transfer": "200GB/week"}, "--max-transfer is for a calendar month"),
        ({"max-transfer": "much"}, "--max-transfer must be bytes"),
        ({"when-idle": "10"}, "--when-idle must be a time"),
        ({"when-idle": "0min"}, "--when-idle must be a time"),
        ({"when-idle": "3merges"}, "--when-idle must be a time"),
        ({"not-on-battery": "perhaps"}, "--not-on-battery must be yes or no"),
        ({"max-power": "nan"}, "--max-power"),
        ({"max-temperature": "900"}, "--max-temperature"),
        ({"min-step-s": "-1"}, "--min-step-s"),
        ({"max-upload": "1bit"}, "--max-upload must be at least"),
        ({"hours": "22-7", "colour": "red"}, 'there is no limit "colour"'),
    ],
)
def test_a_change_that_cannot_be_is_one_sentence(change, words):
    with pytest.raises(ConfigError, match=words) as told:
        changed(OwnLimits(), change)
    assert "max-transfer" not in change or told.value.hint == "for example 200GB/month"


def test_limits_are_changed_and_taken_away():
    limits = changed(
        OwnLimits(hours="22-7"), {"max-upload": "5Mbit", "not-on-battery": "yes", "hours": "none"}
    )
    assert limits == OwnLimits(max_upload="5Mbit", not_on_battery=True)
    assert changed(limits, {"max_upload": "", "not-on-battery": "no"}) == OwnLimits()
    assert [value_text(getattr(limits, name)) for name in ("max_upload", "not_on_battery", "max_power")] == [
        "5Mbit",
        "yes",
        "",
    ]


def test_every_limit_is_a_flag_of_the_node_with_the_same_default():
    assert all(getattr(NodeSettings(), name) == getattr(OwnLimits(), name) for name in FIELDS)
