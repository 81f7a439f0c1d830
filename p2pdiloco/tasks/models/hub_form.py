"""Models of causal-lm as `transformers` has them: config.json in and out.

Our parameters have its names and shapes already (`tasks.models.transformer`). Plain data: neither
`transformers` nor `tokenizers` is needed here.
"""

from __future__ import annotations

from typing import Any

import msgspec

from p2pdiloco.config.models import CausalLMSection
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
