"""Rules for what a model's files hold and the model does not: harmless, said in one line, or refused.

A loader that ignores the names it does not know takes codes of quantised weights for the weights, and
drops scales, adapters and biases. So each name is accounted for. Plain data, but for the model that
`transformers` has loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from p2pdiloco.errors import UserError

if TYPE_CHECKING:
    from torch import nn

NOT_PARAMETERS = (".inv_freq", ".attn.bias", ".attn.masked_bias")
"""Ends of names of what older exports hold beside parameters."""
_TABLES = (*NOT_PARAMETERS, "position_ids", ".attention.bias", ".attention.masked_bias", ".original_inv_freq")
"""Ends of names of tables and masks that a model computes by itself, where it does not use the name."""
FLOATS = ("F64", "F32", "F16", "BF16")
"""Types, as safetensors calls them, in which weights are numbers and no codes."""
QUANTISED = "quantization_config", "compression_config"
"""Keys of config.json by which it says how weights are quantised."""
_SCALES = re.compile(
    r"_scales?(_inv|_2)?$|[._]scales?$|_scaling_factor$|zero_points?$|[._](qweight|qzeros|g_idx|zeros)$"
    r"|weight_(packed|shape)$|[._](blocks|SCB|absmax|amax|codebooks?|codes)$|_(absmax|blocks)$|[._]quant_"
)
"""Names of what belongs to quantised weights, where the model has no parameter of the name."""
_ADAPTERS = re.compile(r"[._](lora|ada?lora|dora|hada|lokr|vera|oft|ia3)_|[._]lora[._]|adapter")
GET_THE_ORIGINAL = (
    "get the model that it was made from, or write one: "
    "transformers' from_pretrained(FOLDER).dequantize().save_pretrained(OTHER), and start from OTHER"
)


def refuse_quantised(config: Mapping[str, Any], words: str) -> None:
    """Refuse a config.json that says that its weights are quantised; `words`: what a person knows it as.

    Raises:
        UserError: it does.
    """
    parts = [config, *(part for part in config.values() if isinstance(part, dict))]
    found = next((part[key] for part in parts for key in QUANTISED if part.get(key)), None)
    if found is not None:
        method = str((found.get("quant_method") if isinstance(found, dict) else found) or "some method")
        raise UserError(f"{words} is quantised ({method[:50]}): its weights are codes", GET_THE_ORIGINAL)


def refuse_codes(types: Mapping[str, str], words: str) -> None:
    """Refuse tensors that are no floating-point numbers. `types`: name -> type, of what is taken for
    parameters.

    Raises:
        UserError: there is one.
    """
    name = next((name for name, kind in types.items() if kind not in FLOATS), None)
    if name is not None:
        raise UserError(
            f"{words} is quantised: {name} is of type {types[name]}, which holds codes of weights",
            GET_THE_ORIGINAL,
        )


def refuse_surplus(names: Collection[str], words: str) -> None:
    """Refuse scales and adapters among the names that the model does not use.

    Raises:
        UserError: one is among them.
    """
    for name in sorted(names):
        if _SCALES.search(name):
            raise UserError(f"{words} is quantised: {name} belongs to weights in codes", GET_THE_ORIGINAL)
        if _ADAPTERS.search(name):
            raise UserError(
                f"{words} has {name}, a part of an adapter, which the model would lose",
                "merge it into the model first: peft's merge_and_unload(), then save_pretrained",
            )


def check_loaded(
    model: nn.Module,
    report: Mapping[str, Any],
    types: Mapping[str, str],
    words: str,
    say: Callable[[str], None],
) -> None:
    """Account for all that a model was loaded from. `report`: of `from_pretrained`; `types`: name -> type in
    the files.

    Raises:
        UserError: weights are codes, something is missing, or is left over that may belong to the model.
    """
    left = _unused(model, report["unexpected_keys"], types)
    unused = {name for name in left if not name.endswith(_TABLES)}
    refuse_surplus(unused, words)
    state = model.state_dict()
    # (by the last part of their names: files may call the modules otherwise)
    whole = {_last(name) for name, value in state.items() if not value.is_floating_point()}
    taken = types.keys() - left
    refuse_codes({name: types[name] for name in sorted(taken) if _last(name) not in whole}, words)
    missing = sorted(map(str, [*report["missing_keys"], *report["mismatched_keys"]]))
    if missing:
        raise UserError(f"{words} has no usable parameter {missing[0]}")
    _refuse_untied(model, words)
    inside = next((name for name in sorted(unused) if _module(model, name.rpartition(".")[0])), None)
    if inside is not None:
        raise UserError(
            f"{words} has {inside}, which the model of its config.json does not use: it would be another one",
            "config.json may be another model's: get the whole folder again",
        )
    if unused:
        count = f"{len(unused)} tensors" if len(unused) > 1 else "1 tensor"
        say(f"not used by the causal model: {count} of {words}, the first {min(unused)}")


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _unused(model: nn.Module, unexpected: Collection[str], types: Mapping[str, str]) -> set[str]:
    """Names that the model does not use, also those of which its class says that it may ignore them."""
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    state = model.state_dict().keys()
    passed_by = (
        name for name in types.keys() - state if any(re.search(pattern, name) for pattern in ignored)
    )
    return {*map(str, unexpected), *passed_by}


def _module(model: nn.Module, name: str) -> bool:
    """Tell whether the model has a module of this name with tensors of its own."""
    body = getattr(model, "base_model", model)
    for root in (model, body):
        try:
            found = root.get_submodule(name)
        except AttributeError:
            continue
        if name and next(found.parameters(recurse=False), None) is not None:
            return True
    return False


def untied(words: str, copy: str) -> UserError:
    """Sentence on a tied parameter whose saved copy has values of its own."""
    return UserError(
        f"{words}: by its config.json the model uses one matrix twice, but {copy} has values of its own",
        'if it is a matrix of its own, config.json must say "tie_word_embeddings": false',
    )


def _refuse_untied(model: Any, words: str) -> None:
    """Refuse a model that its files untied, against its config."""
    tied = getattr(model, "get_expanded_tied_weights_keys", None)  # (older releases take one of the two)
    for copy, source in (tied(all_submodels=True) if tied else {}).items():
        if model.get_parameter(copy) is not model.get_parameter(source):
            raise untied(words, copy)
