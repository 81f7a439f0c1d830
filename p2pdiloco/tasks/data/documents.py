"""Documents out of JSONL and parquet files."""

from __future__ import annotations

import codecs
import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from p2pdiloco.config.manifest import DataSection
from p2pdiloco.errors import DataError, first_line
from p2pdiloco.tasks.data.hub_file import INSTALL

SUFFIXES = {"jsonl": (".jsonl", ".jsonl.gz", ".ndjson"), "parquet": (".parquet",)}
DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)
"""Errors raised where compressed bytes are cut off, broken, or none."""
MAX_LINE_BYTES = 64 << 20
_ROWS_TOGETHER = 1024


def rows(path: Path, section: DataSection) -> Iterator[str]:
    """The documents of a file: the manifest's field of every line or row. Empty ones and nulls are left out.

    Raises:
        UserError: a line is no JSON, the field is missing or no text; pyarrow is missing; no parquet file, or
            no whole gzip file.
        OSError: it cannot be read.
    """
    found = _parquet(path, section.field) if section.source == "parquet" else _lines(path, section.field)
    for number, text in enumerate(found, 1):
        if text is not None and not isinstance(text, str):
            raise DataError(f'"{section.field}" is no text in row {number} of {path}', "check data.field")
        if text:
            yield text


def _lines(path: Path, field: str) -> Iterator[Any]:
    decode = msgspec.json.Decoder(dict[str, Any]).decode
    for number, line in enumerate(_bounded_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DataError(f"line {number} of {path} is no JSON object: {_reason(line, error)}") from error
        if field not in row:
            raise DataError(f'line {number} of {path} has no key "{field}"', "check data.field")
        yield row[field]


def _reason(line: bytes, error: Exception) -> str:
    """Say what is wrong with a line. What Python's own module writes and takes msgspec only calls invalid or
    truncated: NaN and Infinity, and escapes such as \\ud800 alone."""
    no_numbers: list[str] = []
    try:
        json.dumps(json.loads(line, parse_constant=no_numbers.append), ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "half a surrogate pair is no character"
    except (ValueError, RecursionError):
        return first_line(error)
    return f"{no_numbers[0]} is not JSON; null is" if no_numbers else first_line(error)


def _bounded_lines(path: Path) -> Iterator[bytes]:
    with gzip.open(path, "rb") if path.suffix.lower() == ".gz" else path.open("rb") as file:
        number = 0
        try:
            while line := file.readline(MAX_LINE_BYTES + 1):
                line = line if number else line.removeprefix(codecs.BOM_UTF8)  # some editors write one
                number += 1
                if len(line) > MAX_LINE_BYTES:
                    raise DataError(f"line {number} of {path} has more than {MAX_LINE_BYTES >> 20} MiB")
                yield line
        except DAMAGED as error:
            raise DataError(
                f"{path} cannot be read as gzip: {first_line(error)}", "get it again, or leave it out"
            ) from error


def _parquet(path: Path, field: str) -> Iterator[Any]:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError as error:
        raise DataError("parquet files need the package pyarrow, and it is not installed", INSTALL) from error
    try:
        with parquet.ParquetFile(path) as file:
            if field not in file.schema_arrow.names:
                raise DataError(
                    f'{path} has no column "{field}"', f"it has {', '.join(file.schema_arrow.names)}"
                )
            for batch in file.iter_batches(_ROWS_TOGETHER, columns=[field]):
                yield from batch.column(0).to_pylist()
    except arrow.ArrowException as error:
        raise DataError(f"{path} cannot be read as parquet: {first_line(error)}") from error
