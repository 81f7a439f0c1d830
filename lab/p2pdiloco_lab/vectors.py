"""A small model as real vectors, for `simulate --vectors`.

Everything that a node does to bytes is done by `Vectors` with the code that does it in production: `Vault`
(encoding with error feedback, merges, partial merges, outer step, digests) and `learner.fragments` (copy-out,
merged, rebase, overwrite). Only the model is a toy, and a state is bytes between two calls, so that no two
nodes share one. The model learns which token follows which in a Markov chain that is known exactly. So the
loss of global parameters is computed, not estimated, and the best possible one is known. Gradients are by
hand, in numpy: an inner step takes 30 us.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from p2pdiloco.config.manifest import OuterSection
from p2pdiloco.config.presets import EQUALS, USUAL, OuterRule
from p2pdiloco.core.api.events import Measured
from p2pdiloco.core.api.types import MergeLimits
from p2pdiloco.learner.channel import BaseRef, Install, NothingToCopy
from p2pdiloco.learner.fragments import Fragments
from p2pdiloco.learner.optimizer import HeldParameters
from p2pdiloco.tensors.codecs import CODECS, UnusableInputs, bytes_of, codec
from p2pdiloco.tensors.layout import Exchange, FragmentLayout, plan_fragments, scatter
from p2pdiloco.tensors.merge import Accumulator, Findings, Input, decode_partial
from p2pdiloco.tensors.sizes import TensorSpec
from p2pdiloco.tensors.vault import Vault
from p2pdiloco_lab.simulation.lineage import (
    Losses,
    MergeContribution,
    MergeOutcome,
    MergeTree,
    Mode,
    Resumed,
    Substance,
    Trainer,
    UnusableMatter,
)
from p2pdiloco_lab.simulation.seed_plan import WorldPlan, random_stream
from p2pdiloco_lab.simulation.seed_report import Violation

# The smallest language model.

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


WHOLE = Share()


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
        return float(self._losses(params).sum() / len(self.follows))

    def loss_at(self, params: dict[str, Tensor], token: int) -> float:
        """Expected cross-entropy where that token comes next, in nats."""
        return float(self._losses(params)[:, token].sum() / self.follows[:, token].sum())

    def _losses(self, params: dict[str, Tensor]) -> np.ndarray:
        arrays = {name: tensor.numpy().astype(np.float64) for name, tensor in params.items()}
        logits = arrays["embedding"] @ arrays["output"].T + arrays["bias"]
        return np.asarray(-self.follows * np.log(_softmax(logits)))


def initial_params(seed: int, size: Size = SMALL) -> dict[str, Tensor]:
    """Version 0 of a run: fp32, the same on every node."""
    rng = np.random.default_rng([seed, 2])
    made = {spec.name: 0.3 * rng.standard_normal(spec.shape).astype(np.float32) for spec in size.specs}
    return {name: torch.from_numpy(values) for name, values in made.items()}


class Model:
    """One learner's parameters and Adam moments; a stream of data of its own."""

    def __init__(
        self, chain: MarkovChain, entropy: list[int], size: Size = SMALL, data: Share = WHOLE
    ) -> None:
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


# Its vectors as the simulator's substance.


