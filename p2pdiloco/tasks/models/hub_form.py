"""Models of causal-lm as `transformers` has them: config.json in and out.

Our parameters have its names and shapes already (`tasks.models.transformer`). Plain data: neither
`transformers` nor `tokenizers` is needed here.
"""

from __future__ import annotations

from typing import Any

import msgspec

from p2pdiloco.config.manifest import CausalLMSection
from p2pdiloco.errors import UserError

LLAMA, MIXTRAL = "llama", "mixtral"
_BOTH: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "head_dim": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    LLAMA: _BOTH
    | {
        "intermediate_size": 11_008,
        "num_key_value_heads": None,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "attention_bias": False,
        "mlp_bias": False,
    },
    MIXTRAL: _BOTH
    | {
        "intermediate_size": 14_336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e6,
        "sliding_window": None,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
    },
}
"""Values that a config.json of these architectures means where it says nothing. A test compares all with the
classes of `transformers`."""
ALIASES = {"num_experts": "num_local_experts"}
"""Other names by which a config may call its keys."""


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
        "dtype": "float32",
        # Else they would be those of Llama's first tokenizer.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
    }
    if section.experts:
        config |= {
            "architectures": ["MixtralForCausalLM"],
            "model_type": MIXTRAL,
            "num_local_experts": section.experts,
            "num_experts_per_tok": section.experts_per_token,
            "router_aux_loss_coef": section.balance_weight,
            "sliding_window": None,
            "output_router_logits": False,
            "router_jitter_noise": 0.0,
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
    config, kind = with_defaults(config), config["model_type"]
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]
    table: dict[str, Any] = {
        "layers": config["num_hidden_layers"],
        "heads": heads,
        "key_value_heads": 0 if shared in (None, heads) else shared,
        "width": config["hidden_size"],
        "hidden_width": config["intermediate_size"],
        "context_tokens": context_tokens or config["max_position_embeddings"],
        "vocabulary": config["vocab_size"],
        "tied_head": config["tie_word_embeddings"],
        "rope_base": _rope(config).get("rope_theta") or config["rope_theta"] or DEFAULTS[kind]["rope_theta"],
        "norm_epsilon": config["rms_norm_eps"],
    }
    if kind == MIXTRAL:
        table |= {
            "experts": config["num_local_experts"],
            "experts_per_token": config["num_experts_per_tok"],
            "balance_weight": config["router_aux_loss_coef"],
        }
    try:
        return msgspec.convert(table, CausalLMSection)
    except msgspec.ValidationError as error:
        raise UserError(f"config.json of the model: {error}") from error


def with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Complete a config by what its architecture says where it says nothing."""
    renamed = {name: config[alias] for alias, name in ALIASES.items() if alias in config}
    return DEFAULTS.get(str(config.get("model_type")), {}) | renamed | config


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return found if isinstance(found, dict) else {}


def difference_from_ours(config: dict[str, Any]) -> str:
    """Say in what a config is neither Llama nor Mixtral as we have them; empty: it is one of the two."""
    kind = config.get("model_type")
    if kind not in DEFAULTS:
        return f'its model_type is "{kind}"'
    config = with_defaults(config)
    rope = _rope(config)
    heads, width = config["num_attention_heads"], config["hidden_size"]
    if not isinstance(heads, int) or not isinstance(width, int) or heads < 1:
        return "hidden_size and num_attention_heads are no counts"
    rules = (
        (config["hidden_act"] == "silu", f"its activation is {config['hidden_act']}"),
        (not config.get("attention_bias"), "its attention has biases"),
        (not config.get("mlp_bias"), "its feed-forward part has biases"),
        (config.get("sliding_window") is None, "its attention has a sliding window"),
        (not config.get("router_jitter_noise"), "its router is trained with noise"),
        (
            rope.get("rope_type", rope.get("type", "default")) == "default",
            "its rotary positions are scaled",
        ),
        ((config["head_dim"] or width // heads) * heads == width, "its heads are not width / heads wide"),
    )
    return next((words for holds, words in rules if not holds), "")
