"""The causal language model and its version 0.

A GPT-style transformer in plain torch: pre-norm blocks (RMSNorm), causal attention with rotary positions,
GELU MLP of four times the width, output head tied to the token embedding. No biases anywhere. (Rotary
instead of learned positions: at the length of the demo, `tiny` after 200 inner steps has a held-out loss of
2.17 instead of 2.62 nats per byte.)

Version 0 must have the same bytes on every peer, whatever its platform and library versions (a DiLoCo
whose workers start from different weights does not converge, `algorithm.md`). So it comes from no torch
generator and no transcendental function: raw Philox integers, taken to floats by exact arithmetic.
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from p2pdiloco.config.manifest import Manifest, ModelSection
from p2pdiloco.errors import ConfigError
from p2pdiloco.tensors.layout import TensorSpec

INIT_STD = 0.02
ROTARY_BASE = 10_000.0
_DRAW_CHUNK = 1 << 20
_HALF_RANGE = 1 << 23


class Transformer(nn.Module):
    """Token ids (batch, length <= context) to logits (batch, length, vocabulary)."""

    def __init__(self, section: ModelSection) -> None:
        """Weights are torch's own random ones; load `initial_parameters` or a checkpoint.

        Raises:
            ConfigError: the width is not a multiple of the heads.
        """
        super().__init__()
        if section.width % section.heads:
            raise ConfigError(f"model.width {section.width} is not a multiple of model.heads {section.heads}")
        if section.width // section.heads % 2:
            raise ConfigError(
                f"model.width / model.heads is {section.width // section.heads}, but heads have an even width"
            )
        self.context_tokens = section.context_tokens
        self.tokens = nn.Embedding(section.vocabulary, section.width)
        self.blocks = nn.ModuleList(Block(section.width, section.heads) for _ in range(section.layers))
        self.norm = RMSNorm(section.width)
        # Not parameters, and not persistent: every process computes its own.
        for name, table in rotary_tables(section.context_tokens, section.width // section.heads).items():
            self.register_buffer(name, table, persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        x = self.tokens(ids)
        cos, sin = self.get_buffer("cos")[:length], self.get_buffer("sin")[:length]
        for block in self.blocks:
            x = block(x, cos, sin)
        return functional.linear(self.norm(x), self.tokens.weight)


class Block(nn.Module):
    """Attention, then MLP, each on the normalised stream and added to it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = RMSNorm(width)
        self.attention_in = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = RMSNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self._attend(self.attention_norm(x), cos, sin)
        hidden = functional.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh")
        x = x + self.mlp_out(hidden)
        return x

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads = self.attention_in(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = heads.permute(2, 0, 3, 1, 4).unbind(0)
        query, key = _rotated(query, cos, sin), _rotated(key, cos, sin)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))
        return out


def rotary_tables(context_tokens: int, head_width: int) -> dict[str, Tensor]:
    """cos and sin of position times frequency: fp32 (context, head_width / 2) each (RoFormer, 2104.09864)."""
    frequencies = ROTARY_BASE ** (-torch.arange(0, head_width, 2, dtype=torch.float64) / head_width)
    angles = torch.outer(torch.arange(context_tokens, dtype=torch.float64), frequencies)
    return {"cos": angles.cos().float(), "sin": angles.sin().float()}


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + half) of every head by its position's angles; keeps x's type."""
    first, second = x.chunk(2, dim=-1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return rotated.type_as(x)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight, in fp32 under autocast too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x.float(), self.weight.shape, self.weight, eps=1e-6)


def named_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The model's parameters by name, in the order that all peers agree on."""
    return {name: parameter.data for name, parameter in model.named_parameters()}


def tensor_specs(model: nn.Module) -> tuple[TensorSpec, ...]:
    """What `tensors.layout.plan_fragments` needs to know of the model, in the model's order."""
    return tuple(_spec(name, tuple(parameter.shape)) for name, parameter in model.named_parameters())


def specs_of(section: ModelSection) -> tuple[TensorSpec, ...]:
    """`tensor_specs` of a model of this shape, by arithmetic: the daemon never builds a model.

    (torch's meta device would do, but its first use imports for seconds.)"""
    width = section.width
    block = {
        "attention_norm.weight": (width,),
        "attention_in.weight": (3 * width, width),
        "attention_out.weight": (width, width),
        "mlp_norm.weight": (width,),
        "mlp_in.weight": (4 * width, width),
        "mlp_out.weight": (width, 4 * width),
    }
    specs = [
        _spec("tokens.weight", (section.vocabulary, width)),
    ]
    for layer in range(section.layers):
        specs += [_spec(f"blocks.{layer}.{name}", shape) for name, shape in block.items()]
    return (*specs, _spec("norm.weight", (width,)))


def initial_parameters(manifest: Manifest) -> dict[str, Tensor]:
    """Version 0: name -> fp32 tensor, the same bytes on every peer of the run (module docstring).

    Matrices are uniform with standard deviation 0.02, the projections back into the residual stream
    divided by sqrt(2 layers) (GPT-2); norms are ones. The initial loss is about ln(vocabulary).
    """
    residual_std = INIT_STD / math.sqrt(2 * manifest.model.layers)
    parameters = {}
    for spec in specs_of(manifest.model):
        if spec.name.endswith("norm.weight"):
            parameters[spec.name] = torch.ones(spec.shape)
            continue
        std = residual_std if spec.name.endswith("_out.weight") else INIT_STD
        values = _uniform(f"{manifest.run.seed}/{spec.name}", spec.numel, std)
        parameters[spec.name] = torch.from_numpy(values).view(spec.shape)
    return parameters


def _spec(name: str, shape: tuple[int, ...]) -> TensorSpec:
    return TensorSpec(name, shape, embedding=name == "tokens.weight")


def _uniform(seed: str, numel: int, std: float) -> NDArray[np.float32]:
    """numel uniform fp32 values with this standard deviation, a pure function of the seed text.

    The upper 23 bits k of a raw Philox word give the odd integer 2k + 1 - 2^23, exact in fp32; it is
    multiplied once (one IEEE rounding) by a scale that is computed in double and rounded to fp32.
    """
    key = int.from_bytes(hashlib.sha256(f"p2pdiloco/init/{seed}".encode()).digest()[:16], "little")
    generator = np.random.Philox(key=key)
    scale = np.float32(std * math.sqrt(3) / _HALF_RANGE)
    values = np.empty(numel, dtype=np.float32)
    for start in range(0, numel, _DRAW_CHUNK):
        part = values[start : start + _DRAW_CHUNK]
        k = (generator.random_raw(part.size) >> np.uint64(41)).astype(np.int64)
        part[:] = (2 * k + 1 - _HALF_RANGE).astype(np.float32) * scale
    return values
