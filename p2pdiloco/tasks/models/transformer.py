"""A transformer in Llama's form, and in Mixtral's where a block has experts.

Pre-norm blocks (RMSNorm), causal attention with rotary positions (the two halves of a head are the pairs, as
in Hugging Face's Llama) and optionally fewer heads for keys and values, SwiGLU feed-forward part, no biases.
Parameters have the names and shapes of Hugging Face's `LlamaForCausalLM` and `MixtralForCausalLM`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from p2pdiloco.config.manifest import CausalLMSection
from p2pdiloco.tasks.models.cpu_bf16 import attention
from p2pdiloco.tasks.models.experts import Experts
from p2pdiloco.tasks.models.head_loss import narrowed, next_token_loss


class Transformer(nn.Module):
    """Token ids (batch, length <= context) to logits (batch, length, vocabulary), or, where the next tokens
    are given, to their mean loss; and the mean of the blocks' balance losses (None where there are no
    experts). Weights are torch's own random ones at first."""

    def __init__(self, section: CausalLMSection) -> None:
        super().__init__()
        self.model = Body(section)
        if not section.tied_head:
            self.lm_head = nn.Linear(section.width, section.vocabulary, bias=False)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        hidden, balance = self.model(ids)
        tied = self.model.embed_tokens.weight
        # Read in here, not by whoever computes a loss: of a model that is shared out it is whole only now.
        head = self.lm_head.weight if hasattr(self, "lm_head") else tied
        if targets is None:
            return functional.linear(hidden, head), balance
        return next_token_loss(hidden.flatten(0, 1), head, targets.flatten()), balance


class Body(nn.Module):
    """Embedding, blocks, last norm."""

    def __init__(self, section: CausalLMSection) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(section.vocabulary, section.width)
        self.layers = nn.ModuleList(Block(section) for _ in range(section.layers))
        self.norm = RMSNorm(section.width, section.norm_epsilon)
        # Not parameters, and not persistent: every process computes its own.
        tables = rotary_tables(section.context_tokens, section.head_width, section.rope_base)
        for name, table in tables.items():
            self.register_buffer(name, table, persistent=False)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        x = self.embed_tokens(ids)
        length = ids.shape[1]
        cos, sin = self.get_buffer("cos")[:length], self.get_buffer("sin")[:length]
        balances = []
        for layer in self.layers:
            x, balance = layer(x, cos, sin)
            balances += [] if balance is None else [balance]
        return self.norm(x), torch.stack(balances).mean() if balances else None


class Block(nn.Module):
    """Attention, then feed-forward part, each on the normalised stream and added to it."""

    def __init__(self, section: CausalLMSection) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(section.width, section.norm_epsilon)
        self.self_attn = Attention(section)
        self.post_attention_layernorm = RMSNorm(section.width, section.norm_epsilon)
        if section.experts:
            self.block_sparse_moe = Experts(section)
        else:
            self.mlp = FeedForward(section.width, section.feed_forward_width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor | None]:
        x = x + self.self_attn(narrowed(self.input_layernorm(x)), cos, sin)
        normed = self.post_attention_layernorm(x)
        if hasattr(self, "block_sparse_moe"):
            mixed, balance = self.block_sparse_moe(normed)
            return x + mixed, balance
        return x + self.mlp(narrowed(normed)), None


class Attention(nn.Module):
    """Causal self-attention; each head of keys and values serves as many heads of queries."""

    def __init__(self, section: CausalLMSection) -> None:
        super().__init__()
        width, shared = section.width, section.key_value_width
        self._heads, self._head_width = section.heads, section.head_width
        self._served = width // shared
        self.q_proj = nn.Linear(width, width, bias=False)
        self.k_proj = nn.Linear(width, shared, bias=False)
        self.v_proj = nn.Linear(width, shared, bias=False)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        query, key, value = (
            self._by_head(y) for y in projections(x, (self.q_proj, self.k_proj, self.v_proj))
        )
        query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        if self._served > 1:
            key, value = (t.repeat_interleave(self._served, dim=1) for t in (key, value))
        mixed = attention(query, key, value, causal=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out

    def _by_head(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, self._head_width).transpose(1, 2)


def projections(x: Tensor, layers: Sequence[nn.Linear]) -> Sequence[Tensor]:
    """Outputs of several layers without biases that read the same input.

    Where a compiler makes one copy of their weights anyway, in the type of the product, it is one wide
    product: a GPU reaches more with it than with narrow ones."""
    if not torch.compiler.is_dynamo_compiling():
        return [layer(x) for layer in layers]
    weights = [layer.weight for layer in layers]
    wide = functional.linear(x, torch.cat(weights))
    return torch.split(wide, [len(weight) for weight in weights], dim=-1)


class FeedForward(nn.Module):
    """SwiGLU (2002.05202)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, hidden, bias=False)
        self.up_proj = nn.Linear(width, hidden, bias=False)
        self.down_proj = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = projections(x, (self.gate_proj, self.up_proj))
        out: Tensor = self.down_proj(functional.silu(gate) * up)
        return out


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in fp32 under autocast too."""

    def __init__(self, width: int, epsilon: float) -> None:
        super().__init__()
        self._epsilon = epsilon
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, eps=self._epsilon)


def rotary_tables(context_tokens: int, head_width: int, base: float) -> dict[str, Tensor]:
    """cos and sin of position times frequency: fp32 (context, head_width / 2) each (RoFormer, 2104.09864)."""
    frequencies = base ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angles = torch.outer(torch.arange(context_tokens, dtype=torch.float64), frequencies)
    return {"cos": angles.cos().float(), "sin": angles.sin().float()}


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + half) of every head by its position's angles; keeps x's type."""
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.type_as(x)


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Sequence[int],
    tokens: int,
    context_tokens: int,
    vocabulary: int,
    temperature: float = 0.8,
    seed: int = 0,
) -> list[int]:
    """`tokens` tokens, of ids below `vocabulary`, that the model puts behind the prompt (one token at least).
    Temperature 0: always the likeliest one."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt)
    for _ in range(tokens):
        window = torch.tensor([ids[-context_tokens:]], device=device)
        logits = model(window)[0][0, -1, :vocabulary].float().cpu()
        if temperature > 0:
            chances = functional.softmax(logits / temperature, dim=-1)
            ids.append(int(torch.multinomial(chances, 1, generator=generator)))
        else:
            ids.append(int(logits.argmax()))
    return ids[len(prompt) :]
