"""What is known of models of `transformers`, whose configs and files may be a stranger's.

A manifest's config is only data: `broken_config` and `harmless` say what may be in it, and `bounded` bounds
the building of its model. `llama_config` and `section_of` turn causal-lm's own models into config.json and
back. `check_loaded` accounts for every name in a model's files: it is harmless, said in one line, or refused.
A loader that ignores the names it does not know takes codes of quantised weights for the weights, and drops
scales, adapters and biases. Neither `transformers` nor `tokenizers` is needed here.
"""

from __future__ import annotations

import json
import math
import re
import signal
import threading
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING, Any

import msgspec

from p2pdiloco.config.manifest import CausalLMSection, first_broken
from p2pdiloco.config.values import is_number, is_whole
from p2pdiloco.errors import UserError
from p2pdiloco.util import Say, Values

if TYPE_CHECKING:
    from torch import nn

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
like them where the value asks for one: where it is no number, and not false."""


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
        "kernel" in key and not (is_number(value) or value is False or isinstance(value, list | None))
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
    return 0.0 if is_number(found) and "drop" in key else found


def longest(config: Values) -> int:
    """The longest context that the architecture is made for; 0: it does not say."""
    return next((config[key] for key in CONTEXTS if is_whole(config.get(key))), 0)


def broken_config(config: Values, parameters: int, context_tokens: int, largest_size: int = 0) -> str | None:
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
    """True: of such a number (a size, a place, a token, a rate) nothing is made."""
    if "size" in key or "vocab" in key:
        return True
    return any(word in key for word in _SIZES) and not any(word in key for word in _COUNTS)


def _numbers(found: Any) -> Iterator[int]:
    """Integers of a value and of lists in it; `_pairs` has those of objects in it."""
    if isinstance(found, list):
        for value in found:
            yield from _numbers(value)
    elif is_whole(found):
        yield found


def _pairs(found: Any) -> Iterator[tuple[str, Any]]:
    """At any depth."""
    if isinstance(found, dict):
        for key, value in found.items():
            yield key, value
            yield from _pairs(value)
    elif isinstance(found, list):
        for value in found:
            yield from _pairs(value)


LEAST_PARTS = 2000
"""Modules, parameters or buffers that any model may have."""
PARTS_PER_PARAMETER = 8
LEAST_BUFFER_BYTES = 128 << 20
"""Buffers that any model may have; else they may be as large as its parameters in fp32."""
LEAST_CPU_S = 2.0
CPU_S_PER_PARAMETER = 0.01
"""Time of the processor for building: without memory, a parameter takes a millisecond."""


class TooMuch(Exception):
    """Error of a config that asks for more than the model's listed parameters need."""


@contextmanager
def bounded(parameters: int, numel: int) -> Iterator[None]:
    """Context in which a model of so many parameters, of `numel` elements in all, is built on the meta
    device. Time is bounded in the main thread only: signals come nowhere else.

    A model is first built there, where its tensors take no memory (`tasks.causal_lm.built`). But every module
    is an object, buffers come to life in the second building, and some architectures work out tables in
    Python: so all of that is bounded by what the manifest lists. Numbers in a config are bounded before
    (`broken_config`).

    Raises:
        TooMuch: it has more parts or larger buffers than that, or takes too long.
    """
    from torch.nn.modules import module

    budget = _Budget(LEAST_PARTS + PARTS_PER_PARAMETER * parameters, max(LEAST_BUFFER_BYTES, 4 * numel))
    with ExitStack() as stack:
        for register, hook in (
            (module.register_module_module_registration_hook, budget.count),
            (module.register_module_parameter_registration_hook, budget.count),
            (module.register_module_buffer_registration_hook, budget.count_buffer),
        ):
            stack.callback(register(hook).remove)
        stack.enter_context(_cpu_time(LEAST_CPU_S + CPU_S_PER_PARAMETER * parameters))
        yield


@dataclass
class _Budget:
    """Budget of what may still be built. Its methods are hooks of torch, and change nothing."""

    _parts: int
    _buffer_bytes: int

    def count(self, owner: Any, name: str, part: Any) -> None:
        """Count a module or a parameter. Raises: TooMuch."""
        self._parts -= 1
        if self._parts < 0:
            raise TooMuch("it has many more parts than model.parameters lists")

    def count_buffer(self, owner: Any, name: str, buffer: Any) -> None:
        """Count a buffer. Raises: TooMuch."""
        self.count(owner, name, buffer)
        self._buffer_bytes -= 0 if buffer is None else buffer.numel() * buffer.element_size()
        if self._buffer_bytes < 0:
            raise TooMuch("its buffers are larger than its parameters")


