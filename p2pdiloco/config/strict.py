"""TOML files read strictly: every complaint is one sentence that names the file and the key."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from p2pdiloco.config.quotes import meant
from p2pdiloco.config.schema import Key, keys_of, shown, tables_of
from p2pdiloco.errors import ConfigError

MAX_FILE_BYTES = 128 * 1024
"""Room for a manifest of the largest size (`config.loader`) with its comments."""
S = TypeVar("S", bound=Struct)


def read_toml(path: Path) -> dict[str, Any]:
    """The file's tables. Raises: ConfigError (as `read_settings` and `parse_toml`)."""
    return parse_toml(path, read_settings(path))


def read_settings(path: Path) -> bytes:
    """The file's bytes. Raises: ConfigError (missing, unreadable, or over 128 KiB)."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ConfigError(f"{path}: there is no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: is larger than {MAX_FILE_BYTES // 1024} KiB, so it is no settings file")
    return data


def parse_toml(path: Path, data: bytes) -> dict[str, Any]:
    """The tables of a file with these bytes. Raises: ConfigError (not UTF-8, or not TOML: names the line)."""
    try:
        return tomllib.loads(data.decode("utf-8-sig"))  # some editors begin with a byte order mark
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8 text (byte {error.start})") from error
    except tomllib.TOMLDecodeError as error:
        raise _syntax_error(path, data, error) from error


def _syntax_error(path: Path, data: bytes, error: tomllib.TOMLDecodeError) -> ConfigError:
    lines = data.decode("utf-8-sig").split("\n")
    match = re.fullmatch(r"(.*) \(at line (\d+), column (\d+)\)", str(error))
    if match:
        sentence = f"{path}: line {match[2]} is not valid TOML: {match[1]} (column {match[3]})"
        return ConfigError(sentence, meant(lines[int(match[2]) - 1]))
    reason = str(error).removesuffix(" (at end of document)")
    last = len(data.splitlines())
    sentence = f"{path}: line {last} is not valid TOML: {reason} (the file ends here)"
    return ConfigError(sentence, meant(lines[last - 1]) if last else "")


def convert(raw: Mapping[str, Any], struct: type[S], label: str) -> S:
    """A table of tables as a struct, with nothing unknown, missing, mistyped or out of range.

    Raises:
        ConfigError: the first complaint; `label` (a file name) opens the sentence.
    """
    keys = keys_of(struct)
    _refuse_unknown(raw, keys, tables_of(struct), label)
    for key in keys.values():
        given = raw.get(key.section, {}) if key.section else raw
        if key.required and key.name not in given:
            raise ConfigError(f"{label}: {key.path} is missing", hint=f"it must be {key.words}")
    try:
        return msgspec.convert(raw, struct, strict=True, dec_hook=_from_text)
    except msgspec.ValidationError as error:
        raise ConfigError(_value_sentence(raw, keys, label, str(error))) from None


def _from_text(kind: type, value: object) -> object:
    if kind is Path and isinstance(value, str):
        return Path(value)
    # msgspec adds where, and makes it a ValidationError.
    raise TypeError(f"expected a string, got {type(value).__name__}")


def _refuse_unknown(
    raw: Mapping[str, Any], keys: Mapping[str, Key], tables: Mapping[str, type[Struct]], label: str
) -> None:
    for name, value in raw.items():
        if name in tables:
            if not isinstance(value, Mapping):
                raise ConfigError(f"{label}: {name} must be a table, it is {shown(value)}")
            for inner in value:
                if f"{name}.{inner}" not in keys:
                    hint = suggestion(f"{name}.{inner}", keys)
                    raise ConfigError(f'{label}: there is no key "{name}.{inner}"', hint)
        elif name not in keys:
            what = "table" if isinstance(value, Mapping) else "key"
            hint = suggestion(name, tables if what == "table" else keys)
            raise ConfigError(f'{label}: there is no {what} "{name}"', hint)


def suggestion(given: str, known: Collection[str]) -> str:
    """A hint that names the closest known word, or "" when none is close."""
    last = given.rpartition(".")[2]
    elsewhere = [path for path in known if path.rpartition(".")[2] == last]
    close = elsewhere or difflib.get_close_matches(given, known, n=1)
    return f'did you mean "{close[0]}"?' if close else ""


def _value_sentence(raw: Mapping[str, Any], keys: Mapping[str, Key], label: str, complaint: str) -> str:
    """Turn msgspec's "Expected `int` >= 1 - at `$.sync.quorum`" into a sentence of ours."""
    match = re.fullmatch(r".* - at `\$\.([A-Za-z0-9_.]+)(?:\[.*)?`", complaint)
    if match is None or match[1] not in keys:
        return f"{label}: {complaint}"
    key = keys[match[1]]
    value = raw[key.section][key.name] if key.section else raw[key.name]
    return f"{label}: {key.path} must be {key.words}, it is {shown(value)}"
