"""Data sets that Hugging Face `datasets` streams: by name from the hub, or from a local folder.

Shards. A shard is one of the data set's files, or, of a few files, every n-th document of one: whoever takes
such a part reads the whole file for it. A document is held out by the hash of its text, wherever it lies,
unless the manifest names a split for that.

Order. A shard is read in blocks: documents until there are `data.shuffle_samples` windows, which are then
shuffled by epoch, shard and place. So a place is the number of documents read, the windows taken of the block
from there, and the tokens that were left over. The next block is read by a thread, ahead.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
from msgspec.structs import replace

from p2pdiloco.config.manifest import DataSection
from p2pdiloco.errors import DataError, UserError, first_line, needing
from p2pdiloco.tasks.documents import (
    ANY_NAME,
    DAMAGED,
    INSTALL,
    MAX_LINE_BYTES,
    check_path,
    hash64,
    is_heldout,
)
from p2pdiloco.tasks.task import Data, Place
from p2pdiloco.tasks.text import Packer, Windows
from p2pdiloco.tasks.tokens import Tokenizer, Tokens
from p2pdiloco.util import DAMAGE, Frozen, Values

if TYPE_CHECKING:
    from p2pdiloco.tasks.task import Batch

OLDEST_MAJOR = 4
"""Oldest release of `datasets` that is used: earlier ones run scripts that lie in a data set's folder."""
LEAST_SHARDS = 64
"""Least number of shards: a data set of fewer files has its files' documents dealt out too."""
MOST_SHARDS = 1024
HELDOUT_TOKENS = 1 << 18
HELDOUT_DOCUMENTS = 20_000
"""Documents that are read at most to find held-out ones."""
ENDINGS = (".json", ".jsonl", ".ndjson", ".parquet", ".csv", ".tsv", ".txt", ".arrow")
"""Endings by which `datasets` knows texts, in small letters only."""
RETRIES_S = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Pauses after which a stream that broke is opened again."""


class _Block(Frozen):
    windows: Tokens
    """(n, context + 1), shuffled."""
    then: Place
    """Place where the next block begins."""
    is_last: bool


class HubStream:
    """Training documents as `tasks.task.Shards`."""

    def __init__(
        self,
        source: Any,
        section: DataSection,
        context_tokens: int,
        tokenizer: Tokenizer,
        identity: str,
        words: str = "the data set",
    ) -> None:
        """`source`: an IterableDataset; `words`: what a person knows it as."""
        self.section, self.context, self.tokenizer = section, context_tokens, tokenizer
        self.words = words
        self._source = source
        self._files = min(MOST_SHARDS, source.num_shards)
        self.parts = max(1, LEAST_SHARDS // self._files)
        self.count = self._files * self.parts
        self.identity = f"{identity}/{source.num_shards}"

    def open(self, epoch: int, shard: int, place: Place) -> _Reader:
        return _Reader(self, epoch, shard, place)

    def documents(self, shard: int, skipped: int) -> Iterator[str]:
        """Documents of this shard's file, but for the first ones; those that belong to other shards of it, or
        are held out, are empty."""
        file, part = divmod(shard, self.parts)
        source = self._source.shard(num_shards=self._files, index=file, contiguous=False)
        for index, text in enumerate(_texts(source.skip(skipped), self.section.field), skipped):
            ours = index % self.parts == part and (
                self.section.heldout_split or not is_heldout(text, self.section.heldout_percent)
            )
            yield text if ours else ""


class _Reader:
    """Reads one shard."""

    def __init__(self, stream: HubStream, epoch: int, shard: int, place: Place) -> None:
        self._stream = stream
        self._name = f"{epoch}/{shard}"
        self._shard = shard
        self._documents: Iterator[str] | None = None
        self._read = place.offset
        self._block: _Block | None = None
        self._taken = place.taken
        self._begin = place
        self._closed = threading.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._next: Future[_Block] = self._thread.submit(self._read_block, place)

    @property
    def place(self) -> Place:
        """Place of the next sample."""
        return Place(self._begin.offset, self._taken, self._begin.carry)

    def take(self, samples: int) -> Batch | None:
        import torch

        parts, missing = [], samples
        while missing and self._more():
            assert self._block is not None
            part = self._block.windows[self._taken : self._taken + missing]
            self._taken += len(part)
            missing -= len(part)
            parts.append(part)
        return (torch.from_numpy(np.concatenate(parts).astype(np.int64)),) if parts else None

    def close(self) -> None:
        """End the thread that reads ahead, once it is through with its block."""
        self._closed.set()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _more(self) -> bool:
        """False: no window is left, neither in this block nor in a later one."""
        while self._block is None or self._taken >= len(self._block.windows):
            if self._block is not None:
                self._begin, self._taken = self._block.then, 0
                if self._block.is_last:
                    # Nothing of it is left to take, however often somebody asks.
                    self._block = replace(self._block, windows=self._block.windows[:0])
                    return False
            self._block = self._next.result()
            if not self._block.is_last:
                self._next = self._thread.submit(self._read_block, self._block.then)
        return True

    def _read_block(self, place: Place) -> _Block:
        """Called on the thread. Reads documents until there are enough windows."""
        section, context = self._stream.section, self._stream.context
        packer = Packer(self._stream.tokenizer)
        left = np.frombuffer(place.carry, dtype=np.uint32)
        parts: list[Tokens] = [left]
        length = len(left)
        is_last = False
        while length <= section.shuffle_samples * context and not is_last:
            texts = self._some(64)
            is_last = not texts
            for text in texts:
                if text:
                    packer.add(text.encode(errors="replace"))
            tokens = packer.take().astype(np.uint32)
            parts.append(tokens)
            length += len(tokens)
        tokens = np.concatenate(parts)
        count = max(0, (len(tokens) - 1) // context)
        windows = (
            np.lib.stride_tricks.sliding_window_view(tokens, context + 1)[::context] if count else tokens
        )
        seed = hash64(f"block/{self._name}/{place.offset}")
        order = np.random.Generator(np.random.Philox(seed)).permutation(count)
        shuffled = windows[:count][order] if count else np.empty((0, context + 1), dtype=np.uint32)
        return _Block(shuffled, Place(self._read, 0, tokens[count * context :].tobytes()), is_last)

    def _some(self, documents: int) -> list[str]:
        """Take the next documents; fewer than one: the shard is over. A stream that breaks is opened
        again."""
        for pause_s in (*RETRIES_S, None):
            try:
                if self._documents is None:
                    self._documents = self._stream.documents(self._shard, self._read)
                found = list(islice(self._documents, documents))
                self._read += len(found)
                return found
            except _stream_errors() as error:
                self._documents = None
                if pause_s is None:
                    raise UserError(
                        f"{self._stream.words} cannot be read any more: {first_line(error)}"
                    ) from error
                self._closed.wait(pause_s)
            except ValueError as error:  # what is no text, no JSON, no parquet will be none in a second
                raise DataError(f"{self._stream.words} cannot be read: {first_line(error)}") from error
        return []


def load_stream(section: DataSection, path: str | None, context_tokens: int, tokenizer: Tokenizer) -> Data:
    """Open the data set, and read the held-out samples.

    Raises:
        UserError: `datasets` is missing or too old; there is no such data set, configuration, split or field;
            the hub cannot be reached; nothing is held out.
    """
    train = _opened(section, path, section.split)
    if section.heldout_split:
        held = _texts(_opened(section, path, section.heldout_split), section.field)
    else:
        documents = _texts(train, section.field)
        few = islice(documents, HELDOUT_DOCUMENTS)
        held = (text for text in few if is_heldout(text, section.heldout_percent))
    packer, tokens, length = Packer(tokenizer), [], 0
    words = f"the data set {path or section.dataset}"
    for text in islice(_as_user_errors(held, words), HELDOUT_DOCUMENTS):
        packer.add(text.encode(errors="replace"))
        tokens.append(packer.take())
        length += len(tokens[-1])
        if length >= HELDOUT_TOKENS:
            break
    heldout = np.concatenate(tokens) if tokens else np.empty(0, dtype=np.uint8)
    where = _local_identity(Path(path)) if path else f"{section.dataset}/{section.revision}"
    identity = f"{where}/{section.config}/{section.split}/{section.field}/{section.tokenizer_digest}"
    return Data(
        HubStream(train, section, context_tokens, tokenizer, identity, words),
        Windows(heldout, context_tokens, "held-out"),
        _left_out(Path(path)) if path else "",
    )


def _left_out(root: Path) -> str:
    """Files that `datasets` takes for none of its own, for an ending in capitals; empty: none."""
    found = sorted(
        file
        for file in root.rglob("*")
        if file.suffix != file.suffix.lower() and file.suffix.lower() in ENDINGS
    )
    files = f"{len(found)} files are" if len(found) > 1 else "1 file is"
    return f"data: {files} left out, since the ending is in capitals, such as {found[0]}" if found else ""


def _opened(section: DataSection, path: str | None, split: str) -> Any:
    with needing("streamed data needs the package datasets", "hub", DataError):
        import datasets
    if int(datasets.__version__.partition(".")[0]) < OLDEST_MAJOR:
        raise DataError(
            f"datasets {datasets.__version__} may run code that lies in a data set", f"{INSTALL} --upgrade"
        )
    if path is None and not section.dataset:
        raise DataError("this run streams each node's own data set, and none is given", "add --data FOLDER")
    if path is not None:
        check_path(Path(path))
    if path is None and "/" not in section.dataset:
        # `datasets` takes "text", "json" or "csv" for all such files of the current folder.
        raise DataError(
            f'the data set "{section.dataset}" has no owner',
            'data.dataset is a name of the hub: "OWNER/NAME"',
        )
    if path is None and Path(section.dataset).exists():
        # `datasets` prefers a local folder: a manifest could name one that its owner did not mean to show.
        raise DataError(
            f'there is a file or folder "{section.dataset}" here, which would be read instead of the hub',
            "start the node in another folder, or name it with --data",
        )
    try:
        builder = datasets.load_dataset_builder(
            # (absolute: a folder "text" would be taken for that reader of text)
            str(Path(path).absolute()) if path else section.dataset,
            name=section.config or None,
            revision=None if path else section.revision or None,
        )
        if path is None:
            _only_of_the_hub(section.dataset, builder.config.data_files)
        read_only(builder, section.field)
        found = builder.as_streaming_dataset(split=split)
        names = found.column_names or list(next(iter(found), {}))
    except _stream_errors(ValueError, RuntimeError) as error:
        raise UserError(
            f"the data set {path or section.dataset} cannot be opened: {first_line(error)}",
            "check data.dataset, data.config, data.split, and the network",
        ) from error
    if section.field not in names:
        raise DataError(
            f'the data set {path or section.dataset} has no column "{section.field}"',
            f"data.field: it has {', '.join(names)}",
        )
    found = found.select_columns([section.field])
    if (found.features or {}).get(section.field) == datasets.Value("null"):
        # Nulls alone in the first file, which would make other files' texts an error.
        found = found.cast_column(section.field, datasets.Value("string"))
    return found


def _only_of_the_hub(name: str, files: Any) -> None:
    """A card that lists files off the hub could have this disk's files read."""
    for file in (file for part in (files or {}).values() for file in part):
        if not str(file).startswith("hf://") or "::" in str(file):
            raise DataError(f"the data set {name} lists a file that is not on the hub: {file}"[:300])


