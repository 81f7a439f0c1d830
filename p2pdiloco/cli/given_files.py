"""Files of a model in somebody's folder, for `run new`: weights, config, tokenizer, and what an export needs.

`ModelFiles` are the weights: the files that an index lists, or the one of the usual name, no others. What
lies beside them (an older file, another program's, a run's own version 0) is named, and not read. `as_folder`
makes a folder of a GGUF file. `with_side_files` and `chosen_tokenizer` put what other files say into the
manifest.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.adapters.result_file import Arrays, load_tensors, tensor_types
from p2pdiloco.cli.options import say
from p2pdiloco.cli.result_commands import DESCRIPTION
from p2pdiloco.config.manifest import (
    BYTES,
    MAX_EXPORT_TEXT,
    MAX_MANIFEST_BYTES,
    Dtype,
    ExportSection,
    Manifest,
    canonical_bytes,
    vocabulary_for,
)
from p2pdiloco.daemon.run_files.shared_files import tokenizer_beside, tokenizer_on_disk, tokenizers_of_result
from p2pdiloco.errors import StorageError, UserError, clean
from p2pdiloco.tasks.documents import hub_file, may_be_on_the_hub
from p2pdiloco.tasks.gguf import is_gguf, save_as_folder
from p2pdiloco.tasks.hub_export import LONG_NAMES
from p2pdiloco.tasks.hub_models import NOT_PARAMETERS, harmless, read_json
from p2pdiloco.tasks.registry import task_of
from p2pdiloco.tasks.tokens import (
    TOKENIZER_FILE,
    FileTokenizer,
    end_of_document,
    read_tokenizer,
    tokenizer_digest,
    tokens_in_front,
)
from p2pdiloco.util import DAMAGE, Values

CONFIG = "config.json"
ENDING = ".safetensors"
SINGLE = f"model{ENDING}"
INDEX = f"{SINGLE}.index.json"
MAX_INDEX_BYTES = 64 << 20
_PART = re.compile(rf"(.*)-(\d{{5}})-of-(\d{{5}}){re.escape(ENDING)}")


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class ModelFiles:
    """The files at `source`, a folder or one file of it.

    `listed`: by parameter, the file that the index says it is in; empty: there is no index. `foreign`: files
    that are not read.
    """

    def __init__(self, source: Path) -> None:
        """Raises:
        UserError: there is none, or one of another kind; the index cannot be read, or lists files that are
            missing; so are parts.
        """
        self.folder = source if source.is_dir() else source.parent
        self.listed: dict[str, str] = {}
        refuse_other_kinds(source)
        if not source.is_dir():
            self.files, self.foreign = [source], []
            return
        found = sorted(source.glob(f"*{ENDING}"))
        index = source / INDEX
        if index.exists():
            self.listed = _read_index(index)
            self.files = sorted({source / name for name in self.listed.values()})
            missing = [file.name for file in self.files if not file.exists()]
            if missing:
                raise UserError(
                    f"{index} lists {missing[0]}, which is not there", "get the whole folder again"
                )
        elif (source / SINGLE).exists():
            self.files = [source / SINGLE]
        else:
            self.files = found
            _check_parts(found)
        if not self.files:
            raise UserError(f"{source} has no safetensors file", "give a folder that has, or a checkpoint")
        self.foreign = [file for file in found if file not in self.files]
        for file in self.files:
            refuse_other_kinds(file)

    def parameters(self) -> Arrays:
        """Load what the files hold. Raises: StorageError, UserError (as `weights`)."""
        self.weights()
        found: Arrays = {}
        for file in self.files:
            found |= load_tensors(file, NOT_PARAMETERS)[0]
        return found

    def types(self) -> dict[str, str]:
        """Types of the parameters, as safetensors calls them, by name. Raises: StorageError."""
        return {name: kind for file in self.files for name, kind in _types(file).items()}

    def weights(self) -> dict[str, str]:
        """Names of the parameters, each with its file's.

        Raises:
            UserError: a listed parameter is missing, one is in two files, or in another than is listed; a
                file cannot be read.
        """
        found: dict[str, str] = {}
        for file in self.files:
            for name in _types(file):
                listed = self.listed.get(name, "" if self.listed else file.name)
                if listed != file.name or name in found:
                    other = found.get(name) or (f"in {listed}" if listed else "listed nowhere")
                    raise UserError(
                        f"{file} has {name}, which by {INDEX} is {other}"
                        if self.listed
                        else f"{file} has {name}, and so has {other}",
                        "get the whole folder again",
                    )
                found[name] = file.name
        missing = [name for name in self.listed if name not in found and not name.endswith(NOT_PARAMETERS)]
        if missing:
            file = self.folder / self.listed[missing[0]]
            raise UserError(
                f"{file} lacks {missing[0]}, which {INDEX} lists there", "get the whole folder again"
            )
        return found

    @contextmanager
    def alone(self) -> Iterator[Path]:
        """Give a folder in which there are these files only, for a library that chooses by itself."""
        with tempfile.TemporaryDirectory() as made:
            weights = self.weights()
            is_single = len(self.files) == 1
            for file in self.files:
                (Path(made) / (SINGLE if is_single else file.name)).symlink_to(file.absolute())
            if not is_single:
                text = msgspec.json.encode({"metadata": {}, "weight_map": weights})
                (Path(made) / INDEX).write_bytes(text)
            (Path(made) / "generation_config.json").write_text("{}")  # (the library asks for one)
            yield Path(made)

    def words(self) -> str:
        """Say what is not read; empty: all is."""
        if not self.foreign:
            return ""
        first, others = self.foreign[0], len(self.foreign) - 1
        more = f" and {others} more" if others else ""
        by = f"{INDEX} does not list {'them' if others else 'it'}" if self.listed else f"there is {SINGLE}"
        return f"not read: {first}{more}, since {by}"


def _types(file: Path) -> dict[str, str]:
    return {name: kind for name, kind in tensor_types(file).items() if not name.endswith(NOT_PARAMETERS)}


def _read_index(path: Path) -> dict[str, str]:
    try:
        with path.open("rb") as file:
            listed = msgspec.json.decode(file.read(MAX_INDEX_BYTES), type=_Index).weight_map
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except DAMAGE as error:
        raise UserError(
            f"{path} is no index of safetensors files: {error}", "get the folder again"
        ) from error
    odd = [name for name in listed.values() if Path(name).name != name or not name.endswith(ENDING)]
    if odd or not listed:
        what = f"lists {odd[0]}, which is no file of its folder" if odd else "lists nothing"
        raise UserError(f"{path} {what}", "get the folder again")
    return listed


def _check_parts(files: list[Path]) -> None:
    """Refuse parts of which some are missing, by their names. Raises: UserError."""
    parts = [match for file in files if (match := _PART.fullmatch(file.name))]
    for match in parts:
        stem, _, total = match.groups()
        here = {int(other[2]) for other in parts if other[1] == stem and other[3] == total}
        lacking = sorted({*range(1, min(int(total), 9999) + 1)} - here)
        if lacking:
            name = f"{stem}-{lacking[0]:05}-of-{total}{ENDING}"
            raise UserError(f"{files[0].parent} has no {name}", "get the whole folder again")


# Kinds of files that people take for weights, and that hold none or cannot be read safely.

POINTER = b"version https://git-lfs"
_PICKLES = (".bin", ".pth", ".pt", ".ckpt", ".pkl")
_ADAPTER = "adapter_config.json"


def refuse_other_kinds(source: Path) -> None:
    """Refuse a file that is only a pointer to another or a pickle, and a folder with nothing but such.

    Raises:
        UserError: it is one.
    """
    if source.is_file():
        refuse_pointer(source)
    files = sorted(source.iterdir()) if source.is_dir() else [source]
    if any(file.suffix == ".safetensors" for file in files) and (source / _ADAPTER).exists():
        if not (source / "config.json").exists():
            raise UserError(
                f"{source} is an adapter, not a model: {_ADAPTER} says of which",
                "merge it into its model first: peft's merge_and_unload(), then save_pretrained",
            )
        return
    if source.is_dir() and any(file.suffix in (".safetensors", ".gguf") for file in files):
        return
    pickled = next((file for file in files if file.suffix.lower() in _PICKLES and file.exists()), None)
    if pickled is not None:
        raise UserError(
            f"{pickled} is a pickle, which may execute code when it is read, so it is not read here",
            "if you trust it, convert its folder: transformers' from_pretrained(FOLDER)"
            ".save_pretrained(OTHER) writes safetensors",
        )


def refuse_pointer(file: Path) -> None:
    """Refuse what git has instead of a large file. Raises: UserError."""
    try:
        with file.open("rb") as opened:
            is_pointer = opened.read(len(POINTER)) == POINTER
    except OSError:
        return  # who reads it says why not
    if is_pointer:
        raise UserError(
            f"{file} is a pointer of git-lfs, and the file itself was not fetched",
            "git lfs pull, in its folder",
        )


# GGUF: a folder of Hugging Face's form, for as long as the command runs.

GGUF = ".gguf"
_MAX_NAME = 60
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
        name = clean(source.name)[:_MAX_NAME].encode("ascii", "replace").decode()
        folder = Path(above) / f"{name} sha256:{digest}"
        save_as_folder(source, folder, say, tokenizer)
        yield folder


def _is_gguf(source: Path) -> bool:
    """Raises: UserError (it is a folder with such files and no others)."""
    if not source.is_dir():
        if source.suffix == GGUF and source.exists() and not is_gguf(source):
            refuse_pointer(source)
            raise UserError(f"{source} is no GGUF file: it does not begin as one does", "get it again")
        return is_gguf(source)
    found = sorted(source.glob(f"*{GGUF}"))
    if found and not any(source.glob(f"*{ENDING}")):
        raise UserError(f"{source} has GGUF files, and no safetensors file", f"give the file: {found[0]}")
    return False


# Special tokens, template and generation: in `[export]` of the manifest, for exports wherever the folder is.

_READ_BYTES = 4 << 20
_DTYPES: dict[str, Dtype] = {long: short for short, long in LONG_NAMES.items()}
_ELSEWHERE = ("added_tokens_decoder", "model_max_length", "chat_template", "backend", "name_or_path")
"""Keys of tokenizer_config.json that tokenizer.json, the run, or a file of its own says."""


def with_side_files(manifest: Manifest, folder: Path) -> Manifest:
    """Add what these files say to the manifest. What is no JSON, or too large to travel, is left out with a
    word."""
    about = object_in(folder / "special_tokens_map.json") | object_in(folder / "tokenizer_config.json")
    template = _text(folder / "chat_template.jinja") or about.get("chat_template")
    if isinstance(template, list):  # several by name: the default one
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if "auto_map" in about:  # a class of its own, which nobody else can load
        about.pop("tokenizer_class", None)
    config = object_in(folder / CONFIG)
    ids = {name: value for name, value in config.items() if name.endswith("_token_id")}
    texts = {
        "token_ids": _json(ids),
        "tokenizer_config": _json({name: about[name] for name in about if name not in _ELSEWHERE}),
        "generation_config": _json(object_in(folder / "generation_config.json")),
        "chat_template": template if isinstance(template, str) else "",
    }
    for name in sorted(texts, key=lambda name: len(texts[name]), reverse=True):
        export = replace(manifest.export, **texts)
        found = replace(manifest, export=export)
        if len(texts[name]) <= MAX_EXPORT_TEXT and len(canonical_bytes(found)) <= MAX_MANIFEST_BYTES:
            break
        say(f"the {name.replace('_', ' ')} in {folder} is too large to travel with the run")
        texts[name] = ""
    return replace(manifest, export=replace(manifest.export, **texts))


def dtype_in(config: Mapping[str, Any]) -> Dtype:
    """Type of the parameters that a config.json states, by its older or newer name, or for its text part;
    fp32 where it is none in which parameters are exported."""
    inner = config.get("text_config")
    for table in (config, inner if isinstance(inner, dict) else {}):
        stated = table.get("dtype", table.get("torch_dtype"))
        if stated is not None:
            return _DTYPES.get(str(stated).removeprefix("torch."), "fp32")
    return "fp32"


def _json(found: Values) -> str:
    kept = harmless(found)
    return json.dumps(kept, sort_keys=True, ensure_ascii=False) if kept else ""


def object_in(path: Path) -> Values:
    """Read a JSON object; empty, with a line for the person, where the file is no such thing."""
    text = _text(path)
    try:
        found = read_json(text) if text else {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        say(f"{path} is no JSON object, and left out")
        return {}
    return found


def _text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(_READ_BYTES).decode(errors="replace")
    except OSError:
        return ""


# Tokenizer: digest, end-of-document token and vocabulary in the manifest.

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
    return with_side_files(manifest, Path(wanted).parent), content


def _with_bytes(manifest: Manifest) -> Manifest:
    data = replace(
        manifest.data,
        tokenizer=BYTES,
        tokenizer_revision="",
        tokenizer_digest="",
        end_of_document="",
        begin_of_document="",
    )
    return _without_words(replace(manifest, data=data))


def _without_words(manifest: Manifest) -> Manifest:
    """The manifest without what belongs to another tokenizer."""
    told = manifest.export
    export = ExportSection(dtype=told.dtype, context_tokens=told.context_tokens)
    return replace(manifest, export=export)


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
    data = replace(manifest.data, tokenizer=theirs.tokenizer, tokenizer_revision=theirs.tokenizer_revision)
    manifest = replace(manifest, data=data)
    is_export = (result.parent / DESCRIPTION).exists()
    return with_side_files(manifest, result.parent) if is_export else manifest, content


def _with_tokenizer(manifest: Manifest, wanted: str, end: str, fit: bool) -> tuple[Manifest, bytes]:
    path, (name, _, revision) = Path(wanted), wanted.partition("@")
    about: Values = {}
    if path.exists():
        name, revision = re.sub(r"[^A-Za-z0-9._-]", "-", path.name).lstrip("._-")[:96] or TOKENIZER_FILE, ""
        file = _in_folder(path) if path.is_dir() else _of_our_kind(path)
        refuse_pointer(file)
        content, about = read_tokenizer(file), object_in(file.with_name("tokenizer_config.json"))
    elif "/" in name and may_be_on_the_hub(name):
        say(f"asking the hub for {TOKENIZER_FILE} of {name}")
        content = read_tokenizer(hub_file(name, TOKENIZER_FILE, revision))
    else:
        raise UserError(
            f"there is no tokenizer file {wanted}", "give a path, or OWNER/NAME of the Hugging Face hub"
        )
    end, digest = end or end_of_document(content), tokenizer_digest(content)
    # The run that a checkpoint is of has said it already.
    is_same = digest == manifest.data.tokenizer_digest
    data = replace(
        manifest.data,
        tokenizer=TOKENIZER_FILE if name == BYTES else name,
        tokenizer_revision=revision,
        tokenizer_digest=digest,
        end_of_document=end,
        begin_of_document=manifest.data.begin_of_document if is_same else _begin(content, about),
    )
    manifest = replace(manifest, data=data)
    vocabulary = FileTokenizer(content, end).vocabulary
    if fit and "vocabulary" in manifest.model:
        model = manifest.model | {"vocabulary": vocabulary_for(vocabulary)}
        manifest = replace(manifest, model=model)
    most = task_of(manifest).vocabulary
    if 0 < most < vocabulary:
        raise UserError(
            f"the tokenizer {name} has {vocabulary} tokens, but the model has a vocabulary of {most}",
            f"give the model's own tokenizer, or a model whose vocabulary is {vocabulary} or more",
        )
    return manifest, content


def _begin(content: bytes, about: Values) -> str:
    """The token that the tokenizer puts in front of a text; empty, with a word: none, or several."""
    found = tokens_in_front(content, about)
    if len(found) > 1:
        say(f"the tokenizer begins a text with {' '.join(found)}: documents do without")
    elif found:
        say(f"documents begin with {found[0]}, as the tokenizer begins a text")
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
    if not (folder / TOKENIZER_FILE).exists() and _other_kind(folder) is None:
        say(f"{clean(folder.name)} has no tokenizer: text is read as raw bytes")
        return None
    return str(_in_folder(folder))


def _in_folder(folder: Path) -> Path:
    """Raises: UserError (it has no tokenizer, or one of another kind)."""
    if (folder / TOKENIZER_FILE).exists():
        return folder / TOKENIZER_FILE
    found = _other_kind(folder)
    if found is None:
        raise UserError(f"{folder} has no {TOKENIZER_FILE}", "give a folder that has, or the file")
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
        f"{folder} has its tokenizer in {file.name}, but only {TOKENIZER_FILE} is read",
        "convert it (pip install transformers sentencepiece tiktoken): python -c "
        f'"from transformers import AutoTokenizer as T; {load}"; '
        f"or give another with --tokenizer ({BYTES}: text is read as raw bytes)",
    )


def save_tokenizer(out: Path, content: bytes) -> Path:
    """Beside run.toml, where whoever signs the run looks for it. Raises: StorageError."""
    file = tokenizer_beside(out)
    Files().save(file, [content], durable=True)
    return file
