"""Files beside the weights of an export, for `transformers`: config, tokenizer, and when to stop.

A run that began with a model that exists has what that model's folder said (`[export]` of the manifest). Of
others, documents end with the run's token, and so does what the model writes. The manifest may be a
stranger's: what would fetch something is left out. Plain data: no library of others is needed here.
"""

from __future__ import annotations

import json

from p2pdiloco.config.manifest import BYTE_VALUES, Dtype, Manifest
from p2pdiloco.tasks.hub_models import CONTEXTS, PAD, harmless
from p2pdiloco.tasks.tokens import TOKENIZER_FILE, checked_content
from p2pdiloco.util import Values

LONG_NAMES: dict[Dtype, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Names by which config.json has types of numbers."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", PAD)
_PADS = ("<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>", "<|padding|>")


def hub_files(
    manifest: Manifest, config: Values, context_tokens: int, tokenizer: bytes | None
) -> dict[str, bytes]:
    """config.json, with the ids of special tokens; those of the tokenizer; generation_config.json and the
    chat template, if there are such.

    Raises:
        UserError: `tokenizer` is not the file that the run names.
    """
    tokenizer = checked_content(manifest.data, tokenizer)
    told = manifest.export
    end = manifest.data.end_of_document
    begin = manifest.data.begin_of_document
    special = _special(tokenizer, end, begin or end) if tokenizer else {}
    ids = _object(told.token_ids) or {name: number for name, (_, number) in special.items()}
    ids = {name: number for name, number in ids.items() if number is not None}
    kept = {PAD: config[PAD]} if config.get(PAD) is not None else {}
    made_for = max(context_tokens, told.context_tokens)
    if config.get(CONTEXTS[0]) == context_tokens:
        config = config | {CONTEXTS[0]: made_for}
    names = {name.removesuffix("_id"): token for name, (token, _) in special.items()}
    about = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **(_object(told.tokenizer_config) or {"clean_up_tokenization_spaces": False} | names),
        "model_max_length": made_for,
    }
    files = {
        "config.json": config | ids | kept | {"dtype": LONG_NAMES[told.dtype]},
        "tokenizer_config.json": about,
        "generation_config.json": _object(told.generation_config) or ids,
    }
    written = {name: json.dumps(content, indent=2).encode() for name, content in files.items()}
    if told.chat_template:
        written["chat_template.jinja"] = told.chat_template.encode()
    return written | {TOKENIZER_FILE: _byte_tokenizer() if tokenizer is None else tokenizer}


def _object(text: str) -> Values:
    found: Values = harmless(json.loads(text)) if text else {}
    return {name: value for name, value in found.items() if not name.endswith("_file")}


def _special(tokenizer: bytes, end: str, begin: str) -> dict[str, tuple[str, int]]:
    """Special tokens, with their ids, of a tokenizer of which only a document's ends are known. What is
    padded needs no token of its own; who has one uses it."""
    ids = _ids(tokenizer)
    if end not in ids or begin not in ids:
        return {}
    pad = next((token for token in _PADS if token in ids), end)
    return dict(zip(TOKEN_IDS, ((token, ids[token]) for token in (begin, end, pad)), strict=True))


def _ids(tokenizer: bytes) -> dict[str, int]:
    found = json.loads(tokenizer)
    words = found["model"].get("vocab") or {}
    pairs = words.items() if isinstance(words, dict) else ((word[0], n) for n, word in enumerate(words))
    added = ((token["content"], token["id"]) for token in found.get("added_tokens") or ())
    return dict([*pairs, *added])


def _byte_tokenizer() -> bytes:
    """Write a tokenizer file whose token ids are the bytes of UTF-8 text: byte-level BPE without a single
    merge. Its alphabet has a printable character for each byte."""
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": _BYTE_LEVEL,
            "post_processor": None,
            "decoder": _BYTE_LEVEL,
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": False,
                "vocab": {character: byte for byte, character in enumerate(_alphabet())},
                "merges": [],
            },
        }
    ).encode()


_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def _alphabet() -> list[str]:
    """GPT-2's character for each byte: itself where it is printable, else one from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x100 + BYTE_VALUES))
    return [chr(byte if byte in printable else next(others)) for byte in range(BYTE_VALUES)]
