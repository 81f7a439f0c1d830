"""GGUF files: the header, read within bounds, and the whole file as a model's folder in fp32.

Libraries that read such files believe the counts in them. So `read_header` reads the header first, from a
file that may be anybody's: a count beyond what the file can hold, or any model has, is an error.

`save_as_folder` writes a folder of Hugging Face's form. `transformers` knows such files of some
architectures. It passes by what it does not know: scaled positions, caps, tensors. So what it does not read
is compared with what the model has, and refused where the model would be another one.
"""

from __future__ import annotations

import json
import math
import mmap
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from p2pdiloco.errors import UserError, in_a_sentence, needing
from p2pdiloco.tasks.causal_lm import keep_quiet
from p2pdiloco.tasks.hub_models import check_loaded
from p2pdiloco.util import Frozen, Say, Values

MAGIC = b"GGUF"
VERSIONS = (2, 3)
_MAX_ENTRIES = 1 << 16
_MAX_TENSORS = 1 << 17
_MAX_DIMENSIONS = 8
_MAX_TEXT_BYTES = 1 << 24
_MAX_ELEMENTS = 1 << 24
"""Elements of all arrays together: tokens, scores and merges of a vocabulary."""
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9


class GgufHeader(Frozen):
    """Header of a file: entries, and tensors."""

    values: Values
    """Numbers and texts by key; of arrays their lengths."""
    tensors: dict[str, int]
    """Number of the type of each tensor, by name."""

    @property
    def architecture(self) -> str:
        """Name of the architecture, as llama.cpp calls it."""
        return str(self.values.get("general.architecture", ""))


def is_gguf(path: Path) -> bool:
    """Tell whether it is such a file, by its first bytes."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def read_header(path: Path) -> GgufHeader:
    """Read the header of a GGUF file.

    Raises:
        UserError: it cannot be read, is of another version, damaged or cut off.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return _HeaderReader(content).header()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    except (struct.error, ValueError) as error:  # (also of an empty file)
        raise UserError(f"{path} cannot be read as GGUF: {error}", "get the file again") from error


class _HeaderReader:
    """Its methods raise `ValueError` or `struct.error`."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._at = 0
        self._elements = _MAX_ELEMENTS

    def header(self) -> GgufHeader:
        if self._content[:4] != MAGIC:
            raise ValueError("its first bytes are another file's")
        self._at = 4
        version, tensors, entries = self._number("I"), self._number("Q"), self._number("Q")
        if version not in VERSIONS:
            raise ValueError(f"version {version} is none of {VERSIONS}")
        if tensors > _MAX_TENSORS or entries > _MAX_ENTRIES:
            raise ValueError(f"{tensors} tensors and {entries} entries are beyond any model")
        values = {}
        for _ in range(entries):
            key = self._text()
            values[key] = self._value(self._number("I"))
        return GgufHeader(values, dict(self._tensor() for _ in range(tensors)))

    def _number(self, form: str) -> Any:
        (found,) = struct.unpack_from("<" + form, self._content, self._at)
        self._at += struct.calcsize("<" + form)
        return found

    def _text(self) -> str:
        size = self._number("Q")
        if size > _MAX_TEXT_BYTES or self._at + size > len(self._content):
            raise ValueError(f"it ends within a text of {size} bytes")
        self._at += size
        return self._content[self._at - size : self._at].decode()

    def _value(self, kind: int) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind != _ARRAY:
            return self._number(_form(kind))
        kind, count = self._number("I"), self._number("Q")
        self._elements -= count
        if self._elements < 0:
            raise ValueError(f"an array of {count} elements is beyond any vocabulary")
        if kind == _TEXT:
            for _ in range(count):
                self._text()
        else:
            self._at += count * struct.calcsize("<" + _form(kind))
        return count

    def _tensor(self) -> tuple[str, int]:
        name, dimensions = self._text(), self._number("I")
        if dimensions > _MAX_DIMENSIONS:
            raise ValueError(f"a tensor of {dimensions} dimensions is beyond any model")
        self._at += 8 * dimensions
        kind = self._number("I")
        self._at += 8  # where it begins
        if self._at > len(self._content):
            raise ValueError("it ends within its list of tensors")
        return name, kind


def _form(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"type {kind} is none")
    return _SCALARS[kind]


_SHAPES = (
    *("context_length", "embedding_length", "block_count", "feed_forward_length", "vocab_size"),
    *("head_count", "head_count_kv", "key_length", "value_length", "expert_count", "tensor_data_layout"),
    *("expert_feed_forward_length", "expert_shared_feed_forward_length"),
)
"""Last parts of keys that say what the tensors' shapes say too."""
_NOTHING = (None, "", 0, 1, "none", False)
"""Values of scales and switches that change nothing."""
_UNREAD = "which transformers does not read from a GGUF file: the model would be another one"
_INSTEAD = "start from its folder of safetensors instead"
_PLAIN = ("F32", "F16", "BF16", "F64")


