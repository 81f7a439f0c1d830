"""Documents out of JSONL and parquet files, the choice of held-out data, and files of the hub.

Held-out data are chosen by content alone: of equal files, no node trains on what another measures. (Files
that are only alike may fall otherwise: regions are counted from a file's begin.) Names, folders and
neighbours of a file differ between nodes that have the same text, and so they do in the run that trained the
model before. None of that is in the hash. Only data that comes with the task, and is the same in every node,
goes by name.
"""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import logging
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from p2pdiloco.config.manifest import TOKENIZER_PATTERN, DataSection
from p2pdiloco.errors import DataError, UserError, first_line, install_hint, needing
from p2pdiloco.util import DAMAGE, Values

SUFFIXES = {"jsonl": (".jsonl", ".jsonl.gz", ".ndjson"), "parquet": (".parquet",)}
DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile)
"""Errors raised where compressed bytes are cut off, broken, or none."""
MAX_LINE_BYTES = 64 << 20
_ROWS_TOGETHER = 1024


INSTALL = install_hint("hub")


def check_path(path: Path) -> None:
    """Raises: DataError (there is no such file or folder)."""
    if not path.exists():
        raise DataError(f"the data path {path} does not exist", "check --data")


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
    decode = msgspec.json.Decoder(Values).decode
    for number, line in enumerate(_bounded_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = decode(line)
        except DAMAGE as error:
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
    with needing("a parquet file needs the package pyarrow", "hub", DataError):
        import pyarrow as arrow
        from pyarrow import parquet
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


ANY_NAME = "surrogatepass"
"""Error handler with which text is encoded that may be a file's name: not all of those are UTF-8."""
REGION_BYTES = 1 << 18
"""Bytes of the regions of a file; one part is cut out of each."""
SHORTEST_CUT_BYTES = 256
"""Least bytes of a part that is cut out. Where it would be less, all of the region is held out, or
nothing."""


class DocumentPiece(NamedTuple):
    """A part of a document."""

    heldout: bool
    """True: nobody trains on this part."""
    text: bytes
    ends: bool = True
    """True: the document ends with this part."""
    begins: bool = True
    """True: it begins with this part."""


def hash64(text: str) -> int:
    """First 64 bits of the text's SHA-256."""
    return _hash64(text.encode(errors=ANY_NAME))


def is_heldout(name: str, percent: int) -> bool:
    """Tell whether data of this name, or this text, is never trained on."""
    return hash64(f"heldout/{name}") % 100 < percent


def pieces(text: bytes, percent: int) -> Iterator[DocumentPiece]:
    """Cut a file into pieces: every region gives up `percent` per cent, one part at a place that its hash
    says. So a few files, or a single one, have held-out text too. A small file, or the rest of one, is held
    out whole or not at all."""
    given = at = 0
    while at < len(text):
        stop = cut(text, at, at + REGION_BYTES)
        first, end = (at + place for place in _heldout_part(text[at:stop], percent))
        if first < end:
            if given < first:
                yield DocumentPiece(False, text[given:first], False, given == 0)
            yield DocumentPiece(True, text[first:end], end == len(text), first == 0)
            given = end
        at = stop
    if given < len(text):
        yield DocumentPiece(False, text[given:], True, given == 0)


def cut(text: bytes, start: int, most: int) -> int:
    """Find the end of a piece: behind the last line that ends from `start` to `most`, or else between two
    characters."""
    if most >= len(text):
        return len(text)
    line = text.rfind(b"\n", start, most) + 1
    if line:
        return line
    # UTF-8: bytes 10xxxxxx go on with a character, which has four at most.
    return next((cut for cut in range(most, most - 4, -1) if text[cut] & 0xC0 != 0x80), most)


def _heldout_part(region: bytes, percent: int) -> tuple[int, int]:
    """Begin and end of the part; they are equal where all of the region is trained on."""
    size = len(region) * percent // 100
    value = _hash64(region)
    if size < SHORTEST_CUT_BYTES:
        return 0, len(region) if value % 100 < percent else 0
    first = value % (len(region) - size + 1)
    slack = size // 4
    return _back(region, first, slack), _back(region, first + size, slack)


def _back(region: bytes, at: int, most: int) -> int:
    """Go back to the begin of a line at most `most` bytes before, or else of a character."""
    return cut(region, max(0, at - most), at) if at else 0


def _hash64(content: bytes) -> int:
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little")


def may_be_on_the_hub(name: str) -> bool:
    """Tell whether the name has the form [OWNER/]NAME and does not look like a path.

    Nobody should wait for a network to hear that a file is missing.
    """
    return re.match(TOKENIZER_PATTERN, name) is not None and not name.endswith(".json")


def hub_file(name: str, file: str, revision: str = "") -> Path:
    """Fetch a file into the hub's cache; `revision`: empty for the newest. Without a network that takes the
    library most of a minute.

    Raises:
        UserError: the package is missing, or there is no such file, or no way to it.
    """
    with needing(f"{file} of the hub needs the package huggingface_hub", "hub"):
        from huggingface_hub import hf_hub_download
    # It tells of every attempt; what came of them is one sentence.
    attempts = logging.getLogger("huggingface_hub")
    level = attempts.level
    attempts.setLevel(logging.ERROR)
    try:
        return Path(hf_hub_download(name, file, revision=revision or None))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} of {name} cannot be had from the hub: {first_line(error)}",
            "download it elsewhere and give its path",
        ) from error
    finally:
        attempts.setLevel(level)
