"""Texts of others, made safe to show: names, reasons and paths may come from strangers.

A terminal obeys control characters (escape sequences, their one-byte forms U+0080 to U+009F, carriage
returns), and direction overrides turn what a person reads. Whatever shows a text takes it through here.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

_encoder = msgspec.json.Encoder(enc_hook=str)


def clean(text: str, keep: str = "") -> str:
    """Replace each character of a text that does not print by a dot in the middle, except those in `keep`."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in keep else "·" for letter in text)


def json_line(value: Any) -> str:
    """Encode a value (structs too) as JSON in one line. What does not print is escaped, so that readers get
    every character of a text, and terminals none that they obey."""
    text = _encoder.encode(value).decode()
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else _escaped(letter) for letter in text)


def _escaped(letter: str) -> str:
    return "\\u007f" if letter == "\x7f" else json.dumps(letter)[1:-1]