def save_as_folder(file: Path, folder: Path, say: Say, tokenizer: bool) -> None:
    """Write config, weights in fp32 and, if it is wanted, the tokenizer of a GGUF file into a folder.

    Raises:
        UserError: it cannot be read, is a part of a split file, of an architecture that `transformers` does
            not load from such files, or has what it does not read; a package is missing.
    """
    header = read_header(file)
    parts = header.values.get("split.count", 1)
    if isinstance(parts, int) and parts > 1:
        raise UserError(
            f"{file} is one of {parts} parts of a split GGUF file",
            "join them: llama.cpp's llama-gguf-split --merge FIRST-PART WHOLE",
        )
    with needing("a GGUF file needs a package", "hub"):
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
        import transformers.integrations.gguf  # noqa: F401 (older releases have none)
    with tempfile.TemporaryDirectory() as alone:  # the library takes other files of a folder along
        (Path(alone) / "model.gguf").symlink_to(file.absolute())
        model = _loaded(alone, header, str(file), say)
        say(_words(header, file))
        try:
            model.save_pretrained(folder)
        except OSError as error:
            raise UserError(f"{folder.parent} cannot be written: {error.strerror or error}") from error
        del model
        if tokenizer:
            _save_tokenizer(alone, folder, header, str(file))


def _loaded(folder: str, header: GgufHeader, words: str, say: Say) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    keep_quiet()
    factory: Any = AutoModelForCausalLM
    with in_a_sentence(
        f'transformers does not load {words}, of the architecture "{header.architecture[:50]}"',
        f"it reads GGUF files of {', '.join(_architectures())}",
    ):
        config = AutoConfig.from_pretrained(folder, gguf_file="model.gguf", trust_remote_code=False)
        _refuse_unread(header, config.to_dict(), words)
        model, report = factory.from_pretrained(
            folder,
            gguf_file="model.gguf",
            trust_remote_code=False,
            dtype=torch.float32,
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
    check_loaded(model, report, {}, words, say)
    unread = _unread_tensors(header, model)
    if unread:
        raise UserError(f"{words} has {unread[0]}, {_UNREAD}", _INSTEAD)
    # What was in codes is in fp32 now, and saved as any other model: this one would not be.
    with torch.device("meta"):
        plain = factory.from_config(config, dtype=torch.float32)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    return plain


def _architectures() -> list[str]:
    """As the library calls them."""
    from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    return sorted(
        {*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_CONFIG_ARCHS} - {"general", "tokenizer", "t5", "umt5"}
    )


def _refuse_unread(header: GgufHeader, config: Values, words: str) -> None:
    """Refuse what the file says of its architecture and the library passes by, unless the model is so.

    Raises:
        UserError: there is such a thing.
    """
    for key, value in _unread_values(header, str(config["model_type"])):
        last = key.rpartition(".")[2]
        is_known = last in _SHAPES or value in _NOTHING or _is_near(value, config.get(last))
        if last == "dimension_count":
            is_known = _is_near(value, _rotated(config))
        elif last == "original_context_length":
            is_known = _is_near(value, config.get("max_position_embeddings"))
        if not is_known:
            raise UserError(f"{words} says {key} = {str(value)[:50]}, {_UNREAD}", _INSTEAD)


def _unread_values(header: GgufHeader, kind: str) -> Iterator[tuple[str, Any]]:
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING
    from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS

    begin = f"{header.architecture}."
    known: Values = GGUF_CONFIG_MAPPING
    # Those of some architectures are read by functions, which read all but what scales.
    by_function = header.architecture in GGUF_CONFIG_ARCHS
    read = known.get(kind.removesuffix("_text")) or known.get(header.architecture) or {}
    for key, value in header.values.items():
        name = key.removeprefix(begin)
        if name != key and read.get(name) is None and (not by_function or "scal" in name):
            yield key, value


def _is_near(value: Any, stated: Any) -> bool:
    if isinstance(value, int | float) and isinstance(stated, int | float):
        return math.isclose(value, stated, rel_tol=1e-6)
    return bool(value == stated)


def _rotated(config: Values) -> float:
    """Number of elements of each head that the model rotates by their position."""
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    return float(width * (config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1))


def _unread_tensors(header: GgufHeader, model: Any) -> list[str]:
    """Tensors that the library passes by. Of some architectures it says so itself."""
    from transformers import modeling_gguf_pytorch_utils as library
    from transformers.integrations.gguf.utils import is_gguf_arch_supported

    if is_gguf_arch_supported(header.architecture):
        return []
    kinds: Values = library.TENSOR_PROCESSORS
    processor = kinds.get(header.architecture, library.TensorProcessor)(config=model.config.to_dict())
    read: Any = library.get_gguf_hf_weights_map(model, processor)
    return [  # (experts that are rows of one parameter are there without the end of their name)
        name for name in header.tensors if name not in read and name.removesuffix(".weight") not in read
    ]


def _words(header: GgufHeader, file: Path) -> str:
    from gguf import GGMLQuantizationType

    names = {number: kind.name for kind in GGMLQuantizationType for number in (kind.value,)}
    found = {names.get(kind, f"type {kind}") for kind in header.tensors.values()}
    codes = sorted(found - set(_PLAIN))
    if not codes:
        return f"the weights of {file} are read as fp32: {', '.join(sorted(found))}"
    return (
        f"the weights of {file} are dequantised: {', '.join(codes)} to fp32; "
        "what was lost in quantising stays lost"
    )


def _save_tokenizer(alone: str, folder: Path, header: GgufHeader, words: str) -> None:
    """Write the tokenizer that the file has, if it has one.

    Raises:
        UserError: the library cannot convert it, or would cut text in another way.
    """
    from transformers import AutoTokenizer

    if "tokenizer.ggml.tokens" not in header.values:
        return
    hint = "give the model's tokenizer.json with --tokenizer"
    cut = header.values.get("tokenizer.ggml.pre")
    if header.values.get("tokenizer.ggml.model") == "gpt2" and cut not in _ways_to_cut():
        raise UserError(f'{words} cuts text as "{str(cut)[:50]}", which transformers does not know', hint)
    with in_a_sentence(f"transformers does not convert the tokenizer of {words}", hint):
        found = AutoTokenizer.from_pretrained(alone, gguf_file="model.gguf", trust_remote_code=False)
        found.save_pretrained(folder)
        # The library's classes bring tokens of their own, behind those that the model knows.
        written = folder / "tokenizer.json"
        content = json.loads(written.read_text())
        known = header.values["tokenizer.ggml.tokens"]
        content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < known]
        written.write_text(json.dumps(content, ensure_ascii=False))


def _ways_to_cut() -> set[Any]:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return {None, "", "default", "gpt-2", *GGUF_PRE_TOKENIZER_SPLITS}
