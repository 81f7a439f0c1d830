"""The task causal-lm: a transformer that predicts the next token of a text."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from p2pdiloco.config.manifest import BYTE_VALUES, BYTES, CausalLMSection, ModelSection
from p2pdiloco.tasks.task import Data, Task
from p2pdiloco.tensors.sizes import MAX_TENSORS, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor, device, nn

    from p2pdiloco.tasks.task import Batch

INIT_STD = 0.02
PROMPT = '    """Return the '
SAMPLE_TOKENS = 320
MAX_SHUFFLED_TOKENS = 1 << 26
"""Tokens of a streamed data set that a learner holds at one time, twice, four bytes each."""
SAMPLE_TEMPERATURE = 0.7
_INTO_THE_STREAM = ("o_proj.weight", "down_proj.weight", "w2.weight")


class CausalLM(Task):
    """The task causal-lm. Figures: "loss" in nats per token, without the experts' balance."""

    Section: ClassVar[type[ModelSection]] = CausalLMSection
    section: CausalLMSection

    @property
    def tokens_per_sample(self) -> int:
        return self.section.context_tokens

    def shapes_change(self, device: device, bf16: bool) -> bool:
        from p2pdiloco.tasks.models.experts import computes_in_groups

        return self.section.experts > 0 and not computes_in_groups(self.section, device, bf16)

    @property
    def vocabulary(self) -> int:
        return self.section.vocabulary

    def broken_rule(self) -> str | None:
        model, tokens = self.section, self.manifest.inner.tokens_per_step
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
                self._tensors() <= MAX_TENSORS,  # before anything is made for each of them
                f"a model must have at most {MAX_TENSORS} tensors, this one has {self._tensors()}",
            ),
            (
                tokens % model.context_tokens == 0,
                f"inner.tokens_per_step must be a multiple of model.context_tokens ({model.context_tokens}), "
                f"it is {tokens}",
            ),
        )
        return next((sentence for holds, sentence in rules if not holds), None) or self._too_much_shuffled()

    def _tensors(self) -> int:
        """Count what `specs` lists."""
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

    def specs(self) -> tuple[TensorSpec, ...]:
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

    def initial_parameters(self) -> dict[str, Tensor]:
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
        from p2pdiloco.tasks.models.transformer import Transformer

        return Transformer(self.section)

    def load_data(self, path: str | None) -> Data:
        from p2pdiloco.tasks.data.corpus import load_corpus

        return load_corpus(self.manifest.data, path, self.section.context_tokens, self.tokenizer())

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        loss, balance = self._losses(model, batch)
        return loss if balance is None else loss + self.section.balance_weight * balance

    def metrics(self, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
        loss, balance = self._losses(model, batch)
        return {"loss": loss} if balance is None else {"loss": loss, "balance": balance}

    def _losses(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
        (windows,) = batch
        loss, balance = model(windows[:, :-1], windows[:, 1:])
        return loss, balance

    def written(self, model: nn.Module, prompt: str, tokens: int, temperature: float, seed: int) -> str:
        from p2pdiloco.tasks.data.tokens import prompt_ids
        from p2pdiloco.tasks.models.transformer import generate

        section, tokenizer = self.section, self.tokenizer()
        start = prompt_ids(tokenizer, prompt)
        most = min(section.vocabulary, tokenizer.vocabulary)
        return tokenizer.decode(
            generate(model, start, tokens, section.context_tokens, most, temperature, seed)
        )

    def hub_files(self) -> dict[str, bytes]:
        from p2pdiloco.tasks.models.hub_export import hub_files
        from p2pdiloco.tasks.models.hub_form import llama_config

        context = self.section.context_tokens
        return hub_files(self.manifest, llama_config(self.section), context, self.tokenizer_file)

    def sample(self, model: nn.Module) -> str:
        return PROMPT + self.written(model, PROMPT, SAMPLE_TOKENS, SAMPLE_TEMPERATURE, 0)
