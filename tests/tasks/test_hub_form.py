"""Configs of Llama and Mixtral: what they leave out, and what an export says, by transformers' classes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from p2pdiloco.config.manifest import CausalLMSection
from p2pdiloco.errors import UserError
from p2pdiloco.tasks.hub_models import (
    ALIASES,
    DEFAULTS,
    LLAMA,
    MIXTRAL,
    difference_from_ours,
    llama_config,
    section_of,
    with_defaults,
)

transformers: Any = pytest.importorskip("transformers")
CLASSES = {LLAMA: transformers.LlamaConfig, MIXTRAL: transformers.MixtralConfig}
NOT_OF_THE_MODEL = {
    *("bos_token_id", "eos_token_id", "pad_token_id", "use_cache", "pretraining_tp", "model_type"),
    "rope_parameters",  # of which "rope_theta" is the part that matters
}
"""Keys of a config that change nothing of what a model computes, or that `cli.given_files` takes along."""


def own_keys(kind: str) -> set[str]:
    """Keys that this architecture has and not every config of the library."""
    every = set(transformers.PreTrainedConfig().to_dict()) - {"tie_word_embeddings"}
    return set(CLASSES[kind]().to_dict()) - every - NOT_OF_THE_MODEL


@pytest.mark.parametrize("kind", DEFAULTS)
def test_every_default_is_that_of_the_architecture(kind: str) -> None:
    theirs = CLASSES[kind]()
    assert own_keys(kind) == set(DEFAULTS[kind]) - {"rope_theta"}
    assert theirs.rope_parameters == {"rope_type": "default", "rope_theta": DEFAULTS[kind]["rope_theta"]}
    for name in own_keys(kind):
        ours, found = DEFAULTS[kind][name], getattr(theirs, name)
        if name == "num_key_value_heads" and ours is None:
            ours = theirs.num_attention_heads
        if name == "head_dim":
            ours, found = None, found or None
            assert found in (None, theirs.hidden_size // theirs.num_attention_heads)
            continue
        assert found == ours, name
    assert CLASSES[kind].attribute_map.items() <= ALIASES.items()


ROPES: tuple[dict[str, Any], ...] = (
    {},
    {"rope_theta": 5.0},
    {"rope_parameters": None, "rope_theta": 5.0},
    {"rope_parameters": {"rope_type": "default"}},
    {"rope_parameters": {"rope_theta": 7.0}, "rope_theta": 5.0},
    {"rope_scaling": {"rope_type": "default", "rope_theta": 9.0}},
    {"rope_scaling": None},
)


@pytest.mark.parametrize("rope", ROPES, ids=str)
@pytest.mark.parametrize("kind", DEFAULTS)
def test_a_config_that_says_next_to_nothing_means_what_transformers_takes_it_for(
    kind: str, rope: dict[str, Any]
) -> None:
    theirs = CLASSES[kind](**rope)
    ours = section_of({"model_type": kind} | rope)
    assert ours.rope_base == theirs.rope_parameters["rope_theta"]
    assert (ours.norm_epsilon, ours.tied_head) == (theirs.rms_norm_eps, theirs.tie_word_embeddings)
    assert (ours.layers, ours.heads, ours.width) == (
        (theirs.num_hidden_layers, theirs.num_attention_heads, theirs.hidden_size)
    )
    assert (ours.key_value_heads or ours.heads) == theirs.num_key_value_heads
    assert (ours.hidden_width, ours.vocabulary) == (theirs.intermediate_size, theirs.vocab_size)
    assert ours.context_tokens == theirs.max_position_embeddings
    if kind == MIXTRAL:
        assert ours.experts == theirs.num_local_experts
        assert ours.experts_per_token == theirs.num_experts_per_tok
        assert ours.balance_weight == theirs.router_aux_loss_coef


def test_other_names_and_other_forms() -> None:
    assert section_of({"model_type": MIXTRAL, "num_experts": 3}).experts == 3
    assert transformers.MixtralConfig(num_experts=3).num_local_experts == 3
    assert with_defaults({"model_type": "gpt2"}) == {"model_type": "gpt2"}
    for wrong, words in (
        ({"router_jitter_noise": 0.1}, "its router is trained with noise"),
        ({"sliding_window": 0}, "its attention has a sliding window"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "its rotary positions are scaled"),
        ({"hidden_size": None}, "hidden_size and num_attention_heads are no counts"),
    ):
        assert difference_from_ours({"model_type": MIXTRAL} | wrong) == words
    for key in ("rms_norm_eps", "rope_theta", "num_hidden_layers", "vocab_size"):
        with pytest.raises(UserError, match=r"config\.json of the model"):
            section_of({"model_type": LLAMA, key: "x"})
    assert section_of({"model_type": LLAMA, "rope_theta": None}).rope_base == 10_000


@pytest.mark.parametrize("experts", [0, 3])
def test_an_export_states_every_field_of_its_architecture(experts: int) -> None:
    """So that no release of transformers can fill in another value, and it comes back as it went."""
    table = {
        "layers": 2,
        "heads": 4,
        "key_value_heads": 2,
        "width": 32,
        "hidden_width": 48,
        "context_tokens": 64,
        "vocabulary": 320,
        "tied_head": True,
        "rope_base": 77.0,
        "norm_epsilon": 1e-4,
        "experts": experts,
    }
    section = msgspec.convert(table | ({"balance_weight": 0.5} if experts else {}), CausalLMSection)
    config = llama_config(section)
    assert own_keys(config["model_type"]) <= set(config)
    assert section_of(config) == section
    theirs = CLASSES[config["model_type"]](**config)
    assert section_of(theirs.to_dict()) == section
