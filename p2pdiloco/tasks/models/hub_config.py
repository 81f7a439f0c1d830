"""Rules for a config of `transformers` in a manifest, which is a stranger's: only data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

LEFT_OUT = (
    "_name_or_path",
    "transformers_version",
    "auto_map",
    "torch_dtype",
    "use_cache",
    "quantization_config",
)
"""Keys of config.json that are not about the architecture."""
CONTEXTS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Keys by which architectures state the longest context that they are made for."""
LEAST_LAYERS = 1024
"""Layers that may be stated, however small the model is: so many cost nothing worth speaking of."""
_FETCHING = (
    "attn_implementation",
    "experts_implementation",
    "auto_map",
    "trust_remote_code",
    "quantization_config",
    "pretrained",
)
"""Parts of keys, at any depth, by which transformers would load code or another model. Keys with "kernel" are
like them where the value is no number."""


def _fetches(key: str, value: Any) -> bool:
    return any(word in key for word in _FETCHING) or (
        "kernel" in key and not isinstance(value, int | float | list | None)
    )


def harmless(found: Any) -> Any:
    """Copy of a config without the keys of LEFT_OUT and those that would fetch something, at any depth."""
    if isinstance(found, dict):
        return {
            key: harmless(value)
            for key, value in found.items()
            if key not in LEFT_OUT and not _fetches(str(key), value)
        }
    return [harmless(value) for value in found] if isinstance(found, list | tuple) else found


def without_dropout(key: str, found: Any) -> Any:
    """Copy of a config with 0 for every number whose key has "drop" in it, at any depth."""
    if isinstance(found, dict):
        return {inner: without_dropout(str(inner), value) for inner, value in found.items()}
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    return 0.0 if is_number and "drop" in key else found


def longest(config: dict[str, Any]) -> int:
    """The longest context that the architecture is made for; 0: it does not say."""
    return next((config[key] for key in CONTEXTS if isinstance(config.get(key), int)), 0)


def broken_config(config: dict[str, Any], parameters: int, context_tokens: int) -> str | None:
    """Find the first thing that a manifest's config may not say; returns a sentence, or None."""
    if 0 < longest(config) < context_tokens:
        return f"model.context_tokens must be at most {longest(config)} with this model.config"
    for key, value in _pairs(config):
        if _fetches(key, value):
            return f'model.config must not have the key "{key[:100]}"'
        is_count = "layer" in key and "size" not in key and isinstance(value, int)
        # As many modules would be built before anything can be compared.
        if is_count and value > max(LEAST_LAYERS, parameters):
            return f'model.config: "{key[:100]}" is more than the model has parameters'
    return None


def _pairs(found: Any) -> Iterator[tuple[str, Any]]:
    """Keys and values at any depth."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield key, value
            yield from _pairs(value)
    elif isinstance(found, list):
        for value in found:
            yield from _pairs(value)