def _texts(source: Any, field: str) -> Iterator[str]:
    for row in source:
        text = row[field]
        if text is not None and not isinstance(text, str):
            raise DataError(f'"{field}" of a document is no text', "check data.field")
        yield text or ""


def _as_user_errors(texts: Iterator[str], words: str) -> Iterator[str]:
    try:
        yield from texts
    except _stream_errors() as error:
        raise UserError(f"{words} cannot be read: {first_line(error)}") from error
    except ValueError as error:
        raise DataError(f"{words} cannot be read: {first_line(error)}") from error


def _stream_errors(*others: type[Exception]) -> tuple[type[Exception], ...]:
    """Errors raised where a connection or a file breaks, also by the HTTP libraries that `datasets` uses."""
    names = (("httpx", "HTTPError"), ("aiohttp", "ClientError"))
    found = [getattr(sys.modules[module], name) for module, name in names if module in sys.modules]
    return (OSError, StreamCut, *DAMAGED, *others, *found)


def _local_identity(root: Path) -> str:
    """Identity of a local data set: a digest of its files' names and sizes."""
    files = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
    lines = (f"{path.relative_to(root)}\0{path.stat().st_size}" for path in files)
    return hashlib.sha256("\n".join(lines).encode(errors=ANY_NAME)).hexdigest()


