"""Texts of others, made safe to show: names, reasons and paths may come from strangers.

A terminal obeys control characters (escape sequences, their one-byte forms U+0080 to U+009F, carriage
returns), and direction overrides turn what a person reads. Whatever shows a text takes it through here.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

_encoder = msgspec.json.Encoder(enc_hook=str)


class _Encoder(Protocol):
    def encode(self, value: Any, /) -> bytes: ...


def encoded(value: Any, encoder: _Encoder, hook: Callable[[Any], Any] = str) -> bytes:
    """Encode a value (structs too). Names of files need not be UTF-8, and what Python makes of the rest of
    their bytes no encoder takes: such texts are shown, not lost. `hook`: the encoder's own."""
    try:
        return encoder.encode(value)
    except UnicodeEncodeError:
        plain = msgspec.to_builtins(value, builtin_types=(bytes,), enc_hook=hook)
        return encoder.encode(_readable(plain))


def _readable(value: Any) -> Any:
    if isinstance(value, dict):
        return {_readable(key): _readable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_readable(inner) for inner in value]
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def clean(text: str, keep: str = "") -> str:
    """Replace each character of a text that does not print by a dot in the middle, except those in `keep`."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in keep else "·" for letter in text)


def json_line(value: Any) -> str:
    """Encode a value (structs too) as JSON in one line. What does not print is escaped, so that readers get
    every character of a text, and terminals none that they obey."""
    text = encoded(value, _encoder).decode()
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else _escaped(letter) for letter in text)


def _escaped(letter: str) -> str:
    return "\\u007f" if letter == "\x7f" else json.dumps(letter)[1:-1]
