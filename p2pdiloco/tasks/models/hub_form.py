"""Models of causal-lm as `transformers` has them: config.json in and out, byte tokenizer.

Our parameters have its names and shapes already (`tasks.models.transformer`). Plain data: neither
`transformers` nor `tokenizers` is needed here.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec

from p2pdiloco.config.models import BYTE_VALUES, CausalLMSection
from p2pdiloco.errors import UserError

LLAMA, MIXTRAL = "llama", "mixtral"


def llama_config(section: CausalLMSection) -> dict[str, Any]:
    """config.json of the model, as LlamaForCausalLM or, with experts, MixtralForCausalLM."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": LLAMA,
        "vocab_size": section.vocabulary,
        "hidden_size": section.width,
        "intermediate_size": section.feed_forward_width,
        "num_hidden_layers": section.layers,
        "num_attention_heads": section.heads,
        "num_key_value_heads": section.key_value_heads or section.heads,
        "head_dim": section.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": section.context_tokens,
        "rms_norm_eps": section.norm_epsilon,
        # The first is how releases from 5 on say it, the second how earlier ones do.
        "rope_parameters": {"rope_type": "default", "rope_theta": section.rope_base},
        "rope_theta": section.rope_base,
        "tie_word_embeddings": section.tied_head,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }
    if section.experts:
        config |= {
            "architectures": ["MixtralForCausalLM"],
            "model_type": MIXTRAL,
            "num_local_experts": section.experts,
            "num_experts_per_tok": section.experts_per_token,
            "router_aux_loss_coef": section.balance_weight,
            "sliding_window": None,
        }
    return config


def section_of(config: dict[str, Any], context_tokens: int = 0) -> CausalLMSection:
    """Read `[model]` off the config.json of somebody's Llama or Mixtral. `context_tokens`: instead of as many
    as the model was made for.

    Raises:
        UserError: it is not of that form, in a sentence that says in what.
    """
    broken = difference_from_ours(config)
    if broken:
        raise UserError(f"the model is not of a form that causal-lm has: {broken}")
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    rope = config.get("rope_parameters") or {}
    shared = config.get("num_key_value_heads") or heads
    table: dict[str, Any] = {
        "layers": config.get("num_hidden_layers"),
        "heads": heads,
        "key_value_heads": 0 if shared == heads else shared,
        "width": width,
        "hidden_width": config.get("intermediate_size"),
        "context_tokens": context_tokens or config.get("max_position_embeddings"),
        "vocabulary": config.get("vocab_size"),
        "tied_head": config.get("tie_word_embeddings", False),
        "rope_base": float(rope.get("rope_theta") or config.get("rope_theta") or 10_000),
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
    }
    if config["model_type"] == MIXTRAL:
        table |= {
            "experts": config.get("num_local_experts"),
            "experts_per_token": config.get("num_experts_per_tok"),
            "balance_weight": config.get("router_aux_loss_coef", 0.01),
        }
    try:
        return msgspec.convert(table, CausalLMSection)
    except msgspec.ValidationError as error:
        raise UserError(f"config.json of the model: {error}") from error


def difference_from_ours(config: dict[str, Any]) -> str:
    """Say in what a config is neither Llama nor Mixtral as we have them; empty: it is one of the two."""
    kind = config.get("model_type")
    if kind not in (LLAMA, MIXTRAL):
        return f'its model_type is "{kind}"'
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(width, int) or heads < 1:
        return "hidden_size and num_attention_heads are not stated"
    rules = (
        (config.get("hidden_act", "silu") == "silu", f"its activation is {config.get('hidden_act')}"),
        (not config.get("attention_bias"), "its attention has biases"),
        (not config.get("mlp_bias"), "its feed-forward part has biases"),
        (not config.get("sliding_window"), "its attention has a sliding window"),
        (
            rope.get("rope_type", rope.get("type", "default")) == "default",
            "its rotary positions are scaled",
        ),
        ((config.get("head_dim") or width // heads) * heads == width, "its heads are not width / heads wide"),
    )
    return next((words for holds, words in rules if not holds), "")


def tokenizer_files(context_tokens: int, tokenizer: bytes | None) -> dict[str, bytes]:
    """tokenizer.json, the run's or that of raw bytes, and tokenizer_config.json."""
    return {
        "tokenizer.json": tokenizer or _byte_tokenizer(),
        "tokenizer_config.json": json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": context_tokens,
                "clean_up_tokenization_spaces": False,
            }
        ).encode(),
    }


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
