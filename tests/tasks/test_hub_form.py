"""Configs of Llama and Mixtral: what they leave out, and what an export says, by transformers' classes."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import unicodedata
from typing import Any

import msgspec
import pytest
import torch
from deadlines import within_s

from p2pdiloco.config.manifest import CausalLMSection
from p2pdiloco.errors import UserError
from p2pdiloco.tasks import causal_lm, hub_models, tokenizer_process, tokens
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
from p2pdiloco.tasks.initial import tensor_specs
from p2pdiloco.tasks.tokens import FileTokenizer, end_of_document
from p2pdiloco.util import EXIT_ORPHANED

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


NAMES = {"norm_epsilon": "rms_norm_eps", "tied_head": "tie_word_embeddings", "layers": "num_hidden_layers"}
NAMES |= {"heads": "num_attention_heads", "width": "hidden_size", "hidden_width": "intermediate_size"}
NAMES |= {"vocabulary": "vocab_size", "context_tokens": "max_position_embeddings"}
EXPERTS = {"experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"}
EXPERTS |= {"balance_weight": "router_aux_loss_coef"}
"""Our names and theirs."""

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
    assert (ours.key_value_heads or ours.heads) == theirs.num_key_value_heads
    for name, their_name in (NAMES | EXPERTS if kind == MIXTRAL else NAMES).items():
        assert getattr(ours, name) == getattr(theirs, their_name), name


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
    sizes = {"layers": 2, "heads": 4, "key_value_heads": 2, "width": 32, "hidden_width": 48}
    sizes |= {"context_tokens": 64, "vocabulary": 320, "experts": experts}
    others = {"tied_head": True, "rope_base": 77.0, "norm_epsilon": 1e-4}
    others |= {"balance_weight": 0.5} if experts else {}
    section = msgspec.convert(sizes | others, CausalLMSection)
    config = llama_config(section)
    assert own_keys(config["model_type"]) <= set(config)
    assert section_of(config) == section
    theirs = CLASSES[config["model_type"]](**config)
    assert section_of(theirs.to_dict()) == section


# What a stranger's config of `transformers` costs is bounded by what the manifest lists.

GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 64, "vocab_size": 256}


def without(seconds: float) -> None:
    """Let the processor compute for so long, in Python."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