_ROWS_TOGETHER = 1024
_READ_BYTES = 1 << 20
MAX_LIST_BYTES = 1 << 30
"""Largest file that is one JSON list, and has to be in memory whole."""


class StreamCut(Exception):
    """Error of a stream that may go on if it is opened again; says in which file."""


def read_only(builder: Any, field: str) -> None:
    """Have a builder's files read for this column alone. Errors name the file: `StreamCut` for those
    of a stream that broke, a `UserError` for all others.

    `datasets` gives all files the columns and types of the first one, and fails where another file's differ.
    It knows no way to read a part of JSON; so such files are read here.
    """
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
        except _stream_errors() as error:
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


def _names(files: Values) -> Iterator[str]:
    """A builder is given lists of names, or of iterators over them."""
    for found in files.get("files_iterables") or files.get("files") or ():
        yield from [str(found)] if isinstance(found, str | Path) else found


def _of_json(opened: Callable[..., Any], name: str, field: str) -> Iterator[tuple[Any, Any]]:
    """Yield tables of one column. A row without the key, or with null, is no text."""
    import pyarrow as arrow

    with opened(name, "rb") as file:
        rows = enumerate(_rows(file, name), 1)
        keys: dict[str, None] = {}
        is_found = False
        for batch, some in enumerate(iter(lambda: list(islice(rows, _ROWS_TOGETHER)), [])):
            texts: list[str | None] = []
            for number, row in some:
                if isinstance(row, str):
                    row = {"text": row}
                text = row.get(field) if isinstance(row, dict) else row
                if text is not None and not isinstance(text, str):
                    raise DataError(f'"{field}" is no text in row {number} of {name}', "check data.field")
                is_found = is_found or (isinstance(row, dict) and field in row)
                keys |= dict.fromkeys(row or ()) if not is_found else {}
                texts.append(text)
            if not is_found:
                raise DataError(
                    f'{name} has no column "{field}"', f"data.field: it has {', '.join(keys)}"[:300]
                )
            yield (0, batch), arrow.table({field: arrow.array(texts, arrow.string())})


