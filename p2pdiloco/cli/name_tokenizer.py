"""`run new --tokenizer`: the file's digest, end-of-document token and vocabulary, into the manifest."""

from __future__ import annotations

import re
from pathlib import Path

import click
import msgspec

from p2pdiloco.adapters.disk.files import Files
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.config.models import BYTES, vocabulary_for
from p2pdiloco.daemon.run_files.tokenizers import tokenizer_beside
from p2pdiloco.errors import UserError
from p2pdiloco.tasks.data.hub_file import hub_file, may_be_on_the_hub
from p2pdiloco.tasks.data.tokens import FILE, FileTokenizer, digest_of, end_of_document, read_tokenizer
from p2pdiloco.tasks.registry import task_of


def chosen_tokenizer(
    manifest: Manifest, wanted: str | None, end: str, source: Path | None
) -> tuple[Manifest, bytes | None]:
    """The manifest with its tokenizer, and that file's content; None: the run reads raw bytes.

    `wanted`: a path, or OWNER/NAME[@REVISION] on the hub; None: what lies beside the model `source`. `end`:
    its token that ends documents, empty: the usual one. The vocabulary of a model that does not exist yet
    becomes the tokenizer's, rounded up.

    Raises:
        UserError: no such file, none of the kind, none of the usual tokens, or more than the model knows.
    """
    if wanted is None and source is not None:
        wanted, end = _of_model(source, manifest), end or manifest.data.end_of_document
    return (manifest, None) if wanted is None else _with_tokenizer(manifest, wanted, end, source is None)


def _with_tokenizer(manifest: Manifest, wanted: str, end: str, fit: bool) -> tuple[Manifest, bytes]:
    path, (name, _, revision) = Path(wanted), wanted.partition("@")
    if path.exists():
        name, revision = re.sub(r"[^A-Za-z0-9._-]", "-", path.name).lstrip("._-")[:96] or FILE, ""
        content = read_tokenizer(path / FILE if path.is_dir() else path)
    elif "/" in name and may_be_on_the_hub(name):
        click.echo(f"asking the hub for {FILE} of {name}", err=True)
        content = read_tokenizer(hub_file(name, FILE, revision))
    else:
        raise UserError(
            f"there is no tokenizer file {wanted}", "give a path, or OWNER/NAME of the Hugging Face hub"
        )
    end = end or end_of_document(content)
    data = msgspec.structs.replace(
        manifest.data,
        tokenizer=FILE if name == BYTES else name,
        tokenizer_revision=revision,
        tokenizer_digest=digest_of(content),
        end_of_document=end,
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


def _of_model(source: Path, manifest: Manifest) -> str | None:
    """The tokenizer in the model's folder, if there is one that is not that of raw bytes."""
    folder = source if source.is_dir() else source.parent
    file, exported = folder / FILE, (folder / "run.json").exists()
    if not file.exists() or ((exported or folder is not source) and manifest.data.tokenizer == BYTES):
        return None
    return str(file)


def save_tokenizer(out: Path, content: bytes) -> Path:
    """Beside run.toml, where whoever signs the run looks for it. Raises: StorageError."""
    file = tokenizer_beside(out)
    Files().save(file, [content], durable=True)
    return file