class Vectors(Substance):
    """A world whose learners train a bigram model. The seed draws data, version 0 and, where they are not
    given, both codecs and the outer optimizer's settings."""

    def __init__(
        self,
        plan: WorldPlan,
        size: Size = SMALL,
        codec_name: str | None = None,
        outer: OuterRule | None = None,
    ) -> None:
        """`codec_name`: of contributions and updates."""
        torch.set_num_threads(1)
        rng = random_stream(plan.seed, "vectors")
        self.seed, self.inner_steps = plan.seed, plan.config.inner_steps
        self.tokens_per_step = plan.config.tokens_per_step
        drawn = rng.choice(sorted(CODECS)), rng.choice(sorted(CODECS))
        self.codecs = drawn if codec_name is None else (codec_name, codec_name)
        """Codecs of contributions and of updates."""
        self.size = size
        self.layouts = plan_fragments(size.specs, plan.config.fragments)
        self.chain = MarkovChain.drawn(plan.seed, size.tokens)
        self._outer = OuterSection(**(outer or rng.choice([USUAL, EQUALS]))._asdict())
        initial = self.vault()
        self.layouts = initial.layouts
        initial.load_initial(initial_params(plan.seed, size))
        self._genesis = [b"".join(initial.state_buffers(layout.index)) for layout in self.layouts]
        self._first_lengths = [initial.first_length(layout.index) for layout in self.layouts]
        self._calculator = self.vault()

    def vault(self) -> Vault:
        """A new one for this run."""
        contributions, updates = self.codecs
        return Vault(self.layouts, self._outer, self.inner_steps, contributions, updates)

    def theta(self, fragment: int, state: bytes) -> Tensor:
        """Global parameters in a state, fp32 [numel], new memory."""
        return torch.frombuffer(bytearray(state), dtype=torch.float32)[: self.layouts[fragment].numel]

    def share_of(self, peer: str) -> Share:
        """Share of the data that a learner trains on."""
        return WHOLE

    def copied(self, peer: str, fragment: int, payload: bytes) -> None:
        """A learner has copied a fragment out."""

    def decoded(self, fragment: int, payload: bytes) -> Tensor:
        """The pseudo-gradient in a contribution, fp32 [numel]."""
        out = torch.empty(self.layouts[fragment].numel)
        codec(self.codecs[0]).decode(payload, out)
        return out

    def genesis(self, fragment: int) -> bytes:
        return self._genesis[fragment]

    def first_length(self, fragment: int) -> float:
        return self._first_lengths[fragment]

    def trainer(self, peer: str, states: list[tuple[int, bytes]]) -> Trainer:
        return VectorTrainer(self, peer, states)

    # --- merges --------------------------------------------------------------------------------------

    def _load(self, fragment: int, number: int, state: bytes) -> Vault:
        """A vault that holds this state as its committed one."""
        vault, half = self._calculator, 4 * self.layouts[fragment].numel
        vault.load_spare(fragment, number, state[:half], state[half:])
        vault.commit(fragment, number)
        return vault

    def combine(self, fragment: int, parts: list[bytes]) -> bytes:
        sources = [lambda part=part: part for part in parts]
        return bytes(self._calculator.own.combine(fragment, sources).payload)

    def partial(
        self,
        fragment: int,
        inputs: list[MergeContribution],
        partials: list[bytes],
        limits: MergeLimits,
        seed: bytes,
    ) -> MergeOutcome:
        with _as_unusable_matter():
            made = self._calculator.merge_partial(fragment, _inputs(inputs), partials, limits, seed)
        return MergeOutcome(bytes(made.payload), _measured(made.found), made.found.cut)

    def merge(
        self,
        fragment: int,
        number: int,
        state: bytes,
        inputs: list[MergeContribution],
        partials: list[bytes],
        longest_steps: int,
        limits: MergeLimits,
        seed: bytes,
    ) -> MergeOutcome:
        vault = self._load(fragment, number - 1, state)
        with _as_unusable_matter():
            made = vault.merge(fragment, number, _inputs(inputs), partials, longest_steps, limits, seed)
        return MergeOutcome(bytes(made.update), _measured(made.found), made.found.cut, made.norm)

    def grouped_error(self, fragment: int, tree: MergeTree) -> float:
        vault, layout, flat = self._calculator, self.layouts[fragment], tree.flat()
        work = [(tokens, steps, trust) for _, tokens, steps, trust in flat]
        payloads = [self._uncut(fragment, tree), self._uncut(fragment, MergeTree(flat))]
        for payload in payloads:
            vault.check_partial(fragment, payload, work)
        mine, whole = (_merged(layout, payload) for payload in payloads)
        # Of a piece's mean length, which is at least as long as the merge of it.
        lengths = _mean_length(layout, payloads[1], whole)
        return float((mine - whole).norm()) / lengths if lengths else float((mine - whole).norm() > 0)

    def _uncut(self, fragment: int, tree: MergeTree) -> bytes:
        """Add these up without limits, group by group."""
        below = [self._uncut(fragment, each) for each in tree.below]
        return bytes(self._calculator.merge_partial(fragment, tree.inputs, below).payload)

    def outer_step(
        self, fragment: int, number: int, state: bytes, update: bytes, longest_steps: int
    ) -> bytes:
        vault = self._load(fragment, number - 1, state)
        vault.apply(fragment, number, update, longest_steps)
        vault.commit(fragment, number)
        return b"".join(vault.state_buffers(fragment))

    # --- learning ------------------------------------------------------------------------------------

    def losses(self, states: list[bytes]) -> Losses | None:
        start, end = self._loss(self._genesis), self._loss(states)
        return Losses(round(start, 6), round(end, 6), round(self.chain.entropy, 6))

    def _loss(self, states: Sequence[bytes]) -> float:
        return self.chain.loss(self.params_of(states))

    def params_of(self, states: Sequence[bytes]) -> dict[str, Tensor]:
        """Global parameters in these states, of all fragments."""
        params = {spec.name: torch.zeros(spec.shape) for spec in self.size.specs}
        for layout, state in zip(self.layouts, states, strict=True):
            scatter(self.theta(layout.index, state), layout, params)
        return params


class Areas(Exchange):
    """The areas of an exchange in ordinary memory: this learner shares its daemon's process."""

    def __init__(self, layouts: Sequence[FragmentLayout]) -> None:
        self._areas = [[torch.zeros(layout.numel) for _ in range(3)] for layout in layouts]

    @property
    def fragments(self) -> int:
        return len(self._areas)

    def base(self, fragment: int, index: int) -> Tensor:
        return self._areas[fragment][index]

    def sent(self, fragment: int) -> Tensor:
        return self._areas[fragment][2]


