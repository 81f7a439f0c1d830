"""The tasks of language models: causal-lm, and hf-causal-lm.

causal-lm is a transformer of our own that predicts the next token of a text. hf-causal-lm is any causal
language model that `transformers` builds from a config. That config is in the manifest, so all peers build
the same architecture, from classes of the installed package only: no code of a model is ever fetched or
executed. `built` makes such a model; `existing` loads one whose files are on the disk.
"""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
from msgspec import Meta

from p2pdiloco.config.manifest import (
    BYTE_VALUES,
    BYTES,
    CausalLMSection,
    ContextTokens,
    ModelSection,
    first_broken,
)
from p2pdiloco.config.values import is_whole
from p2pdiloco.errors import UserError, in_a_sentence, needing
from p2pdiloco.tasks.hub_models import (
    CONTEXTS,
    PAD,
    bounded,
    broken_config,
    check_loaded,
    harmless,
    llama_config,
    longest,
    with_infinite,
    without_dropout,
)
from p2pdiloco.tasks.own_tasks import GivenSection, specs_from_texts, texts_from_specs
from p2pdiloco.tasks.task import Data, Task
from p2pdiloco.tensors.sizes import MAX_TENSORS, Specs, TensorSpec, kept_bytes, logits_bytes
from p2pdiloco.util import DAMAGE, Say, Values

if TYPE_CHECKING:
    from torch import Tensor, device, nn

    from p2pdiloco.tasks.task import Batch
    from p2pdiloco.tensors.layout import Tensors

INIT_STD = 0.02
PROMPT = '    """Return the '
SAMPLE_TOKENS = 320
MAX_SHUFFLED_TOKENS = 1 << 26
"""Tokens of a streamed data set that a learner holds at one time, twice, four bytes each."""
SAMPLE_TEMPERATURE = 0.7
_INTO_THE_STREAM = ("o_proj.weight", "down_proj.weight", "w2.weight")


class LanguageModel(Task):
    """Task whose samples are windows of text, as long as the model's context."""

    @abstractmethod
    def config(self) -> Values:
        """config.json of the model, as `transformers` has it."""

    @property
    def tokens_per_sample(self) -> int:
        return int(self.section.context_tokens)

    @property
    def vocabulary(self) -> int:
        stated = self.config().get("vocab_size")
        if is_whole(stated):
            return stated
        return max((spec.shape[0] for spec in self.specs() if spec.embedding), default=0)

    def broken_rule(self) -> str | None:
        tokens, context = self.manifest.inner.tokens_per_step, self.tokens_per_sample
        if tokens % context:
            return (
                f"inner.tokens_per_step must be a multiple of model.context_tokens ({context}), "
                f"it is {tokens}"
            )
        return None

    def pass_bytes(self, samples: int) -> int:
        specs, tokens = self.specs(), samples * self.tokens_per_sample
        used = self.config().get("num_experts_per_tok")
        width = max((spec.shape[-1] for spec in specs if spec.embedding and spec.shape), default=0)
        kept = kept_bytes(specs, tokens, self.vocabulary, used if is_whole(used) else 1)
        return kept + logits_bytes(tokens, self.vocabulary, width)

    def load_data(self, path: str | None) -> Data:
        from p2pdiloco.tasks.hub_streams import load_corpus

        return load_corpus(self.manifest.data, path, self.tokens_per_sample, self.tokenizer())

    def written(self, model: nn.Module, prompt: str, tokens: int, temperature: float, seed: int) -> str:
        from p2pdiloco.tasks.tokens import prompt_ids
        from p2pdiloco.tasks.transformer import generate

        tokenizer, context = self.tokenizer(), self.tokens_per_sample
        most = min(self.vocabulary, tokenizer.vocabulary)
        start = prompt_ids(tokenizer, prompt)
        return tokenizer.decode(generate(model, start, tokens, context, most, temperature, seed))

    def hub_files(self) -> dict[str, bytes]:
        from p2pdiloco.tasks.hub_export import hub_files

        return hub_files(self.manifest, self.config(), self.tokens_per_sample, self.tokenizer_file)


