"""A transformer in Llama's form, and in Mixtral's where a block has experts.

Pre-norm blocks (RMSNorm), causal attention with rotary positions (the two halves of a head are the pairs, as
in Hugging Face's Llama) and optionally fewer heads for keys and values, SwiGLU feed-forward part, no biases.
Parameters have the names and shapes of Hugging Face's `LlamaForCausalLM` and `MixtralForCausalLM`.

`attention` and `by_rows` are made fast on a CPU that computes in bf16 (measured by
`scripts/bench/study/bench_bf16.py`); on any other device they are the plain operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from p2pdiloco.config.manifest import CausalLMSection
from p2pdiloco.tensors.layout import Tensors
from p2pdiloco.tensors.sizes import CPU_CHUNK_NUMEL


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


def rotary_tables(context_tokens: int, head_width: int, base: float) -> Tensors:
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


AMPERE = 8
"""NVIDIA's first compute capability (major) of which torch multiplies bf16 in groups."""
ALIGNED = 8
"""Elements of bf16, 16 bytes, of which rows of grouped matrices must be a multiple."""


class Expert(nn.Module):
    """SwiGLU under Mixtral's names."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, hidden, bias=False)
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.w3 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w2(functional.silu(self.w1(x)) * self.w3(x))
        return out


class Experts(nn.Module):
    """Mixture of experts: each token goes through the k that the gate likes best, weighted by its softmax
    over these. They compute one after the other or, where a device multiplies in groups, all at once."""

    def __init__(self, section: CausalLMSection) -> None:
        super().__init__()
        self._chosen = section.experts_per_token
        self._section = section
        self.gate = nn.Linear(section.width, section.experts, bias=False)
        self.experts = nn.ModuleList(
            Expert(section.width, section.feed_forward_width) for _ in range(section.experts)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.flatten(0, -2)
        read = narrowed(tokens)
        chances = functional.softmax(self.gate(read).float(), dim=-1)
        weights, chosen = chances.topk(self._chosen, dim=-1)
        weights = (weights / weights.sum(dim=-1, keepdim=True)).type_as(tokens)
        grouped = computes_in_groups(self._section, x.device, read.dtype == torch.bfloat16)
        mixed = (self._in_groups if grouped else self._in_turn)(read, chosen, weights)
        shares = functional.one_hot(chosen, len(self.experts)).float().mean(dim=(0, 1))
        return mixed.view_as(x), len(self.experts) * (shares * chances.mean(dim=0)).sum()

    def _in_turn(self, read: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Sum of the chosen experts' answers to tokens (n, width), by their weights (n, k)."""
        mixed = torch.zeros_like(read, dtype=weights.dtype)
        # Every expert is asked, also for no token: so all parameters have a gradient at every step.
        for index, expert in enumerate(self.experts):
            rows, choices = torch.where(chosen == index)
            answers = by_rows(expert, read[rows]) * weights[rows, choices, None]
            mixed = mixed.index_add(0, rows, answers.type_as(mixed))
        return mixed

    def _in_groups(self, read: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Multiply in two products, of shapes that do not change: tokens are sorted by expert, and nothing
        waits for the device."""
        order = chosen.flatten().argsort(stable=True)
        counts = functional.one_hot(chosen.flatten(), len(self.experts)).sum(dim=0)
        ends = counts.cumsum(0).to(torch.int32)
        both = functional.grouped_mm(read[order // self._chosen], self._stacked("w1", "w3"), offs=ends)
        gate, up = both.chunk(2, dim=-1)
        answers = functional.grouped_mm(functional.silu(gate) * up, self._stacked("w2"), offs=ends)
        by_token = answers[order.argsort()].view(*chosen.shape, -1)
        return (by_token * weights[..., None]).sum(dim=1)

    def _stacked(self, *names: str) -> Tensor:
        """Weights of all experts: (experts, inputs, outputs)."""
        each = [torch.cat([narrowed(getattr(e, name).weight) for name in names]) for e in self.experts]
        return torch.stack(each).transpose(1, 2)


def computes_in_groups(section: CausalLMSection, device: torch.device, bf16: bool) -> bool:
    """Tell whether this device multiplies such experts' matrices at once, each with its tokens."""
    if device.type != "cuda" or not bf16 or torch.version.hip is not None:
        return False
    if section.width % ALIGNED or section.feed_forward_width % ALIGNED:
        return False
    return hasattr(functional, "grouped_mm") and torch.cuda.get_device_capability(device)[0] >= AMPERE


FP32_TOKENS = 256
"""Context up to which torch's attention is faster in fp32 than in bf16. With 64 tokens it takes a third to a
half of the time, with 256 about as much, on an AMD processor with AVX512-BF16. AMX was not measured."""
ROWS = 128
"""Multiple to which numbers of rows are filled up that change all the time."""


def attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> Tensor:
    """Attention by scaled dot products of (batch, heads, tokens, head width); the result has that shape
    again.

    Computes in fp32 where a CPU's autocast would take bf16 for so short a context.
    """
    if _of_cpu_in_bf16(query) and query.shape[-2] <= FP32_TOKENS:
        with torch.autocast("cpu", enabled=False):
            return _mixed(query.float(), key.float(), value.float(), causal)
    return _mixed(query, key, value, causal)


def by_rows(layer: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Apply a layer to rows (n, width), each by itself, where n changes from call to call.

    A CPU's kernels for bf16 are compiled for every shape of matrices, and 1024 of them are kept. With experts
    that takes longer than the multiplications, and 0.8 GiB (`tiny-moe`). So rows are filled up to a few
    shapes only.
    """
    count = len(rows)
    if not _of_cpu_in_bf16(rows):
        return layer(rows)
    return layer(functional.pad(rows, (0, 0, 0, -count % ROWS)))[:count]


def _of_cpu_in_bf16(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu" and torch.is_autocast_enabled("cpu")


def _mixed(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
    return functional.scaled_dot_product_attention(query, key, value, is_causal=causal)


CHUNK_NUMEL = 1 << 28
"""Logits of a chunk on an accelerator: 1 GiB in fp32. Each chunk adds up the head's gradient once more."""


def next_token_loss(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy (a scalar, nats) of `targets` (tokens) under the logits `hidden @ head.T`.

    `hidden` is (tokens, width), `head` is (ids, width). Under autocast the products are in its type; softmax,
    sums and the head's gradient are fp32.

    This is the largest matrix product of a text model. Of 65,536 tokens and 50,304 ids, logits in fp32 are 13
    GB, and their gradient as much again. So they are made a chunk of tokens at a time, and the gradient of a
    chunk is computed while its logits are here. Small vocabularies are one chunk: torch's own operations.
    """
    chunks = chunks_of(hidden, head)
    # A compiler fuses the softmax into what reads the logits, and keeps these in the product's type. In bf16
    # that is faster than chunks (docs/results.md); in fp32 it would take twice the memory of passes that
    # are not compiled. (`is_compiling` is true in all threads while one compiles.)
    fuses = torch.compiler.is_dynamo_compiling() and torch.is_autocast_enabled(hidden.device.type)
    if chunks == 1 or fuses:
        return functional.cross_entropy(functional.linear(hidden, head).float(), targets)
    wants_gradient = torch.is_grad_enabled() and (hidden.requires_grad or head.requires_grad)
    at_once = -(-len(hidden) // chunks)
    apply: Any = _ChunkedLoss.apply
    return cast(Tensor, apply(hidden, head, targets, at_once, wants_gradient))


def chunks_of(hidden: Tensor, head: Tensor) -> int:
    """Number of chunks in which the logits of `hidden` (tokens, width) are made."""
    most = CPU_CHUNK_NUMEL if hidden.device.type == "cpu" else CHUNK_NUMEL
    return max(1, -(-len(hidden) * len(head) // most))


def narrowed(x: Tensor) -> Tensor:
    """The tensor in the type that autocast multiplies in: cast once for all layers that read it."""
    kind = x.device.type
    return x.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else x


class _ChunkedLoss(torch.autograd.Function):
    """The gradients of the inputs are computed in the same go."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, at_once: int, wants_gradient: bool
    ) -> Tensor:
        rows, matrix = narrowed(hidden), narrowed(head)
        total = torch.zeros((), device=hidden.device)
        of_rows, of_head = [], torch.zeros(head.shape if wants_gradient else (), device=head.device)
        for part, wanted in zip(torch.split(rows, at_once), torch.split(targets, at_once), strict=True):
            logits = (part @ matrix.T).float()
            log_sums = logits.logsumexp(dim=-1, keepdim=True)
            wanted = wanted.unsqueeze(-1)
            total = total + (log_sums - logits.gather(-1, wanted)).sum()
            if wants_gradient:
                slope = logits.sub_(log_sums).exp_()
                slope.scatter_add_(-1, wanted, torch.full_like(wanted, -1, dtype=slope.dtype))
                slope = slope.mul_(1 / len(rows)).to(part.dtype)
                of_rows.append(slope @ matrix)
                of_head += slope.T @ part
        if wants_gradient:
            ctx.save_for_backward(torch.cat(of_rows).to(hidden.dtype), of_head.to(head.dtype))
        return total / len(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        of_hidden, of_head = ctx.saved_tensors
        return of_hidden * gradient, of_head * gradient, None, None, None