def _rows(file: Any, name: str) -> Iterator[Any]:
    """Of every line, or of the one list that the file is."""
    parts = iter(lambda: file.read(_READ_BYTES), b"")
    first = next(parts, b"").removeprefix(codecs.BOM_UTF8)  # some editors write one
    if first.lstrip().startswith(b"["):
        yield from _loose(_all(first, parts, name), list, name)
        return
    decode = msgspec.json.Decoder(Values).decode
    for number, line in enumerate(_lines(first, parts, name), 1):
        if not line.strip():
            continue
        try:
            yield decode(line)
        except DAMAGE:
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
    left = first
    while left:
        *lines, left = left.split(b"\n")
        yield from lines
        if len(left) > MAX_LINE_BYTES:
            raise DataError(f"a line of {name} has more than {MAX_LINE_BYTES >> 20} MiB")
        part = next(parts, b"")
        if not part:
            break
        left += part
    if left:
        yield left


def load_corpus(section: DataSection, path: str | None, context_tokens: int, tokenizer: Tokenizer) -> Data:
    """Training and held-out samples from every source that a manifest can name: windows of context + 1
    tokens, int64 (n, context + 1).

    `path`: the node's --data.

    Raises:
        UserError: one sentence: what is missing, unreadable, too small, too large.
    """
    if section.source == "hub":
        return load_stream(section, path, context_tokens, tokenizer)
    from p2pdiloco.tasks.text import load_text

    return load_text(section, path, context_tokens, tokenizer)