class VectorTrainer(Trainer):
    """One node's learner: what `learner.fragments` and the vault's error feedback make of its inner steps."""

    def __init__(self, study: Vectors, peer: str, states: list[tuple[int, bytes]]) -> None:
        self._study, self._name = study, peer
        self._peer = zlib.crc32(peer.encode())
        self._vault = study.vault()
        """Only for what encodings leave out; it lives as long as the daemon."""
        self._bases = list(states)
        self._running: tuple[Model, Fragments, Areas] | None = None
        self._step = 0

    def begin(self, step: int, resumed: dict[int, Resumed]) -> None:
        study = self._study
        entropy, data = [study.seed, 3, self._peer, step], study.share_of(self._name)
        model, areas = Model(study.chain, entropy, study.size, data), Areas(study.layouts)
        for fragment, (_, state) in enumerate(self._bases):
            areas.base(fragment, 0).copy_(study.theta(fragment, state))
        refs = [BaseRef(number, 0) for number, _ in self._bases]
        fragments = Fragments(
            HeldParameters(model.params), study.layouts, areas, refs, study.inner_steps, 1.0
        )
        for fragment in range(len(refs)):
            first, saved = resumed.get(fragment, (step, b""))
            moved = torch.frombuffer(bytearray(saved), dtype=torch.float32) if saved else None
            fragments.reset_to_base(fragment, moved)
            fragments.counters[fragment].unmerged_steps = step - first
            fragments.counters[fragment].unmerged_tokens = (step - first) * study.tokens_per_step
        self._running, self._step = (model, fragments, areas), step

    def end(self) -> None:
        self._running = None

    def _parts(self) -> tuple[Model, Fragments, Areas]:
        if self._running is None:
            raise Violation("crashed", "a learner's parameters are asked for, but there is no learner")
        return self._running

    def advance(self, step: int) -> None:
        model, fragments, _ = self._parts()
        if step < self._step:
            raise Violation("steady-pace", f"step {step} comes after step {self._step}")
        for _ in range(step - self._step):
            model.inner_step()
            fragments.count_step(self._study.tokens_per_step)
        self._step = step

    def copy_out(self, fragment: int, steps: int) -> bytes:
        _, fragments, areas = self._parts()
        copied = fragments.copy_out(fragment, self._step)
        if isinstance(copied, NothingToCopy) or copied.inner_steps != steps:
            raise Violation("true-label", f"fragment {fragment}: {copied}, the lineage says {steps} steps")
        base = areas.base(fragment, copied.base_buffer)
        payload = bytes(self._vault.own.encode(fragment, base, areas.sent(fragment)).payload)
        self._study.copied(self._name, fragment, payload)
        return payload

    def committed(self, fragment: int) -> None:
        self._vault.own.commit_residual(fragment)

    def retire(self, fragment: int) -> None:
        self._vault.own.discard_residual(fragment)
        if self._running is not None and self._running[1].counters[fragment].slot_in_use:
            self._running[1].free_slot(fragment)

    def install(self, fragment: int, number: int, state: bytes, mode: Mode) -> None:
        self._bases[fragment] = (number, state)
        if self._running is None:
            return
        model, fragments, areas = self._running
        model.follow(self._study.chain)
        buffer = 1 - fragments.bases[fragment].buffer
        areas.base(fragment, buffer).copy_(self._study.theta(fragment, state))
        fragments.install(Install(fragment, number, buffer, mode))

    def saved(self, fragment: int) -> tuple[bytes, bytes]:
        _, fragments, _ = self._parts()
        whole = fragments.displacement(fragment)
        rest = fragments.not_in_flight(fragment) if fragments.counters[fragment].slot_in_use else whole
        return bytes(bytes_of(whole)), bytes(bytes_of(rest))


def _merged(layout: FragmentLayout, payload: bytes) -> Tensor:
    """The pseudo-gradient that these sums make, before it is encoded."""
    part, total, out = decode_partial(layout, payload), Accumulator(layout, 1), torch.empty(layout.numel)
    total.combine(part.weight, part.reach, part.contributions, part.norms, part.sums)
    total.result(out)
    return out


def _mean_length(layout: FragmentLayout, payload: bytes, merged: Tensor) -> float:
    """Mean lengths of the contributions, summed over pieces; of embeddings the length of their mean."""
    part = decode_partial(layout, payload)
    lengths = [
        float(merged[p.fragment_offset : p.fragment_offset + p.numel].norm())
        if p.plain_mean
        else n / part.reach
        for p, n in zip(layout.pieces, part.norms, strict=True)
    ]
    return sum(lengths)


def _inputs(given: Sequence[MergeContribution]) -> list[Input]:
    return [
        Input(each.matter, each.tokens, each.inner_steps, mean=each.mean, votes=each.votes) for each in given
    ]


def _measured(found: Findings) -> tuple[Measured, ...]:
    return tuple(map(Measured, found.lengths, found.scores))


@contextmanager
def _as_unusable_matter() -> Iterator[None]:
    """Raise what is wrong with inputs as the world knows it."""
    try:
        yield
    except UnusableInputs as error:
        faults = {index: fault.verdict for index, fault in error.faults.items()}
        raise UnusableMatter(faults) from error