class Parts(torch.nn.Module):
    """What a config may ask for beside its listed parameters."""

    def __init__(self, what: str) -> None:
        super().__init__()
        if what == "modules":
            self.parts = torch.nn.ModuleList(torch.nn.Identity() for _ in range(3_000))
        elif what == "parameters":
            for index in range(3_000):
                self.register_parameter(f"p{index}", torch.nn.Parameter(torch.empty(1)))
        elif what == "buffers":
            self.register_buffer("mask", torch.empty(1 << 30, dtype=torch.bool))
        elif what == "time":
            without(10.0)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("modules", "many more parts"),
        ("parameters", "many more parts"),
        ("buffers", "buffers are larger"),
        ("time", "takes more than 0 s to build"),
    ],
)
def test_what_a_model_needs_beside_its_parameters_is_bounded(
    what: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if what == "time":
        monkeypatch.setattr(hub_models, "LEAST_CPU_S", 0.1)
    before = signal.getsignal(signal.SIGVTALRM)
    with torch.device("meta"):
        with pytest.raises(hub_models.TooMuch, match=words), hub_models.bounded(10, 1000):
            Parts(what)
        with hub_models.bounded(10, 1000):
            Parts("nothing")
        Parts("modules")
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


XLSTM = {
    "model_type": "xlstm",
    "vocab_size": 256,
    "hidden_size": 32,
    "embedding_dim": 32,
    "num_heads": 2,
    "num_hidden_layers": 1,
    "num_blocks": 1,
}

XLM = {"model_type": "xlm", "vocab_size": 256, "emb_dim": 32, "n_layers": 1, "n_heads": 2}


@pytest.mark.parametrize(
    ("config", "more"),
    [
        (XLSTM, {"num_blocks": 1000, "num_hidden_layers": 1000}),
        (GPT2, {"n_layer": 1000}),
        (XLM, {"n_layers": 1000}),
    ],
    ids=["xlstm", "gpt2", "xlm"],
)
def test_a_config_that_builds_much_more_than_is_listed_ends_early(
    config: dict[str, object], more: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = tensor_specs(causal_lm._meta(config))
    built: list[object] = []
    monkeypatch.setattr(hub_models, "LEAST_PARTS", 100)
    counting = torch.nn.modules.module.register_module_module_registration_hook(
        lambda *part: built.append(part)
    )
    refusal = pytest.raises(UserError, match=r"cannot build a causal model .*many more parts")
    with counting, refusal:
        causal_lm.built(config | more, expected)
    assert len(built) <= 100 + hub_models.PARTS_PER_PARAMETER * len(expected) + 1


# A stranger's tokenizer file that panics, or backtracks for ever, is a refusal in one sentence.

ByteLevel: Any = pytest.importorskip("tokenizers").pre_tokenizers.ByteLevel
EVIL = "(x+x+)+y"


def file_of(**parts: Any) -> bytes:
    model = {"type": "WordLevel", "vocab": {"x": 0, "</s>": 1}, "unk_token": "x"}
    empty = dict.fromkeys(("normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return json.dumps({"version": "1.0", "added_tokens": [], "model": model, **empty, **parts}).encode()


BACKTRACKS = {"type": "Replace", "pattern": {"Regex": EVIL}, "content": ""}
PLACES = {
    "normalizer": BACKTRACKS,
    "pre_tokenizer": BACKTRACKS | {"type": "Split", "behavior": "Isolated", "invert": False},
    "decoder": BACKTRACKS,
}


@pytest.mark.parametrize("place", PLACES)
def test_a_regex_that_backtracks_is_refused(place: str) -> None:
    model = {"type": "WordLevel", "vocab": {"x" * 200: 0, "</s>": 1}, "unk_token": "</s>"}
    tokenizer = FileTokenizer(file_of(model=model, **{place: PLACES[place]}), "</s>")
    words = "decode these tokens" if place == "decoder" else "encode this text"
    with pytest.raises(UserError, match=f"the tokenizer cannot {words}") as refused:
        tokenizer.decode([0]) if place == "decoder" else tokenizer.encode([b"x" * 200])
    assert "\n" not in str(refused.value) and "regular expression" in refused.value.hint


def test_what_takes_too_long_ends_with_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = FileTokenizer(file_of(), "</s>")
    process = tokenizer._process._process
    os.kill(process.pid, signal.SIGSTOP)
    monkeypatch.setattr(tokens, "PATIENCE_S", 0.01)
    with pytest.raises(UserError, match="cannot decode these tokens: it takes more than 0 s") as refused:
        tokenizer.decode([0])
    assert "regular expression" in refused.value.hint and process.returncode == -signal.SIGKILL


def test_a_longer_text_has_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, waits = FileTokenizer(file_of(), "</s>"), list[float]()
    timer = threading.Timer
    monkeypatch.setattr(
        threading, "Timer", lambda wait_s, *rest: waits.append(wait_s) or timer(wait_s, *rest)
    )
    tokenizer.encode([b"x"])
    found = tokenizer.encode([b"x" * 1_000_000, b"x"])
    assert [ids.tolist() for ids in found] == [[0], [0]]
    assert waits == pytest.approx([tokens.PATIENCE_S, tokens.PATIENCE_S + 100], rel=0.01)


# ... and so is one that wants more memory than its job may need: a process dies, and its starter goes on.

MULTIPLIES = {"type": "Replace", "pattern": {"String": "x"}, "content": "x " * 50_000}
WORDS_OF_DEATH = r"its process ended \(SIGABRT\), as it does where [0-9.]+ \w+ of memory are too little"


@pytest.mark.skipif(sys.platform != "linux", reason="no other system keeps the limit")
@pytest.mark.parametrize("place", ["normalizer", "decoder"])
def test_a_file_that_multiplies_text_ends_a_process_with_a_limit(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A megabyte of text would become 100 GB, which a machine has not."""
    monkeypatch.setattr(tokens, "TOKENS_PER_BYTE", 1 << 20)
    tokenizer = FileTokenizer(file_of(**{place: MULTIPLIES}), "</s>")
    process = tokenizer._process._process
    with pytest.raises(UserError, match=WORDS_OF_DEATH) as refused:
        tokenizer.encode([b"x" * (1 << 20)]) if place == "normalizer" else tokenizer.decode([0] * (1 << 20))
    assert "multiply text" in refused.value.hint and process.returncode == -signal.SIGABRT
    with pytest.raises(UserError, match="its process ended"):
        tokenizer.encode([b"x"])


@pytest.mark.skipif(sys.platform != "linux", reason="no other system keeps the limit")
@pytest.mark.parametrize("normalizer", [None, {"type": "NFKD"}])
def test_honest_files_have_memory_for_long_texts_and_short_ones_in_turn(normalizer: Any) -> None:
    library: Any = pytest.importorskip("tokenizers")
    letters = {letter: i for i, letter in enumerate(sorted(ByteLevel.alphabet()))}
    backend = library.Tokenizer(library.models.BPE(vocab=letters | {"</s>": 256}, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    content = json.loads(backend.to_str()) | {"normalizer": normalizer}
    tokenizer = FileTokenizer(json.dumps(content).encode(), "</s>")
    syllables = "".join(map(chr, range(0xAC00, 0xAC00 + 11_000))).encode()
    long = (syllables * 32)[: 1 << 20]
    for text in (long, b"x", long[: 1 << 16], long, b"y" * 4096):
        (ids,) = tokenizer.encode([text])
        assert len(ids) >= len(text)


@pytest.mark.parametrize("place", ["normalizer", "decoder"])
def test_an_answer_is_no_longer_than_its_question_allows(place: str) -> None:
    pieces = {"type": "WhitespaceSplit"}
    tokenizer = FileTokenizer(file_of(**{place: MULTIPLIES}, pre_tokenizer=pieces), "</s>")
    with pytest.raises(UserError, match=r"of \d+ bytes it makes \d+$"):
        tokenizer.encode([b"x"]) if place == "normalizer" else tokenizer.decode([0] * 20)


def test_letters_that_are_taken_apart_and_bytes_as_tokens_are_within_the_bounds() -> None:
    korean = "\ud55c\uae00 \ub9d0 " * 1000
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    vocabulary = {letter: at for at, letter in enumerate(("</s>", *ByteLevel.alphabet()))}
    model = {"type": "BPE", "vocab": vocabulary, "merges": []}
    parts = {"model": model, "normalizer": {"type": "NFKD"}, "pre_tokenizer": byte_level}
    tokenizer = FileTokenizer(file_of(**parts), "</s>")
    apart = len(unicodedata.normalize("NFKD", korean).encode())
    assert [len(ids) for ids in tokenizer.encode([korean.encode(), b"", "\ufdfa".encode()])] == [apart, 0, 33]


def test_more_tokens_than_the_model_has_are_refused_before_they_are_built() -> None:
    """A model of no known type is never built: else the library refused that."""
    vocabulary = {f"t{at}": at for at in range(300)}
    for listed in (vocabulary, [[token, 0.0] for token in vocabulary]):
        content = file_of(model={"type": "no", "vocab": listed})
        with pytest.raises(UserError, match="vocabulary is 299, but the tokenizer given has 300 tokens"):
            FileTokenizer(content, "</s>", "", 299, "given")
        with pytest.raises(UserError, match="the tokenizer file cannot be read"):
            FileTokenizer(content, "</s>", "", 300, "given")


def test_a_tokenizer_s_process_ends_with_it_and_with_its_starter() -> None:
    tokenizer = FileTokenizer(file_of(), "</s>")
    process = tokenizer._process._process
    del tokenizer
    gc.collect()
    assert process.returncode == -signal.SIGKILL
    ours, theirs = socket.socketpair()
    program = [sys.executable, "-P", "-m", tokenizer_process.__name__, str(theirs.fileno())]
    with theirs:
        process = subprocess.Popen(program, pass_fds=(theirs.fileno(),), stderr=subprocess.DEVNULL)
    with ours:
        pass
    assert process.wait(within_s(60.0)) in (1, EXIT_ORPHANED)


@pytest.mark.parametrize("content", [b"", b"\xff\xfe", b"{}", b"[" * 100_000, file_of(model={"type": "no"})])
def test_what_is_no_tokenizer_is_refused(content: bytes) -> None:
    with pytest.raises(UserError, match="the tokenizer file cannot be read") as refused:
        end_of_document(content)
    assert "\n" not in str(refused.value)
