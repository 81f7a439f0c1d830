"""A GGUF file as a model's folder of Hugging Face's form, in fp32.

`transformers` knows such files of some architectures. It passes by what it does not know: scaled positions,
caps, tensors. So what it does not read is compared with what the model has, and refused where the model would
be another one.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from p2pdiloco.errors import UserError, first_line, install_hint
from p2pdiloco.tasks.models.gguf_header import GgufHeader, read_header
from p2pdiloco.tasks.models.hub_surplus import check_loaded

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


def save_as_folder(file: Path, folder: Path, say: Callable[[str], None], tokenizer: bool) -> None:
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
    _check_packages()
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


def _check_packages() -> None:
    """Raises: UserError (a package is missing)."""
    try:
        import accelerate  # noqa: F401
        import gguf  # noqa: F401
        import transformers.integrations.gguf  # noqa: F401 (older releases have none)
    except ImportError as error:
        raise UserError(
            f"a GGUF file needs a package that is not installed: {error}", install_hint("hub")
        ) from error


def _loaded(folder: str, header: GgufHeader, words: str, say: Callable[[str], None]) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig
    from transformers.utils import logging

    log: Any = logging
    log.set_verbosity_error()
    log.disable_progress_bar()
    factory: Any = AutoModelForCausalLM
    try:
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
    except UserError:
        raise
    except Exception as error:  # (whatever the library thinks of a file; told as one sentence)
        raise UserError(
            f'transformers does not load {words}, of the architecture "{header.architecture[:50]}": '
            f"{first_line(error)}"[:500],
            f"it reads GGUF files of {', '.join(_architectures())}",
        ) from error
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
    """Names of the architectures that the library reads, as it calls them."""
    from transformers.integrations.gguf.gguf_config_mapping import GGUF_CONFIG_ARCHS
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    return sorted(
        {*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_CONFIG_ARCHS} - {"general", "tokenizer", "t5", "umt5"}
    )


def _refuse_unread(header: GgufHeader, config: dict[str, Any], words: str) -> None:
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
    known: dict[str, Any] = GGUF_CONFIG_MAPPING
    # Those of some architectures are read by functions, which read all but what scales.
    by_function = header.architecture in GGUF_CONFIG_ARCHS
    read = known.get(kind.removesuffix("_text")) or known.get(header.architecture) or {}
    for key, value in header.values.items():
        rest = key.removeprefix(begin)
        if rest != key and read.get(rest) is None and (not by_function or "scal" in rest):
            yield key, value


def _is_near(value: Any, stated: Any) -> bool:
    if isinstance(value, int | float) and isinstance(stated, int | float):
        return math.isclose(value, stated, rel_tol=1e-6)
    return bool(value == stated)


def _rotated(config: dict[str, Any]) -> float:
    """Numbers of each head that the model rotates by their position."""
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    return float(width * (config.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1))


def _unread_tensors(header: GgufHeader, model: Any) -> list[str]:
    """List names of tensors that the library passes by. Of some architectures it says so itself."""
    from transformers import modeling_gguf_pytorch_utils as library
    from transformers.integrations.gguf.utils import is_gguf_arch_supported

    if is_gguf_arch_supported(header.architecture):
        return []
    kinds: dict[str, Any] = library.TENSOR_PROCESSORS
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
    try:
        found = AutoTokenizer.from_pretrained(alone, gguf_file="model.gguf", trust_remote_code=False)
        found.save_pretrained(folder)
        # The library's classes bring tokens of their own, behind those that the model knows.
        written = folder / "tokenizer.json"
        content = json.loads(written.read_text())
        known = header.values["tokenizer.ggml.tokens"]
        content["added_tokens"] = [token for token in content["added_tokens"] if token["id"] < known]
        written.write_text(json.dumps(content, ensure_ascii=False))
    except Exception as error:  # (whatever the library thinks of a file; told as one sentence)
        raise UserError(
            f"transformers does not convert the tokenizer of {words}: {first_line(error)}"[:500], hint
        ) from error


def _ways_to_cut() -> set[Any]:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return {None, "", "default", "gpt-2", *GGUF_PRE_TOKENIZER_SPLITS}
