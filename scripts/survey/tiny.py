"""Tiny configs of the architectures of `transformers`, made of their own defaults.

Every number whose key says what it counts is cut down, in configs inside of the config, too; lists with an
entry for each layer keep two layers, of two kinds where there are some. What does not fit together after
that is in a table.
"""

from __future__ import annotations

import re
from typing import Any

from transformers import CONFIG_MAPPING

LAYERS = 2
VOCABULARY = 256
_SIZES = (
    (r"(num_(hidden_)?|n_|num_(encoder|decoder)_|encoder_|decoder_)(layers?|blocks?)", LAYERS),
    (r"(.*_)?vocab_size(_.*)?|n_vocab", VOCABULARY),
    (r"hidden_size|d_model|n_embd|dim|embed(ding)?_(dim|size)|emb_dim|hidden_dim|.*_hidden_size", 64),
    (r"(.*_)?(intermediate_size|ffn_dim|n_inner|d_ff|d_inner|dim_ff|feed_forward_size|ffn_hidden_size)", 64),
    (r"(num_|n_|encoder_|decoder_)?(num_)?(attention_)?heads?|n_heads", 4),
    (r"(num_key_value|num_kv|n_kv|kv_n)_heads", 2),
    (r"(.*_)?head_dim|d_head|rotary_dim", 16),
    (r"max_.*positions?(_embeddings)?|n_positions|max_seq(uence)?_len(gth)?|seq_length|n_ctx", 128),
    (r"(n_routed_|num_|num_local_|moe_num_|n_)experts", 4),
    (r"(moe_)?(num_experts_per_tok(en)?|topk|top_k(_experts)?|moe_k)|num_selected_experts", 2),
    (r".*lora_rank", 16),
    (r"n_group|topk_group|n_groups|first_k_dense_replace", 1),
)
_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}
_SLIDING = {"num_attention_heads": 4, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16}
_SLIDING |= {"head_dim": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
_DOTS3_NOTE = {
    "head_dim": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "per_layer_config": {"1": _SLIDING},
}
_QWEN4 = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8}
_QWEN4 |= {"indexer_compress_ratio": 2, "ple_layer_ids": [1], "ple_embed_dim": 64, "split_ngram_parts": 2}
_QWEN4 |= {"eos_token_id": 2, "ngram_vocab_size_base": 64, "make_ngram_vocab_size_divisible_by": 8}

OTHERWISE: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"n_group": 2, "num_expert_group": 2},
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "blt": {"encoder_hash_byte_group_vocab": 64}
    | {f"{part}_config": {"hidden_size_global": 64} for part in ("encoder", "decoder")},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "ctrl": {"dff": 64},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_v2": {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note": {
        "text_config": _DOTS3_NOTE,
        "vision_config": {"adapter_in_dim": 64, "adapter_out_dim": 64},
        "audio_config": {"adapter_input_size": 64, "adapter_out_dim": 64},
    },
    "dots3_note_text": _DOTS3_NOTE,
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_assistant": {"text_config": {"num_kv_shared_layers": 2}},
    "gemma4_unified_assistant": {"text_config": {"num_kv_shared_layers": 2}},
    "granitemoehybrid": _MAMBA | {"layer_types": ["linear_attention", "full_attention"]},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 0},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "longcat_flash": {"head_dim": 8, "qk_rope_head_dim": 8, "qk_head_dim": 24, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8},
    "ministral": {"head_dim": 16},
    "nemotron": {"num_key_value_heads": 2},
    "qwen4_exp": {"text_config": _QWEN4},
    "qwen4_exp_text": _QWEN4,
    "recurrent_gemma": {"lru_width": 64},
    "reformer": {"axial_pos_shape": [8, 16], "axial_pos_embds_dim": [16, 48], "hash_seed": 1},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "num_hidden_layers": 4,
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
    },
    "zamba2": {
        "mamba_headdim": 16,
        "attention_head_dim": 32,
        "attention_hidden_size": 128,
        "hybrid_layer_ids": [1],
    },
}
"""Keys, by architecture, that shrinking alone does not make fit."""


BEGUN: dict[str, dict[str, Any]] = {
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}}
}
"""Keys of architectures whose own defaults do not fit."""


def tiny(kind: str) -> Any:
    """Make the config of a tiny model of this `model_type`."""
    config: Any = CONFIG_MAPPING[kind]
    whole = config(**BEGUN.get(kind, {})).to_dict()
    return config.from_dict(_merged(_shrunk(whole), OTHERWISE.get(kind, {})))


def _shrunk(config: dict[str, Any]) -> dict[str, Any]:
    layers = _layers(config)
    heads = config.get("num_attention_heads")
    found = {}
    for key, value in config.items():
        if isinstance(value, dict) and value and all(str(inner).isdigit() for inner in value):
            found[key] = {inner: kept for inner, kept in value.items() if int(inner) < LAYERS}
        elif isinstance(value, dict):
            found[key] = _shrunk(value)
        elif isinstance(value, list) and len(value) == layers > LAYERS:
            found[key] = [_number(key, entry) for entry in _two_of(value)]
        elif key == "is_decoder":  # an encoder that may be one
            found[key] = True
        elif key == "num_key_value_heads" and value == heads:
            found[key] = 4
        else:
            found[key] = _number(key, value)
    return found


def _layers(config: dict[str, Any]) -> int:
    names = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    return next((config[name] for name in names if isinstance(config.get(name), int)), 0)


def _two_of(entries: list[Any]) -> list[Any]:
    """Two entries, which differ if any do."""
    other = next((entry for entry in entries if entry != entries[0]), entries[1])
    return [entries[0], other]


def _number(key: str, value: Any) -> Any:
    if not isinstance(value, int) or isinstance(value, bool):
        return value
    if key.endswith("token_id"):
        return value if value < VOCABULARY else _IDS.get(key, 3)
    size = next((size for pattern, size in _SIZES if re.fullmatch(pattern, key)), value)
    return min(size, value)


def _merged(config: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    found = dict(config)
    for key, value in others.items():
        inner = found.get(key)
        found[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return found