@contextmanager
def _cpu_time(most_s: float) -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def over(number: int, frame: FrameType | None) -> None:
        raise TooMuch(f"it takes more than {most_s:.0f} s to build even without memory")

    before = signal.signal(signal.SIGVTALRM, over)
    signal.setitimer(signal.ITIMER_VIRTUAL, most_s, most_s)  # again, if an architecture swallows the first
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        signal.signal(signal.SIGVTALRM, before)


LLAMA, MIXTRAL = "llama", "mixtral"
_BOTH: Values = {
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
DEFAULTS: dict[str, Values] = {
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
NAMES = {
    "vocab_size": "vocabulary",
    "hidden_size": "width",
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "max_position_embeddings": "context_tokens",
    "rms_norm_eps": "norm_epsilon",
    "tie_word_embeddings": "tied_head",
}
"""Keys of causal-lm's table by those of config.json that say the same."""
EXPERT_NAMES = {
    "num_local_experts": "experts",
    "num_experts_per_tok": "experts_per_token",
    "router_aux_loss_coef": "balance_weight",
}
ALIASES = {"num_experts": "num_local_experts"}
"""Other names by which a config may call its keys."""


def llama_config(section: CausalLMSection) -> Values:
    """config.json of the model, as LlamaForCausalLM or, with experts, MixtralForCausalLM.
    `tasks.transformer` has parameters of their names and shapes."""
    kind, form = (MIXTRAL, "MixtralForCausalLM") if section.experts else (LLAMA, "LlamaForCausalLM")
    names = NAMES | (EXPERT_NAMES if section.experts else {})
    config: Values = {key: getattr(section, name) for key, name in names.items()}
    return (
        DEFAULTS[kind]
        | config
        | {
            "architectures": [form],
            "model_type": kind,
            "intermediate_size": section.feed_forward_width,
            "num_key_value_heads": section.key_value_heads or section.heads,
            "head_dim": section.head_width,
            # The first is how releases from 5 on say it, the second how earlier ones do.
            "rope_parameters": {"rope_type": "default", "rope_theta": section.rope_base},
            "rope_theta": section.rope_base,
            "dtype": "float32",
            # Else they would be those of Llama's first tokenizer.
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
        }
    )


def section_of(config: Values, context_tokens: int = 0) -> CausalLMSection:
    """Read `[model]` off the config.json of somebody's Llama or Mixtral. `context_tokens`: instead of as many
    as the model was made for.

    Raises:
        UserError: it is not of that form, in a sentence that says in what.
    """
    broken = difference_from_ours(config)
    if broken:
        raise UserError(f"the model is not of a form that causal-lm has: {broken}")
    config, kind = with_defaults(config), config["model_type"]
    shared = config["num_key_value_heads"]
    names = NAMES | (EXPERT_NAMES if kind == MIXTRAL else {})
    table: Values = {name: config[key] for key, name in names.items()} | {
        "key_value_heads": 0 if shared in (None, config["num_attention_heads"]) else shared,
        "hidden_width": config["intermediate_size"],
        "rope_base": _rope(config).get("rope_theta") or config["rope_theta"] or DEFAULTS[kind]["rope_theta"],
    }
    if context_tokens:
        table["context_tokens"] = context_tokens
    try:
        return msgspec.convert(table, CausalLMSection)
    except msgspec.ValidationError as error:
        raise UserError(f"config.json of the model: {error}") from error


def with_defaults(config: Values) -> Values:
    """Complete a config by what its architecture says where it says nothing."""
    renamed = {name: config[alias] for alias, name in ALIASES.items() if alias in config}
    return DEFAULTS.get(str(config.get("model_type")), {}) | renamed | config


def _rope(config: Values) -> Values:
    found = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return found if isinstance(found, dict) else {}


def difference_from_ours(config: Values) -> str:
    """Say in what a config is neither Llama nor Mixtral as we have them; empty: it is one of the two."""
    kind = config.get("model_type")
    if kind not in DEFAULTS:
        return f'its model_type is "{kind}"'
    config = with_defaults(config)
    rope = _rope(config)
    heads, width = config["num_attention_heads"], config["hidden_size"]
    if not is_whole(heads) or not is_whole(width) or heads < 1:
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
    return first_broken(rules) or ""


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
    say: Say,
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
    """Names that the model does not use, with those that its class says it may ignore."""
    ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    state = model.state_dict().keys()
    passed_by = (
        name for name in types.keys() - state if any(re.search(pattern, name) for pattern in ignored)
    )
    return {*map(str, unexpected), *passed_by}


def _module(model: nn.Module, name: str) -> bool:
    """True: there is such a module, with tensors of its own."""
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
    tied = getattr(model, "get_expanded_tied_weights_keys", None)  # (older releases take one of the two)
    for copy, source in (tied(all_submodels=True) if tied else {}).items():
        if model.get_parameter(copy) is not model.get_parameter(source):
            raise untied(words, copy)
