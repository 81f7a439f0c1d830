"""GGUF files of a tiny Llama or Qwen, as llama.cpp writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import pre_tokenizers

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 288, "max_position_embeddings": 64}
BEGIN, END = 256, 257
_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "model.layers": "blk",
}  # fmt: skip


def tiny(kind: str = "llama") -> Any:
    """The model that the files hold."""
    import transformers

    torch.manual_seed(0)
    ends = {"bos_token_id": BEGIN, "eos_token_id": END}
    config = transformers.AutoConfig.for_model(kind, **SIZES, **ends, tie_word_embeddings=kind == "qwen2")
    return transformers.AutoModelForCausalLM.from_config(config).float().eval()


def write_gguf(
    path: Path, model: Any, kind: str, added: dict[str, Any] | None = None, words: bool = True
) -> Path:
    """Write the model with its matrices as `kind`; `added`: further entries, arrays are tensors."""
    writer = gguf.GGUFWriter(path, model.config.model_type)
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    if words:
        _add_words(writer, config.vocab_size)
    is_llama = config.model_type == "llama"
    for name, tensor in model.named_parameters():
        for theirs, ours in _NAMES.items():
            name = name.replace(theirs, ours)
        array = tensor.detach().numpy()
        if is_llama and ("attn_q" in name or "attn_k" in name):
            heads = config.num_attention_heads if "attn_q" in name else config.num_key_value_heads
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        chosen = gguf.GGMLQuantizationType[kind if array.ndim > 1 else "F32"]
        writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(array), chosen), raw_dtype=chosen)
    for key, value in (added or {}).items():
        if isinstance(value, np.ndarray):
            writer.add_tensor(key, value)
        else:
            add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}[type(value)]
            add(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_words(writer: Any, size: int) -> None:
    """A byte-level vocabulary, with tokens for the begin and the end of a text."""
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "<s>", "</s>", "hi"]
    tokens += [f"<unused{n}>" for n in range(size - len(tokens))]
    control = int(gguf.TokenType.CONTROL)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("llama-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types(
        [int(gguf.TokenType.NORMAL)] * 256 + [control] * 2 + [1] + [control] * (size - 259)
    )
    writer.add_token_merges(["h i"])
    writer.add_bos_token_id(BEGIN)
    writer.add_eos_token_id(END)
    writer.add_add_bos_token(True)
