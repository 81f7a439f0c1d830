"""`run new --data`: a kind of source, a data set of the hub, or a path; and how many tokens are there.

The manifest names kinds only, never a path: a path says what kind it is, and is read to count its tokens.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from p2pdiloco.config.manifest import DataSection, Manifest
from p2pdiloco.errors import UserError
from p2pdiloco.tasks.documents import SUFFIXES
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tasks.task import Shards

SOURCES = ("embedded", "files", "jsonl", "parquet")
HUB = "hub:"
_KEPT = (
    *("field", "shuffle_samples", "heldout_percent"),
    *("tokenizer", "tokenizer_revision", "tokenizer_digest"),
    *("end_of_document", "begin_of_document"),
)
"""Keys of `[data]` that are not about one source."""


def data_source(word: str) -> str:
    """Check a source of data, as `--data` names it. Raises: UserError."""
    if word not in SOURCES and not (word.startswith(HUB) and word.count("/") == 1):
        raise UserError(f'data are {", ".join(SOURCES)}, {HUB}OWNER/NAME or a path that exists, not "{word}"')
    return word


def with_data(manifest: Manifest, word: str) -> tuple[Manifest, Path | None]:
    """Copy of the manifest that reads what `--data` says, and the path if it says one. Empty: as it is.

    Raises:
        UserError: there is no such source or path; a folder holds files of two kinds.
    """
    if not word:
        return manifest, None
    # (os.path takes what no path can be for one that is not there)
    path = None if word in SOURCES or not os.path.exists(word) else Path(word)  # noqa: PTH110
    kind, _, dataset = (_kind(path) if path else data_source(word)).partition(":")
    section = msgspec.to_builtins(DataSection()) | {"source": kind, "dataset": dataset}
    section |= {name: getattr(manifest.data, name) for name in _KEPT}
    try:
        data = msgspec.convert(section, DataSection)
    except msgspec.ValidationError as error:
        raise UserError(f'"{dataset}" is no name of a data set, OWNER/NAME') from error
    return msgspec.structs.replace(manifest, data=data), path


def check_countable(source: DataSection, path: Path | None) -> None:
    """Refuse data of which nobody here can say how many tokens they have. Raises: UserError."""
    if path is None and source.source != "embedded":
        what = f"{HUB}{source.dataset}" if source.source == "hub" else source.source
        raise UserError(
            f"--epochs counts the tokens of data that are here, which --data {what} does not name",
            "--data PATH is counted; or say how long the run is with --tokens",
        )


def count_tokens(manifest: Manifest, content: bytes | None, path: Path | None) -> int:
    """Tokens of the data that are trained on, as the run's tokenizer makes them; of images, their number.

    `content`: the tokenizer's file, None for bytes.

    Raises:
        UserError: the data cannot be read, or are too few for the run's context.
    """
    task = task_of(manifest, content)
    train = task.load_data(None if path is None else str(path)).train
    if isinstance(train, Shards):
        raise UserError(
            "--epochs counts data that are read as a whole, and these are a stream", "give --tokens instead"
        )
    return len(train) * task.tokens_per_sample


def _kind(path: Path) -> str:
    """Kind of source of a file or a folder, by the names in it."""
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    hidden = (any(part[0] == "." for part in file.relative_to(path).parts) for file in files)
    names = [file.name for file, is_hidden in zip(files, hidden, strict=True) if not is_hidden]
    kinds = [kind for kind, ends in SUFFIXES.items() if any(name.lower().endswith(ends) for name in names)]
    if len(kinds) > 1:
        raise UserError(f"{path} has both {' and '.join(kinds)} files", "give one kind of them")
    return kinds[0] if kinds else "files"
