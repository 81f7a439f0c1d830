"""`run new --from FILE.gguf`: its folder of Hugging Face's form, for as long as the command runs."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from p2pdiloco.cli.given.files import ENDING
from p2pdiloco.cli.given.kinds import refuse_pointer
from p2pdiloco.errors import StorageError, UserError, clean
from p2pdiloco.tasks.gguf import is_gguf, save_as_folder

SUFFIX = ".gguf"
_NAME = 60
"""Characters of the file's name that are kept beside its digest."""


@contextmanager
def as_folder(source: Path | None, out: Path, tokenizer: bool) -> Iterator[Path | None]:
    """Give a folder with what is in `source`, if that is a GGUF file, and else `source` itself.

    The folder lies beside `out`, where the same parameters are going to be, and is called what the run is
    going to say that it began with: the file's name and SHA-256. `tokenizer`: the file's own is wanted.

    Raises:
        UserError: it cannot be taken; it is a folder with GGUF files only.
        StorageError: there is no place beside `out`.
    """
    if source is None or not _is_gguf(source):
        yield source
        return
    try:
        with source.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        made = tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=f".{out.name}.")
    except OSError as error:
        raise StorageError(f"{error.filename or source}: {error.strerror}") from error
    with made as above:
        name = clean(source.name)[:_NAME].encode("ascii", "replace").decode()
        folder = Path(above) / f"{name} sha256:{digest}"
        save_as_folder(source, folder, lambda words: click.echo(words, err=True), tokenizer)
        yield folder


def _is_gguf(source: Path) -> bool:
    """Raises: UserError (it is a folder with such files and no others)."""
    if not source.is_dir():
        if source.suffix == SUFFIX and source.exists() and not is_gguf(source):
            refuse_pointer(source)
            raise UserError(f"{source} is no GGUF file: it does not begin as one does", "get it again")
        return is_gguf(source)
    found = sorted(source.glob(f"*{SUFFIX}"))
    if found and not any(source.glob(f"*{ENDING}")):
        raise UserError(f"{source} has GGUF files, and no safetensors file", f"give the file: {found[0]}")
    return False
