"""Rules for a config of `transformers` in a manifest, which is a stranger's: only data."""

from __future__ import annotations

import json
import math
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
PAD = "pad_token_id"
"""Key of the token that pads: some architectures count positions by it."""
LEAST_COUNT = 1024
"""Layers, and anything else, that may be stated however small the model is: so many cost nothing worth
speaking of."""
MOST_COUNT = 65_536
"""Limit of what is no layer, such as experts that are rows of one parameter."""
MOST = 1 << 31
"""Limit of any number."""
_SIZES = (
    *("dim", "embd", "inner", "d_ff", "dff", "d_model", "width", "rank"),
    *("position", "ctx", "seq_len", "length", "window", "chunk", "distance", "offset", "topk"),
    *("token", "_id", "suppress", "rate", "seed", "theta", "base", "scal"),
)
_COUNTS = ("layer", "block", "label", "head", "group", "depth", "repeat", "num_h", "num_l", "type")
"""Parts of keys of counts, beside a part of `_SIZES` too."""
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


FLOAT = "__float__"
"""Key under which `transformers` writes a number that JSON has not: {"__float__": "Infinity"}."""
INFINITE = {"Infinity": math.inf, "-Infinity": -math.inf}


def read_json(text: str | bytes) -> Any:
    """Decode JSON with Infinity in either spelling, as a bare word or as `transformers` writes it; it comes
    out as the latter, which every reader of JSON accepts.

    Raises:
        ValueError: it is no JSON, or has NaN.
        RecursionError: it is nested too deeply.
    """
    return _spelled(json.loads(text))


def _is_infinite(value: Any) -> bool:
    return isinstance(value, str) and value in INFINITE


def _spelled(found: Any) -> Any:
    if isinstance(found, dict):
        if FLOAT in found and not _is_infinite(found[FLOAT]):
            raise ValueError(f"{found[FLOAT]} is not a number that a model can have")
        return {key: _spelled(value) for key, value in found.items()}
    if isinstance(found, list):
        return [_spelled(value) for value in found]
    if isinstance(found, float) and not math.isfinite(found):
        if math.isnan(found):
            raise ValueError("NaN is not a number that a model can have")
        return {FLOAT: "Infinity" if found > 0 else "-Infinity"}
    return found


def with_infinite(found: Any) -> Any:
    """Copy of a config with such numbers as floats, for the classes of `transformers`."""
    if isinstance(found, dict):
        if found.keys() == {FLOAT} and _is_infinite(found[FLOAT]):
            return INFINITE[found[FLOAT]]
        return {key: with_infinite(value) for key, value in found.items()}
    return [with_infinite(value) for value in found] if isinstance(found, list) else found


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


def broken_config(
    config: dict[str, Any], parameters: int, context_tokens: int, largest_size: int = 0
) -> str | None:
    """Find the first thing that a manifest's config may not say; returns a sentence, or None.

    `parameters`: of the model; `largest_size`: in their shapes."""
    most = max(LEAST_COUNT, parameters, min(largest_size, MOST_COUNT))
    if 0 < longest(config) < context_tokens:
        return f"model.context_tokens must be at most {longest(config)} with this model.config"
    for key, value in _pairs(config):
        if key == FLOAT and not _is_infinite(value):
            return f'model.config: "{FLOAT}" must be one of {", ".join(INFINITE)}'
        if _fetches(key, value):
            return f'model.config must not have the key "{key[:100]}"'
        numbers = [number for number in _numbers(value) if abs(number) > LEAST_COUNT]
        if any(abs(number) > MOST for number in numbers):
            return f'model.config: "{key[:100]}" is beyond any model'
        # As many modules, or entries of lists, would be made before anything can be compared.
        if _is_layers(key) and any(number > max(LEAST_COUNT, parameters) for number in numbers):
            return f'model.config: "{key[:100]}" is more than the model has parameters'
        if numbers and max(map(abs, numbers)) > most and not _is_size(key):
            return f'model.config: "{key[:100]}" is more than the model can have of anything'
    return None


def _is_layers(key: str) -> bool:
    return "layer" in key and "size" not in key


def _is_size(key: str) -> bool:
    """Tell whether a key names a size, a place, a token or a rate: numbers of which nothing is made."""
    if "size" in key or "vocab" in key:
        return True
    return any(word in key for word in _SIZES) and not any(word in key for word in _COUNTS)


def _numbers(found: Any) -> Iterator[int]:
    """Integers of a value and of lists in it; of an object in it, `_pairs` has the pairs."""
    if isinstance(found, list):
        for value in found:
            yield from _numbers(value)
    elif isinstance(found, int) and not isinstance(found, bool):
        yield found


def _pairs(found: Any) -> Iterator[tuple[str, Any]]:
    """Keys and values at any depth."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield key, value
            yield from _pairs(value)
    elif isinstance(found, list):
        for value in found:
            yield from _pairs(value)