class CausalLM(LanguageModel):
    """The task causal-lm. Figures: "loss" in nats per token, without the experts' balance."""

    Section: ClassVar[type[ModelSection]] = CausalLMSection
    section: CausalLMSection

    def config(self) -> Values:
        return llama_config(self.section)

    def shapes_change(self, device: device, bf16: bool) -> bool:
        from p2pdiloco.tasks.transformer import computes_in_groups

        return self.section.experts > 0 and not computes_in_groups(self.section, device, bf16)

    def broken_rule(self) -> str | None:
        model = self.section
        shared = model.key_value_heads or model.heads
        rules = (
            (
                model.width % model.heads == 0,
                f"model.width must be a multiple of model.heads ({model.heads}), it is {model.width}",
            ),
            (
                model.head_width % 2 == 0,
                f"model.width / model.heads must be even, it is {model.head_width}",
            ),
            (
                model.heads % shared == 0,
                f"model.heads must be a multiple of model.key_value_heads ({shared}), it is {model.heads}",
            ),
            (
                model.vocabulary >= BYTE_VALUES or self.manifest.data.tokenizer != BYTES,
                f"model.vocabulary must be at least {BYTE_VALUES} (raw bytes), it is {model.vocabulary}",
            ),
            (
                not model.experts or model.experts_per_token <= model.experts,
                f"model.experts_per_token must be at most model.experts ({model.experts}), "
                f"it is {model.experts_per_token}",
            ),
            (
                self._tensors() <= MAX_TENSORS,
                f"a model must have at most {MAX_TENSORS} tensors, this one has {self._tensors()}",
            ),
        )
        return first_broken(rules) or super().broken_rule() or self._too_much_shuffled()

    def _tensors(self) -> int:
        """Number of tensors that `specs` lists, before anything is made for each of them."""
        section = self.section
        feed_forward = 1 + 3 * section.experts if section.experts else 3
        return section.layers * (6 + feed_forward) + 2 + (not section.tied_head)

    def _too_much_shuffled(self) -> str | None:
        """Say that the manifest wants more shuffled tokens than a volunteer's memory should hold; None: it
        does not."""
        section, samples = self.section, self.manifest.data.shuffle_samples
        most = max(1, MAX_SHUFFLED_TOKENS // section.context_tokens)
        if self.manifest.data.source != "hub" or samples <= most:
            return None
        return f"data.shuffle_samples must be at most {most} for such a context, it is {samples}"

    def specs(self) -> Specs:
        """Names and shapes of the parameters, by arithmetic: the daemon never builds a model. They are those
        of Hugging Face's Llama and Mixtral."""
        section, width = self.section, self.section.width
        hidden, keys = section.feed_forward_width, section.key_value_width
        expert = {"w1.weight": (hidden, width), "w2.weight": (width, hidden), "w3.weight": (hidden, width)}
        feed_forward = {
            "mlp.gate_proj.weight": (hidden, width),
            "mlp.up_proj.weight": (hidden, width),
            "mlp.down_proj.weight": (width, hidden),
        }
        if section.experts:
            feed_forward = {"block_sparse_moe.gate.weight": (section.experts, width)} | {
                f"block_sparse_moe.experts.{index}.{name}": shape
                for index in range(section.experts)
                for name, shape in expert.items()
            }
        block = {
            "input_layernorm.weight": (width,),
            "self_attn.q_proj.weight": (width, width),
            "self_attn.k_proj.weight": (keys, width),
            "self_attn.v_proj.weight": (keys, width),
            "self_attn.o_proj.weight": (width, width),
            "post_attention_layernorm.weight": (width,),
            **feed_forward,
        }
        tokens = (section.vocabulary, width)
        specs = [TensorSpec("model.embed_tokens.weight", tokens, embedding=True)]
        for layer in range(section.layers):
            specs += [TensorSpec(f"model.layers.{layer}.{name}", shape) for name, shape in block.items()]
        specs.append(TensorSpec("model.norm.weight", (width,)))
        return (*specs, *([] if section.tied_head else [TensorSpec("lm_head.weight", tokens)]))

    def initial_parameters(self) -> Tensors:
        """Matrices are uniform with standard deviation 0.02, the projections back into the residual stream
        divided by sqrt(2 layers) (GPT-2); norms are ones. The initial loss is about ln(vocabulary)."""
        import torch

        from p2pdiloco.tasks.initial import uniform

        seed, residual_std = self.manifest.run.seed, INIT_STD / math.sqrt(2 * self.section.layers)
        parameters = {}
        for spec in self.specs():
            std = residual_std if spec.name.endswith(_INTO_THE_STREAM) else INIT_STD
            is_norm = len(spec.shape) == 1
            parameters[spec.name] = torch.ones(spec.shape) if is_norm else uniform(seed, spec, std)
        return parameters

    def model(self) -> nn.Module:
        from p2pdiloco.tasks.transformer import Transformer

        return Transformer(self.section)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss, balance = self._losses(model, batch)
        return loss if balance is None else loss + self.section.balance_weight * balance

    def metrics(self, model: nn.Module, batch: Batch) -> Tensors:
        loss, balance = self._losses(model, batch)
        return {"loss": loss} if balance is None else {"loss": loss, "balance": balance}

    def _losses(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
        (windows,) = batch
        loss, balance = model(windows[:, :-1], windows[:, 1:])
        return loss, balance

    def sample(self, model: nn.Module) -> str:
        return PROMPT + self.written(model, PROMPT, SAMPLE_TOKENS, SAMPLE_TEMPERATURE, 0)


HUB_TASK = "hf-causal-lm"
CAUSAL_TOKENS = 8
"""Tokens about which a model is asked, to see how it computes its logits."""
CAUSAL_NOISE = 1e-5
"""Tolerance, as a share of the largest logit: experts that compute other tokens, too, may round another
way."""


class HubSection(GivenSection, kw_only=True, omit_defaults=True):
    """Config of the architecture, and what follows from it."""

    comments: ClassVar[dict[str, str]] = GivenSection.comments | {
        "config": "config.json of the architecture, as transformers writes it.",
        "context_tokens": "Tokens that the model sees at once.",
    }
    config: Annotated[str, Meta(min_length=2, max_length=32_768)]
    context_tokens: ContextTokens


class HubCausalLM(LanguageModel):
    """The task hf-causal-lm. Figures: "loss" in nats per token.

    Names and shapes of the parameters are in the manifest too, so that daemons need not import
    `transformers`, and a release that builds another model is noticed. Version 0 is given (`run.initial`):
    the architecture's own initialisation, or a model that exists. Tied parameters have one name, and are
    merged once.
    """

    Section: ClassVar[type[ModelSection]] = HubSection
    section: HubSection
    _plain_head = False
    """True: the models made here are a body and a plain matrix behind it."""

    def config(self) -> Values:
        found: Values = json.loads(self.section.config)
        return found

    def broken_rule(self) -> str | None:
        if broken := super().broken_rule():
            return broken
        try:
            found = msgspec.json.decode(self.section.config)  # strictly: no bare Infinity, nor NaN
        except DAMAGE:
            found = None
        if not isinstance(found, dict) or not isinstance(found.get("model_type"), str):
            return "model.config must be a JSON object with a model_type"
        try:
            broken = self.section.broken()
            if not broken:
                specs = self.specs()
                largest = max((size for spec in specs for size in spec.shape), default=0)
                broken = broken_config(found, len(specs), self.tokens_per_sample, largest)
        except RecursionError:
            broken = "model.config is nested too deeply"
        if broken:
            return broken
        if self.manifest.data.tokenizer == BYTES and self.vocabulary < BYTE_VALUES:
            return (
                f"the tokenizer {BYTES} needs a vocabulary of {BYTE_VALUES}, the model's is {self.vocabulary}"
            )
        if not self.manifest.run.initial:
            return "run.initial must name version 0: p2pdiloco run new --architecture writes such a run.toml"
        return None

    def specs(self) -> Specs:
        return specs_from_texts(self.section.parameters)

    def model(self) -> nn.Module:
        model = built(self.config(), self.specs())
        self._plain_head = has_plain_head(model)
        return model

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        from torch.nn import functional

        from p2pdiloco.tasks.transformer import next_token_loss

        (windows,) = batch
        ids, targets = windows[:, :-1], windows[:, 1:].flatten()
        whole: Any = model
        # Of a model that is shared out, the head is whole only inside of its own forward pass.
        if self._plain_head and not hasattr(head := whole.get_output_embeddings().weight, "to_local"):
            hidden = whole.base_model(input_ids=ids, use_cache=False).last_hidden_state
            return next_token_loss(hidden.flatten(0, 1), head, targets)
        logits = whole(input_ids=ids, use_cache=False).logits
        return functional.cross_entropy(logits.float().flatten(0, 1), targets)


def section_of(config: Values, context_tokens: int) -> HubSection:
    """`[model]` for an architecture. Dropout is set to 0: few runs see a token twice. The context is at most
    what the architecture is made for.

    Raises:
        UserError: `transformers` is not installed, or cannot build it.
    """
    config = harmless(config) | {"dtype": "float32"}
    # Keys that are not there have an architecture's values: dropout is one of them.
    whole = harmless(_config(config).to_dict())
    config |= {
        key: without_dropout(key, value)
        for key, value in whole.items()
        if key in (*CONTEXTS, "vocab_size", PAD) or without_dropout(key, value) != value
    }
    context_tokens = min(context_tokens, longest(config) or context_tokens)
    from p2pdiloco.tasks.initial import tensor_specs

    specs = tensor_specs(_meta(config))
    return HubSection(
        config=json.dumps(config, sort_keys=True, allow_nan=False),
        context_tokens=context_tokens,
        parameters=texts_from_specs(specs),
    )


def built(config: Values, expected: Specs, seed: int = 0) -> nn.Module:
    """The model in fp32 with the architecture's own initialisation.

    Raises:
        UserError: `transformers` is not installed, cannot build it, or builds other parameters than expected.
    """
    import torch

    from p2pdiloco.tasks.initial import tensor_specs

    # First without memory: what a manifest's config comes to is not known before.
    if tensor_specs(_meta(config, expected)) != expected:
        raise UserError(
            "the installed transformers builds other parameters than model.parameters of this run says",
            "install the release that the run's owner has",
        )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return _made(config).float()


def _meta(config: Values, expected: Specs | None = None) -> nn.Module:
    """Build without memory, in bounds if it is known what parameters are `expected`.

    Raises:
        UserError: as `_made`; or it is beyond these bounds.
    """
    import torch

    if expected is None:
        with torch.device("meta"):
            return _made(config)
    _model_class(_config(config))  # importing takes as long as it takes
    with torch.device("meta"), bounded(len(expected), sum(spec.numel for spec in expected)):
        return _made(config)


def _config(config: Values) -> Any:
    """Without what would fetch something."""
    with needing(f"the task {HUB_TASK} needs the package transformers", "hub"):
        from transformers import CONFIG_MAPPING, AutoConfig, __version__
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise UserError(
            "the config has no model_type, the name of its architecture",
            "give the config.json of a model, as transformers writes it",
        )
    if kind not in CONFIG_MAPPING:
        # (The library would name all that it knows, hundreds.)
        raise UserError(
            f'transformers cannot build a causal model "{kind[:100]}": release {__version__} knows no such '
            "model_type",
            "check its spelling, or install a newer release",
        )
    with in_a_sentence(f'transformers cannot build a causal model "{kind}"'):
        return AutoConfig.for_model(**with_infinite(harmless(config)))


def _model_class(made: Any) -> Any:
    """Raises: UserError (the library has no such class)."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING
    if type(made) not in known:
        raise UserError(
            f'transformers cannot build a causal model "{made.model_type}": it has no such one',
            "only models that predict the next token of a text can be trained",
        )
    return known[type(made)]


def _made(config: Values) -> nn.Module:
    made = _config(config)
    _model_class(made)
    from transformers import AutoModelForCausalLM

    factory: Any = AutoModelForCausalLM
    with in_a_sentence(f'transformers cannot build a causal model "{made.model_type}"'):
        # The library's own implementations, in torch: of attention sdpa, or eager where the model has none.
        model: nn.Module = factory.from_config(
            made, trust_remote_code=False, attn_implementation=None, experts_implementation=None
        )
    return model


def keep_quiet() -> None:
    """Have `transformers` say nothing but errors."""
    from transformers.utils import logging

    log: Any = logging
    log.set_verbosity_error()
    log.disable_progress_bar()


def has_plain_head(model: nn.Module) -> bool:
    """Tell whether the model's logits are what its body says times one matrix, bit for bit: no bias, no cap
    (which fresh logits, being small, hardly feel), no scale. It is asked about some tokens."""
    import torch
    from torch.nn import functional

    from p2pdiloco.tasks.initial import evaluating

    whole: Any = model
    ids = torch.arange(CAUSAL_TOKENS).unsqueeze(0)
    try:
        with torch.no_grad(), evaluating(model):
            head, body = whole.get_output_embeddings(), whole.base_model
            if body is model or getattr(head, "bias", None) is not None:
                return False
            expected = whole(input_ids=ids, use_cache=False).logits
            hidden = body(input_ids=ids, use_cache=False).last_hidden_state
            found = functional.linear(hidden, head.weight)
    except Exception:  # noqa: BLE001 (whatever an architecture lacks or thinks: its own logits are taken then)
        return False
    return torch.equal(found, expected)


def check_causal(model: nn.Module, kind: object) -> None:
    """Refuse a model that sees the tokens behind the one that it predicts.

    Encoders build and train like causal models, and learn to copy the next token, which they see. So a model
    is asked about some tokens while the one behind them is exchanged. `kind`: its model_type.

    Raises:
        UserError: it says something else then.
    """
    import torch

    from p2pdiloco.tasks.initial import evaluating

    ids = torch.arange(CAUSAL_TOKENS).repeat(2, 1)
    ids[1, -1] = 0
    with in_a_sentence(f'the model "{kind}" takes no plain text'), torch.no_grad(), evaluating(model):
        here, there = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
    if not (here - there).abs().max() <= CAUSAL_NOISE * here.abs().max():
        raise UserError(
            f'the model "{kind}" is not causal: what it says of a token depends on the next one',
            'an encoder that can be a decoder needs "is_decoder": true in its config.json',
        )


def existing(folder: Path, config: Values, words: str, types: Mapping[str, str], say: Say) -> nn.Module:
    """Load a model that exists, in fp32, from safetensors only; `config`: its config.json; `words`: what a
    person knows the folder as; `types`: name -> type in its files.

    Raises:
        UserError: `transformers` is not installed, or does not load it, or not all of it.
    """
    with needing(f"the task {HUB_TASK} needs the package transformers", "hub"):
        from transformers import AutoModelForCausalLM
    made = _config(config)
    factory: Any = AutoModelForCausalLM
    keep_quiet()  # what is missing is told below, in a sentence
    with in_a_sentence(f"transformers does not load {words}"):
        found, report = factory.from_pretrained(
            folder, config=made, trust_remote_code=False, use_safetensors=True, output_loading_info=True
        )
    check_loaded(found, report, types, words, say)
    model: nn.Module = found
    return model.float()
