"""`run new --tokenizer`: the file's digest, end-of-document token and vocabulary, into the manifest."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import click
import msgspec

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.cli.given.besides import object_in, with_besides
from p2pdiloco.cli.given.files import CONFIG, SINGLE
from p2pdiloco.cli.given.kinds import refuse_pointer
from p2pdiloco.cli.results import DESCRIPTION
from p2pdiloco.config.manifest import BYTES, ExportSection, Manifest, vocabulary_for
from p2pdiloco.daemon.run_files.shared_files import tokenizer_beside, tokenizer_on_disk, tokenizers_of_result
from p2pdiloco.errors import UserError, clean
from p2pdiloco.tasks.documents import hub_file, may_be_on_the_hub
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tasks.tokens import (
    FILE,
    FileTokenizer,
    digest_of,
    end_of_document,
    read_tokenizer,
    tokens_in_front,
)

OTHER_KINDS = (
    *("tokenizer.model*", "*.model", "*.spm", "*.tiktoken", "tekken.json"),
    *("vocab.*", "merges.txt", "*.codes", "tokenizer_config.json"),
)
"""Names of files of tokenizers that are not of the library `tokenizers`, the telling ones first."""


def chosen_tokenizer(
    manifest: Manifest, wanted: str | None, end: str, source: Path | None
) -> tuple[Manifest, bytes | None]:
    """The manifest with its tokenizer, and that file's content; None: the run reads raw bytes.

    `wanted`: a path, OWNER/NAME[@REVISION] on the hub, or "bytes"; None: what lies beside the model
    `source`. `end`: its token that ends documents, empty: the usual one. The vocabulary of a model that does
    not exist yet becomes the tokenizer's, rounded up.

    Raises:
        UserError: no such file, none of the kind, none of the usual tokens, or more than the model knows; the
            model's tokenizer is of another kind, or a checkpoint's is not beside it.
    """
    if wanted == BYTES and not Path(wanted).exists():
        return _with_bytes(manifest), None
    if wanted is not None:
        found, content = _with_tokenizer(manifest, wanted, end, source is None)
        is_same = found.data.tokenizer_digest == manifest.data.tokenizer_digest
        return found if is_same else _without_words(found), content
    if source is None:
        return manifest, None
    if manifest.data.tokenizer_digest:
        return _of_run(source, manifest, end)
    wanted = _of_model(source)
    if wanted is None:
        return manifest, None
    manifest, content = _with_tokenizer(manifest, wanted, end, False)
    return with_besides(manifest, Path(wanted).parent), content


def _with_bytes(manifest: Manifest) -> Manifest:
    data = msgspec.structs.replace(
        manifest.data,
        tokenizer=BYTES,
        tokenizer_revision="",
        tokenizer_digest="",
        end_of_document="",
        begin_of_document="",
    )
    return _without_words(msgspec.structs.replace(manifest, data=data))


def _without_words(manifest: Manifest) -> Manifest:
    """The manifest without what belongs to another tokenizer."""
    told = manifest.export
    export = ExportSection(dtype=told.dtype, context_tokens=told.context_tokens)
    return msgspec.structs.replace(manifest, export=export)


def _of_run(source: Path, manifest: Manifest, end: str) -> tuple[Manifest, bytes]:
    """The manifest with the tokenizer of the run whose result `source` is, which lies beside it.

    Raises:
        UserError: it does not.
    """
    result = source / SINGLE if source.is_dir() else source
    places = tokenizers_of_result(result, manifest)
    file = next((place for place in places if tokenizer_on_disk(place, manifest)), None)
    theirs = manifest.data
    if file is None:
        raise UserError(
            f"the run of {source} has the tokenizer {theirs.tokenizer}, which is not beside it",
            "give that file with --tokenizer",
        )
    manifest, content = _with_tokenizer(manifest, str(file), end or theirs.end_of_document, False)
    data = msgspec.structs.replace(
        manifest.data, tokenizer=theirs.tokenizer, tokenizer_revision=theirs.tokenizer_revision
    )
    manifest = msgspec.structs.replace(manifest, data=data)
    is_export = (result.parent / DESCRIPTION).exists()
    return with_besides(manifest, result.parent) if is_export else manifest, content


def _with_tokenizer(manifest: Manifest, wanted: str, end: str, fit: bool) -> tuple[Manifest, bytes]:
    path, (name, _, revision) = Path(wanted), wanted.partition("@")
    about: dict[str, Any] = {}
    if path.exists():
        name, revision = re.sub(r"[^A-Za-z0-9._-]", "-", path.name).lstrip("._-")[:96] or FILE, ""
        file = _in_folder(path) if path.is_dir() else _of_our_kind(path)
        refuse_pointer(file)
        content, about = read_tokenizer(file), object_in(file.with_name("tokenizer_config.json"))
    elif "/" in name and may_be_on_the_hub(name):
        click.echo(f"asking the hub for {FILE} of {name}", err=True)
        content = read_tokenizer(hub_file(name, FILE, revision))
    else:
        raise UserError(
            f"there is no tokenizer file {wanted}", "give a path, or OWNER/NAME of the Hugging Face hub"
        )
    end, digest = end or end_of_document(content), digest_of(content)
    # The run that a checkpoint is of has said it already.
    is_same = digest == manifest.data.tokenizer_digest
    data = msgspec.structs.replace(
        manifest.data,
        tokenizer=FILE if name == BYTES else name,
        tokenizer_revision=revision,
        tokenizer_digest=digest,
        end_of_document=end,
        begin_of_document=manifest.data.begin_of_document if is_same else _begin(content, about),
    )
    manifest = msgspec.structs.replace(manifest, data=data)
    vocabulary = FileTokenizer(content, end).vocabulary
    if fit and "vocabulary" in manifest.model:
        model = manifest.model | {"vocabulary": vocabulary_for(vocabulary)}
        manifest = msgspec.structs.replace(manifest, model=model)
    most = task_of(manifest).vocabulary
    if 0 < most < vocabulary:
        raise UserError(
            f"the tokenizer {name} has {vocabulary} tokens, but the model has a vocabulary of {most}",
            f"give the model's own tokenizer, or a model whose vocabulary is {vocabulary} or more",
        )
    return manifest, content


def _begin(content: bytes, about: dict[str, Any]) -> str:
    """The token that the tokenizer puts in front of a text; empty, with a word: none, or several."""
    found = tokens_in_front(content, about)
    if len(found) > 1:
        click.echo(f"the tokenizer begins a text with {' '.join(found)}: documents do without", err=True)
    elif found:
        click.echo(f"documents begin with {found[0]}, as the tokenizer begins a text", err=True)
    return found[0] if len(found) == 1 else ""


def _of_model(source: Path) -> str | None:
    """The tokenizer in the model's folder, if there is one that is not that of raw bytes.

    Raises:
        UserError: there is one of another kind.
    """
    folder = source if source.is_dir() else source.parent
    # An export has its description, a checkpoint lies beside no configuration.
    if (folder / DESCRIPTION).exists() or (folder is not source and not (folder / CONFIG).exists()):
        return None
    if not (folder / FILE).exists() and _other_kind(folder) is None:
        click.echo(f"{clean(folder.name)} has no tokenizer: text is read as raw bytes", err=True)
        return None
    return str(_in_folder(folder))


def _in_folder(folder: Path) -> Path:
    """Raises: UserError (it has no tokenizer, or one of another kind)."""
    if (folder / FILE).exists():
        return folder / FILE
    found = _other_kind(folder)
    if found is None:
        raise UserError(f"{folder} has no {FILE}", "give a folder that has, or the file")
    raise _of_another_kind(found)


def _other_kind(folder: Path) -> Path | None:
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    return next((file for pattern in OTHER_KINDS for file in files if _is_like(file, pattern)), None)


def _is_like(file: Path, pattern: str) -> bool:
    return fnmatch(file.name.lower(), pattern)


def _of_our_kind(file: Path) -> Path:
    """Raises: UserError (by its name it is a tokenizer of another kind)."""
    if file.suffix.lower() != ".json" and any(_is_like(file, pattern) for pattern in OTHER_KINDS):
        raise _of_another_kind(file)
    return file


def _of_another_kind(file: Path) -> UserError:
    folder = str(file.parent)
    load = f"T.from_pretrained({folder!r}).save_pretrained({folder!r})"
    return UserError(
        f"{folder} has its tokenizer in {file.name}, but only {FILE} is read",
        "convert it (pip install transformers sentencepiece tiktoken): python -c "
        f'"from transformers import AutoTokenizer as T; {load}"; '
        f"or give another with --tokenizer ({BYTES}: text is read as raw bytes)",
    )


def save_tokenizer(out: Path, content: bytes) -> Path:
    """Beside run.toml, where whoever signs the run looks for it. Raises: StorageError."""
    file = tokenizer_beside(out)
    Files().save(file, [content], durable=True)
    return file
