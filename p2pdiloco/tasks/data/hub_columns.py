"""One column of a data set that `datasets` streams: whatever else its files hold, each of its own kind.

`datasets` gives all files the columns and types of the first one, and fails where another file's differ. It
knows no way to read a part of JSON; so such files are read here.
"""

from __future__ import annotations

import codecs
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from p2pdiloco.errors import DataError, UserError, first_line
from p2pdiloco.tasks.data.documents import MAX_LINE_BYTES

_ROWS_TOGETHER = 1024
_READ_BYTES = 1 << 20
MAX_LIST_BYTES = 1 << 30
"""Largest file that is one JSON list, and has to be in memory whole."""


class StreamCut(Exception):
    """Error of a stream that may go on if it is opened again; says in which file."""


def read_only(builder: Any, field: str, transient: Callable[[], tuple[type[Exception], ...]]) -> None:
    """Have a builder's files read for this column alone. Errors name the file: `StreamCut` for those of the
    classes that `transient` gives, a `UserError` for all others."""
    if not hasattr(builder, "_generate_tables"):
        return
    kind = type(builder).__module__.rpartition(".")[2]
    if kind == "json" and builder.config.field is None:
        builder.info.features = None
        opened = vars(sys.modules[type(builder).__module__]).get("open", open)

        def tables(**files: Any) -> Iterator[tuple[Any, Any]]:
            for file in _names(files):
                yield from _of_json(opened, file, field)
    else:
        _narrow(builder, kind, field)
        tables = builder._generate_tables

    def named(**files: Any) -> Iterator[tuple[Any, Any]]:
        file = next(_names(files), "a file")
        try:
            yield from tables(**files)
        except (UserError, StreamCut, MemoryError):
            raise
        except transient() as error:
            raise StreamCut(f"{file}: {first_line(error)}") from error
        except Exception as error:  # whatever a library makes of bytes that it did not expect
            raise DataError(
                f"{file} cannot be read: {first_line(error)}", "mend it, or leave it out"
            ) from error

    builder._generate_tables = named


def _narrow(builder: Any, kind: str, field: str) -> None:
    import datasets
    import pyarrow as arrow

    if kind == "csv":  # a text of digits is a text
        builder.config.features = datasets.Features({field: datasets.Value("string")})

    def cast(table: Any, *_: Any, **__: Any) -> Any:
        if field not in table.column_names:
            raise ValueError(f'it has no column "{field}", but {", ".join(table.column_names)}')
        kind = table.schema.field(field).type
        if kind not in (arrow.null(), arrow.string(), arrow.large_string(), arrow.string_view()):
            raise ValueError(f'its column "{field}" is no text, but {kind}')
        return table.select([field]).cast(arrow.schema([(field, arrow.string())]))

    builder._cast_table = cast


def _names(files: dict[str, Any]) -> Iterator[str]:
    """Names of the files that a builder is about to read: lists of names, or of iterators over them."""
    for found in files.get("files_iterables") or files.get("files") or ():
        yield from [str(found)] if isinstance(found, str | Path) else found


def _of_json(opened: Callable[..., Any], name: str, field: str) -> Iterator[tuple[Any, Any]]:
    """Yield a file's rows as tables of one column. A row without the key, or with null, is no text."""
    import pyarrow as arrow

    with opened(name, "rb") as file:
        texts: list[str | None] = []
        keys: dict[str, None] = {}
        is_found, batch = False, 0
        for number, row in enumerate(_rows(file, name), 1):
            if isinstance(row, str):
                row = {"text": row}
            text = row.get(field) if isinstance(row, dict) else row
            if text is not None and not isinstance(text, str):
                raise DataError(f'"{field}" is no text in row {number} of {name}', "check data.field")
            is_found = is_found or (isinstance(row, dict) and field in row)
            keys |= dict.fromkeys(row or ()) if not is_found else {}
            texts.append(text)
            if len(texts) == _ROWS_TOGETHER:
                _check(is_found, name, field, keys)
                yield (0, batch), arrow.table({field: arrow.array(texts, arrow.string())})
                texts, batch = [], batch + 1
        if texts:
            _check(is_found, name, field, keys)
            yield (0, batch), arrow.table({field: arrow.array(texts, arrow.string())})


def _check(is_found: bool, name: str, field: str, keys: dict[str, None]) -> None:
    if not is_found:
        raise DataError(f'{name} has no column "{field}"', f"data.field: it has {', '.join(keys)}"[:300])


def _rows(file: Any, name: str) -> Iterator[Any]:
    """Yield what is in every line, or in the one list that the file is."""
    parts = iter(lambda: file.read(_READ_BYTES), b"")
    first = next(parts, b"").removeprefix(codecs.BOM_UTF8)  # some editors write one
    if first.lstrip().startswith(b"["):
        yield from _loose(_all(first, parts, name), list, name)
        return
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    for number, line in enumerate(_lines(first, parts, name), 1):
        if not line.strip():
            continue
        try:
            yield decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            yield _loose(line, dict, f"line {number} of {name}")


def _loose(text: bytes, kind: type, where: str) -> Any:
    """Decode what is JSON but for a NaN or half a surrogate pair, which are as good as any in another key."""
    try:
        found = json.loads(text)
        if not isinstance(found, kind):
            raise ValueError(f"it is {type(found).__name__}")
        return json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{where} is no JSON object: {first_line(error)}", "mend it, or leave it out"
        ) from error


def _all(first: bytes, parts: Iterator[bytes], name: str) -> bytes:
    found, length = [first], 0
    for part in parts:
        found.append(part)
        length += len(part)
        if length > MAX_LIST_BYTES:
            raise DataError(
                f"{name} is one list of more than {MAX_LIST_BYTES >> 30} GiB", "write a document a line"
            )
    return b"".join(found)


def _lines(first: bytes, parts: Iterator[bytes], name: str) -> Iterator[bytes]:
    rest = first
    while rest:
        *lines, rest = rest.split(b"\n")
        yield from lines
        if len(rest) > MAX_LINE_BYTES:
            raise DataError(f"a line of {name} has more than {MAX_LINE_BYTES >> 20} MiB")
        part = next(parts, b"")
        if not part:
            break
        rest += part
    if rest:
        yield rest
