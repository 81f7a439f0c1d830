"""Rates and sizes as people write them."""

from __future__ import annotations

import pytest

from p2pdiloco.config.values import parse_rate, parse_size, rate_text
from p2pdiloco.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "bits"),
    [("20Mbit", 20e6), ("20 mbit/s", 20e6), ("1.5Gbps", None), ("500kbit", 5e5), ("1Gbitps", 1e9), ("", 0)],
)
def test_rates(text: str, bits: float | None) -> None:
    if bits is None:
        with pytest.raises(ConfigError, match="bits per second"):
            parse_rate(text, "--max-upload")
    else:
        assert parse_rate(text, "--max-upload") == bits


@pytest.mark.parametrize("text", ["fast", "-1Mbit", "20MB", "1e9", "99kbit", "0"])
def test_what_is_no_rate_is_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="--max-upload must be"):
        parse_rate(text, "--max-upload")


def test_rates_in_words() -> None:
    assert [rate_text(rate) for rate in (19.6e6, 1e9, 12.0, 999e3)] == ["19.6 M", "1 G", "12 ", "999 k"]


def test_sizes() -> None:
    assert parse_size("2GiB", "--max-memory") == 2 * 2**30
    assert parse_size("500MB", "--max-memory") == 500e6
    assert parse_size("", "--max-memory") == 0
    for text in ("2Gbit", "0", "-1MB", "lots"):
        with pytest.raises(ConfigError, match="--max-memory must be bytes"):
            parse_size(text, "--max-memory")
