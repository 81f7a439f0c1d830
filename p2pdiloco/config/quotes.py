"""Quotes that people leave out or type as their word processor likes: a line of TOML as it was meant."""

from __future__ import annotations

import re
import tomllib

_LINE = re.compile(r"\s*([\w.-]+)\s*=\s*(.*?)\s*(?:#.*)?")
_QUOTES = "\"'`“”„‟«»‘’‚"
_BOOLEANS = {"yes": "true", "on": "true", "true": "true", "no": "false", "off": "false", "false": "false"}


def meant(line: str) -> str:
    """Say how a line that is no TOML is to be written; empty if that cannot be told."""
    found = _LINE.fullmatch(line)
    if found is None or _is_fine(line):
        return ""
    key, value = found.groups()
    if value.lower() in _BOOLEANS:
        return f"true and false are written small, without quotes: {key} = {_BOOLEANS[value.lower()]}"
    if value.startswith("["):
        items = [item.strip() for item in value.strip("[]").split(",") if item.strip()]
        written = f"{key} = [{', '.join(map(_quoted, items))}]"
    else:
        written = f"{key} = {_quoted(value)}"
    return f"text stands in quotes: {written}" if _is_fine(written) else ""


def _quoted(value: str) -> str:
    """Write a value as it was meant: a number or a whole text as it is, else in straight quotes."""
    return value if _is_fine(f"x = {value}") else f'"{value.strip(_QUOTES)}"'


def _is_fine(line: str) -> bool:
    try:
        tomllib.loads(line)
    except tomllib.TOMLDecodeError:
        return False
    return True
