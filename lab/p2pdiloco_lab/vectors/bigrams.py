"""The smallest language model: it learns which token follows which in a Markov chain that is known exactly.

So the loss of global parameters is computed, not estimated, and the best possible one is known. Gradients by
hand, in numpy: an inner step takes 30 us.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from p2pdiloco.tensors.sizes import TensorSpec

BATCH = 32
"""Pairs per inner step."""
LEARNING_RATE = 0.02
BETAS = (0.9, 0.99)


@dataclass(frozen=True)
class Size:
    """Size of a model."""

    tokens: int
    width: int

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """Tensors of such a model."""
        return (
            TensorSpec("embedding", (self.tokens, self.width), embedding=True),
            TensorSpec("output", (self.tokens, self.width)),
            TensorSpec("bias", (self.tokens,)),
        )


SMALL = Size(12, 8)
"""204 parameters in 25 rows: enough for several pieces in each of six fragments."""
LARGE = Size(32, 16)
"""1,056 parameters: enough to tell directions from each other."""
LARGER = Size(48, 48)
"""4,656 parameters: enough to tell those of learners with different data."""


@dataclass(frozen=True)
class Share:
    """Share of the data that a learner reads."""

    contexts: np.ndarray | None = None
    """Tokens of which it sees what follows; None: all."""
    targets: np.ndarray | None = None
    """Ids that it takes the tokens that follow for; None: their own."""


ALL = Share()


@dataclass(frozen=True)
class MarkovChain:
    """The data of a run: `follows[x, y]` is the probability that y comes after x, fp64 [TOKENS, TOKENS]."""

    follows: np.ndarray

    @staticmethod
    def drawn(seed: int, tokens: int = SMALL.tokens, turned: float = 0.0) -> MarkovChain:
        """Draw the chain of a run: every row is peaked, so that there is something to learn. `turned`: angle,
        in radians, by which the logits have turned towards others since: so there always is."""
        rng = np.random.default_rng([seed, 1])
        logits = 1.5 * rng.standard_normal((tokens, tokens))
        if turned:
            logits = np.cos(turned) * logits + np.sin(turned) * 1.5 * rng.standard_normal((tokens, tokens))
        return MarkovChain(_softmax(logits))

    @property
    def entropy(self) -> float:
        """Nats per token; all tokens are equally frequent as x."""
        return float(-(self.follows * np.log(self.follows)).sum() / len(self.follows))

    def loss(self, params: dict[str, Tensor]) -> float:
        """Expected cross-entropy of a model, in nats."""
        arrays = {name: tensor.numpy().astype(np.float64) for name, tensor in params.items()}
        logits = arrays["embedding"] @ arrays["output"].T + arrays["bias"]
        return float(-(self.follows * np.log(_softmax(logits))).sum() / len(self.follows))


def initial_params(seed: int, size: Size = SMALL) -> dict[str, Tensor]:
    """Version 0 of a run: fp32, the same on every node."""
    rng = np.random.default_rng([seed, 2])
    made = {spec.name: 0.3 * rng.standard_normal(spec.shape).astype(np.float32) for spec in size.specs}
    return {name: torch.from_numpy(values) for name, values in made.items()}


class Model:
    """One learner's parameters and Adam moments; a stream of data of its own."""

    def __init__(self, chain: MarkovChain, entropy: list[int], size: Size = SMALL, data: Share = ALL) -> None:
        """`entropy`: seeds its stream of data."""
        self._rng, self._tokens, self._data = np.random.default_rng(entropy), size.tokens, data
        self.follow(chain)
        specs = size.specs
        sizes = [spec.numel for spec in specs]
        self._theta = np.zeros(sum(sizes), np.float32)
        self._gradient = np.zeros_like(self._theta)
        self._moments = np.zeros_like(self._theta), np.zeros_like(self._theta)
        self._made = 0
        ends = np.cumsum(sizes)
        parts = [slice(int(end) - size, int(end)) for end, size in zip(ends, sizes, strict=True)]
        self._views = [self._theta[p].reshape(s.shape) for p, s in zip(parts, specs, strict=True)]
        self._slopes = [self._gradient[p].reshape(s.shape) for p, s in zip(parts, specs, strict=True)]
        self.params = {s.name: torch.from_numpy(v) for s, v in zip(specs, self._views, strict=True)}
        """Shared with the arrays that are trained: whoever writes here moves the learner."""

    def follow(self, chain: MarkovChain) -> None:
        """Go over to other data."""
        self._cumulative = chain.follows.cumsum(axis=1)

    def inner_step(self) -> None:
        """One Adam step on a fresh batch."""
        tokens, data = self._tokens, self._data
        if data.contexts is None:
            x = self._rng.integers(0, tokens, BATCH)
        else:
            x = data.contexts[self._rng.integers(0, len(data.contexts), BATCH)]
        y = (self._cumulative[x] < self._rng.random((BATCH, 1))).sum(axis=1).clip(max=tokens - 1)
        y = y if data.targets is None else data.targets[y]
        counts = np.zeros((tokens, tokens), np.float32)
        np.add.at(counts, (x, y), 1.0)
        embedding, output, bias = self._views
        wrong = _softmax(embedding @ output.T + bias) * counts.sum(axis=1, keepdims=True) - counts
        wrong /= BATCH
        np.matmul(wrong, output, out=self._slopes[0])
        np.matmul(wrong.T, embedding, out=self._slopes[1])
        wrong.sum(axis=0, out=self._slopes[2])
        self._adam()

    def _adam(self) -> None:
        self._made += 1
        (first, second), (b1, b2), slope = self._moments, BETAS, self._gradient
        first += (1 - b1) * (slope - first)
        second += (1 - b2) * (slope * slope - second)
        scale = LEARNING_RATE / (1 - b1**self._made)
        self._theta -= scale * first / (np.sqrt(second / (1 - b2**self._made)) + 1e-8)


def _softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return np.asarray(powers / powers.sum(axis=1, keepdims=True))
