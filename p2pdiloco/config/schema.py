"""Keys of the manifest in words, read off its types: for errors and for run.toml.

One source (the structs in `config.manifest`), so that neither can go stale.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

import msgspec.inspect as inspect
from msgspec import Struct

from p2pdiloco.config.models import (
    DATASET_PATTERN,
    NAME_PATTERN,
    PACKAGE_PATTERN,
    SHA256_PATTERN,
    TOKENIZER_PATTERN,
)

_PATTERNS = {
    NAME_PATTERN: "1 to 63 of a-z 0-9 . _ - and begin with a letter or digit",
    PACKAGE_PATTERN: "at most 100 of A-Z a-z 0-9 . _ -",
    DATASET_PATTERN: "a data set's name on the hub (OWNER/NAME), or empty",
    TOKENIZER_PATTERN: "bytes, a file's name without folder, or OWNER/NAME on the hub",
    SHA256_PATTERN: "64 hexadecimal digits, or empty",
}


class Key(Struct, frozen=True):
    """A key of a TOML schema."""

    section: str
    """Empty for keys above all tables."""
    name: str
    words: str
    """Description of the values allowed: `an integer from 1 to 256`."""
    required: bool

    @property
    def path(self) -> str:
        """Name as people write it: `sync.delay_steps`."""
        return f"{self.section}.{self.name}" if self.section else self.name


def keys_of(struct: type[Struct], section: str = "") -> dict[str, Key]:
    """List all keys of a struct, by path, in their order; fields that are structs become tables (one
    level)."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    found: dict[str, Key] = {}
    for field in info.fields:
        if isinstance(field.type, inspect.StructType):
            found |= keys_of(field.type.cls, field.encode_name)
        elif isinstance(field.type, inspect.DictType):
            continue  # a table whose keys somebody else knows
        else:
            key = Key(section, field.encode_name, words_for(field.type), field.required)
            found[key.path] = key
    return found


def tables_of(struct: type[Struct]) -> dict[str, type[Struct]]:
    """The fields of a struct that are tables, by name, in their order."""
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return {f.encode_name: f.type.cls for f in info.fields if isinstance(f.type, inspect.StructType)}


def words_for(kind: inspect.Type) -> str:
    """Describe the values of this type, to end a sentence that begins with "must be"."""
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "an integer" + _bounds(kind)
        case inspect.FloatType():
            return "a number" + _bounds(kind)
        case inspect.LiteralType():
            values = [json.dumps(value) for value in kind.values]
            return values[0] if len(values) == 1 else "one of " + ", ".join(values)
        case inspect.StrType() if kind.pattern:
            return _PATTERNS[kind.pattern]
        case inspect.StrType():
            return "a string"
        case inspect.VarTupleType() | inspect.ListType():
            return "an array, each item " + words_for(kind.item_type)
        case inspect.CustomType():
            return "a path"
        case inspect.UnionType():
            return words_for(next(t for t in kind.types if not isinstance(t, inspect.NoneType)))
    raise TypeError(f"no words for {kind!r}")


def _bounds(kind: inspect.IntType | inspect.FloatType) -> str:
    low, above, below = kind.ge, kind.gt, kind.lt
    # Bounds that only keep numbers exact on the wire are nobody's business until they are exceeded.
    high = None if kind.le is not None and kind.le >= 1 << 53 else kind.le
    if low is not None:
        if high is not None:
            return f" from {_plain(low)} to {_plain(high)}"
        return f" from {_plain(low)} to below {_plain(below)}" if below is not None else f" >= {_plain(low)}"
    parts = [f"above {_plain(above)}"] if above is not None else []
    parts += [f"at most {_plain(high)}"] if high is not None else []
    return " " + " and ".join(parts) if parts else ""


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


def as_toml(value: object) -> str:
    """A scalar or an array of strings as TOML text (JSON strings are valid TOML basic strings)."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(as_toml(item) for item in value) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)


def shown(value: object) -> str:
    """A value from a user's file, short enough for a sentence."""
    if isinstance(value, Mapping):
        return "a table"
    text = as_toml(value)
    return text if len(text) <= 60 else text[:57] + "..."
