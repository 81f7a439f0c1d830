"""Amounts that people write with a unit: "20Mbit" a second, "2GiB"."""

from __future__ import annotations

import re

from p2pdiloco.errors import ConfigError

_RATES = {"": 1.0, "bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SIZES = {"": 1.0, "b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "kib": 2.0**10, "mib": 2.0**20, "gib": 2.0**30}
LEAST_RATE = 100e3
"""Bits a second: below it a node could not even hear its peers in time."""


def parse_rate(text: str, flag: str) -> float:
    """Bits per second; 0 for the empty text, which is no limit.

    Raises:
        ConfigError: not a rate, or below 100 kbit; names the flag.
    """
    rate = _parse(re.sub(r"(/s|ps)$", "", text.strip(), flags=re.IGNORECASE), _RATES)
    if rate is None:
        raise ConfigError(
            f'{flag} must be bits per second, it is "{text}"', "for example 20Mbit, 500kbit or 1Gbit"
        )
    if text.strip() and rate < LEAST_RATE:
        raise ConfigError(f'{flag} must be at least 100kbit, it is "{text}"')
    return rate


def parse_size(text: str, flag: str) -> float:
    """Bytes; 0 for the empty text, which is no limit.

    Raises:
        ConfigError: not a size; names the flag.
    """
    size = _parse(text.strip(), _SIZES)
    if size is None or (text.strip() and size < 1):
        raise ConfigError(f'{flag} must be bytes, it is "{text}"', "for example 2GiB, 500MB or 512MiB")
    return size


def parse_every(text: str, flag: str) -> tuple[float, int]:
    """(seconds, merges) of "30min", "12h", "90s" or "500merges"; one of them is 0.

    Raises:
        ConfigError: none of these; names the flag.
    """
    found = re.fullmatch(r"(\d{1,9})\s*(s|min|h|merges?)", text.strip())
    if found is None or not int(found[1]):
        raise ConfigError(
            f'{flag} must be a time or a number of merges, it is "{text}"', "30min or 500merges"
        )
    number, unit = int(found[1]), found[2]
    if unit.startswith("merge"):
        return 0.0, number
    return number * {"s": 1.0, "min": 60.0, "h": 3600.0}[unit], 0


def parse_life(text: str, flag: str) -> int:
    """Seconds of "30min", "12h", "7d" or "2w"; 0 for "never".

    Raises:
        ConfigError: none of these; names the flag.
    """
    if text.strip() == "never":
        return 0
    found = re.fullmatch(r"(\d{1,6})\s*(s|min|h|d|w)", text.strip())
    if found is None or not int(found[1]):
        raise ConfigError(f'{flag} must be a time, it is "{text}"', "for example 12h, 7d, 4w, or never")
    return int(found[1]) * {"s": 1, "min": 60, "h": 3600, "d": 86400, "w": 604800}[found[2]]


def rate_text(bits_per_s: float) -> str:
    """Rate as text without its unit: "19.6 M", before "bit/s"."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if bits_per_s >= factor:
            return f"{bits_per_s / factor:.3g} {unit}"
    return f"{bits_per_s:.0f} "


def size_text(number_bytes: float) -> str:
    """Size as text: "1.25 GiB", "312 MiB"."""
    for factor, unit in ((2.0**50, "PiB"), (2.0**40, "TiB"), (2.0**30, "GiB")):
        if number_bytes >= factor:
            return f"{number_bytes / factor:.3g} {unit}"
    return (
        f"{number_bytes / 2**20:.3g} MiB"
        if number_bytes < 2**20 * 999.5
        else f"{number_bytes / 2**20:.0f} MiB"
    )


def _parse(text: str, units: dict[str, float]) -> float | None:
    if not text:
        return 0.0
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,9})?)\s*([A-Za-z]*)", text)
    factor = units.get(found[2].lower()) if found else None
    return float(found[1]) * factor if found and factor is not None else None
