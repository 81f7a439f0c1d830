"""Limits of a machine's owner: flags of `p2pdiloco node` that may be changed while it runs."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from p2pdiloco.config.owner.hours import Span, parse_hours
from p2pdiloco.config.units import parse_every, parse_rate, parse_size
from p2pdiloco.errors import ConfigError

Text = Annotated[str, Meta(max_length=200)]
YES, NO = ("yes", "true", "on", "1"), ("no", "false", "off", "0", "")
NONE = "none"
"""Value that takes a limit away, as the empty one does."""
_MONTHLY = re.compile(r"\s*/\s*month\s*$", re.IGNORECASE)


class OwnLimits(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits as they are written. `NodeSettings` has fields of the same names."""

    max_upload: Text = ""
    max_download: Text = ""
    max_transfer: Text = ""
    """Bytes both ways in a calendar month, such as "200GB/month"."""
    min_step_s: Annotated[float, Meta(ge=0, le=60)] = 0.0
    hours: Text = ""
    """Hours of the day in which it trains, such as "22-7"."""
    when_idle: Text = ""
    """Time for which nobody has used the machine, such as "10min", before it trains."""
    not_on_battery: bool = False
    max_temperature: Annotated[float, Meta(ge=0, le=150)] = 0.0
    """Degrees Celsius of GPU and CPU above which it does not train; 0: no bound."""
    max_power: Annotated[float, Meta(ge=0, le=1e5)] = 0.0
    """Watts of the GPUs together above which it does not train; 0: no bound."""


FIELDS = tuple(field.name for field in msgspec.structs.fields(OwnLimits))
DEFAULTS: dict[str, Any] = {name: getattr(OwnLimits(), name) for name in FIELDS}


class Bounds(Struct, frozen=True, kw_only=True):
    """Limits as numbers; 0, nothing or False is no bound."""

    upload_bits_per_s: float
    download_bits_per_s: float
    transfer_bytes: int
    min_step_s: float
    hours: tuple[Span, ...]
    idle_s: float
    not_on_battery: bool
    max_temperature_c: float
    max_power_w: float


def bounds_of(limits: OwnLimits) -> Bounds:
    """Parse limits. Raises: ConfigError (names the flag)."""
    return Bounds(
        upload_bits_per_s=parse_rate(limits.max_upload, "--max-upload"),
        download_bits_per_s=parse_rate(limits.max_download, "--max-download"),
        transfer_bytes=_transfer_bytes(limits.max_transfer),
        min_step_s=limits.min_step_s,
        hours=parse_hours(limits.hours),
        idle_s=parse_every(limits.when_idle, "--when-idle")[0] if _is_time(limits.when_idle) else 0.0,
        not_on_battery=limits.not_on_battery,
        max_temperature_c=limits.max_temperature,
        max_power_w=limits.max_power,
    )


def _is_time(text: str) -> bool:
    """Tell whether there is a time. Raises: ConfigError (something else is there)."""
    if not text.strip():
        return False
    if not re.fullmatch(r"[1-9]\d{0,8}\s*(s|min|h)", text.strip()):
        raise ConfigError(f'--when-idle must be a time, it is "{text}"', "for example 10min")
    return True


def _transfer_bytes(text: str) -> int:
    monthly, example = _MONTHLY.sub("", text), "for example 200GB/month"
    if "/" in monthly:
        raise ConfigError(f'--max-transfer is for a calendar month, it is "{text}"', example)
    try:
        return int(parse_size(monthly, "--max-transfer"))
    except ConfigError as error:
        raise ConfigError(str(error), example) from error


def limits_of(settings: Any) -> OwnLimits:
    """Take the limits out of a node's settings."""
    return OwnLimits(**{name: getattr(settings, name) for name in FIELDS})


def flag_of(name: str) -> str:
    """Name the flag of a field."""
    return "--" + name.replace("_", "-")


def changed(limits: OwnLimits, changes: dict[str, str]) -> OwnLimits:
    """Change limits by name, "max-upload" or "max_upload"; "none" and the empty value take one away.

    Raises: ConfigError (an unknown name, a value that cannot be).
    """
    values: dict[str, Any] = {}
    for given, text in changes.items():
        name = _field(given)
        if name not in FIELDS:
            raise ConfigError(
                f'there is no limit "{given[:40]}"', "limits: " + ", ".join(map(_plain, FIELDS))
            )
        values[name] = _value(name, text.strip())
    try:
        found = msgspec.convert({**msgspec.structs.asdict(limits), **values}, OwnLimits)
    except msgspec.ValidationError as error:
        name = str(error).partition("`$.")[2].rstrip("`")
        raise ConfigError(f"{flag_of(name)}: {str(error).partition(' - at')[0]}") from error
    bounds_of(found)
    return found


def changed_names(changes: dict[str, str]) -> list[str]:
    """List the fields that changes name, which have been looked at."""
    return sorted({_field(name) for name in changes})


def _field(given: str) -> str:
    return given.lstrip("-").replace("-", "_")


def _value(name: str, text: str) -> Any:
    if text.lower() == NONE or not text:
        return DEFAULTS[name]
    if isinstance(DEFAULTS[name], bool):
        if text.lower() not in (*YES, *NO):
            raise ConfigError(f'{flag_of(name)} must be yes or no, it is "{text[:40]}"')
        return text.lower() in YES
    if isinstance(DEFAULTS[name], float):
        try:
            return float(text)
        except ValueError:
            raise ConfigError(f'{flag_of(name)} must be a number, it is "{text[:40]}"') from None
    return text


def _plain(name: str) -> str:
    return name.replace("_", "-")


def value_text(value: object) -> str:
    """Word a limit's value as `changed` takes it; empty: no limit."""
    if isinstance(value, bool):
        return "yes" if value else ""
    if isinstance(value, float):
        return f"{value:g}" if value else ""
    return str(value)
