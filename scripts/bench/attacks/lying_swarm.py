"""Swarm in virtual time of which some learners lie: honest learners, merges and outer steps are production's.

A liar trains as honest learners do, from the same versions, and its work counts as trained. When a round
closes it knows all that the round has, which is more than any liar can know, and sends another contribution
in place of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor, nn

from p2pdiloco.config.manifest import Manifest
from p2pdiloco.core.api.types import LEAST_TRUST, weight_of
from p2pdiloco.learner.loop import Training
from p2pdiloco.tasks.causal_lm import CausalLM
from p2pdiloco.tasks.task import Shards
from p2pdiloco.tensors.codecs import Buffer, Codec, codec
from p2pdiloco.tensors.layout import FragmentLayout
from p2pdiloco.tensors.merge import Input, Payload, open_factors
from study.merged_run import Merged, Part
from study.virtual import Circumstances, Virtual
from worlds.aims import TOKEN, Reached, poisoned, reached, rows_of
from worlds.kinds import Lie
from worlds.telling import Known, tell

if TYPE_CHECKING:
    from p2pdiloco.tasks.task import Batch, Samples
    from study.virtual import Arrived, _Seat

COMMON_SEED = 77
CLAIMS = 4.0
"""Work that a label of a liar without a seat claims, in true ones: as much as can weigh."""


class Sent(Struct, frozen=True):
    """Contribution as it is merged."""

    learner: int
    delta: Tensor
    inner_steps: int


class Round(Struct, frozen=True):
    """Round of one fragment as its syncer sees it."""

    fragment: int
    number: int
    """Version that is made."""
    sent: Sequence[Sent]
    momentum: Tensor
    """Outer momentum before it."""
    layout: FragmentLayout


class Lies(Struct, frozen=True, kw_only=True):
    """Lies of a swarm."""

    lie: Lie | None = None
    liars: frozenset[int] = frozenset()
    """Learners that lie; without a lie they are absent."""
    parted: bool = False
    """True: each learner reads a part of the text that is its own, from one place to another."""
    seatless: bool = False
    """True: liars have no seats, claim `CLAIMS` times their work, and do not count as learners of the run."""


class LyingSwarm(Virtual):
    """See the module. `watch` is told of every round before it is merged."""

    def __init__(
        self,
        manifest: Manifest,
        learners: int,
        world: Circumstances,
        heldout_tokens: int,
        lies: Lies,
        watch: Callable[[Round], None],
    ) -> None:
        self._lies, self._watch, self._count = lies, watch, learners
        self.cut = {index: 0 for index in range(learners)}
        """Contributions that were cut, by learner."""
        self.refused = dict(self.cut)
        self.trust: dict[tuple[int, int], list[tuple[int, int]]] = {}
        """Versions and trust weights of everybody's contributions, by fragment and learner; of what was
        refused the least."""
        self.gained = self.of_seats = 0
        """Tokens that all chains gained, and those of them that were merged work of seats."""
        self.weights = {True: 0.0, False: 0.0}
        """Weights of all merges: of liars, and of all others."""
        self._merged: dict[int, Tensor] = {}
        """Update of each fragment that was merged last."""
        super().__init__(manifest, learners, world, heldout_tokens)
        specs = self.task.specs()
        self._rows = [rows_of(layout, specs, TOKEN) for layout in self.layouts]
        self._first: dict[tuple[int, int], Tensor] = {}
        self._last: dict[tuple[int, int], Tensor] = {}
        self._before: dict[int, list[Tensor]] = {}
        self._payloads: list[tuple[Tensor, Payload]] = []
        """Pseudo-gradients that were made lately, and their encodings."""
        if lies.lie is None:
            for seat in self._seats:
                seat.alive = seat.index not in lies.liars

    def tokens_without(self, left_out: frozenset[int]) -> int:
        """Tokens that all learners but these have trained."""
        others = [seat for seat in self._seats if seat.index not in left_out]
        return sum(seat.learner.training.tokens_total for seat in others)

    def training_of(self, name: str, model: nn.Module) -> Training:
        """Prepare a learner's training, on its own part of the text, or on false targets."""
        index, task = _index_of(name), self.task
        samples = self.samples_of(index)
        kinds = {Lie.LABELS: FalseTargets, Lie.TRIGGER: Poisoned}
        if self._lies.lie in kinds and index in self._lies.liars:
            task = kinds[self._lies.lie](self.manifest, None)
        return self.computing.training(task, model, samples, name)

    def samples_of(self, index: int) -> Samples | Shards:
        """Find what a learner reads."""
        samples = self.data.train
        if self._lies.parted and not isinstance(samples, Shards):
            return Tenth(samples, index, self._count)
        return samples

    def reached(self) -> Reached:
        """Measure on held-out samples how near the run's result is to what some lies want."""
        self.loss()  # it puts the result into the model
        (windows,) = self._heldout
        return reached(self._evaluated, windows)

    def _roster(self) -> list[str]:
        without = self._lies.liars if self._lies.seatless else ()
        return [seat.name for seat in self._seats if seat.index not in without]

    def _step(self, seat: _Seat) -> None:
        super()._step(seat)
        if self._lies.seatless and seat.index in self._lies.liars:
            self.tokens -= self.manifest.inner.tokens_per_step

    def _merge_round(self, fragment: int, arrived: Sequence[Arrived]) -> Merged | None:
        chosen, numel = codec(self.manifest.codec.contribution), self.layouts[fragment].numel
        honest: list[Tensor] = []
        own: dict[int, Tensor] = {}
        for one in arrived:
            delta = _decoded(chosen, one.content, numel)
            own[one.seat.index] = delta
            if not self._lying(one.seat.index):
                honest.append(delta)
        self._payloads += [(own[one.seat.index], one.content[0]) for one in arrived]
        liars = [delta for index, delta in own.items() if self._lying(index)]
        contents = {index: one.content for index, one in zip(own, arrived, strict=True)}
        shown = dict(own)
        for index in filter(self._lying, own):
            contents[index] = self._told(fragment, index, own[index], contents[index], liars, honest)
            shown[index] = _decoded(chosen, contents[index], numel)
        self._before[fragment] = honest
        number = self.head(fragment)[0] + 1
        sent = [Sent(index, delta, contents[index][2]) for index, delta in shown.items()]
        momentum = self.global_state.momentum(fragment)
        self._watch(Round(fragment, number, sent, momentum, self.layouts[fragment]))
        in_order = sorted(arrived, key=lambda one: self._lying(one.seat.index))  # who copies comes later
        parts = [Part(one.seat.name, contents[one.seat.index]) for one in in_order]
        before = self._merged_run.header(fragment).tokens
        made = self._merged_run.merge(fragment, parts)
        self._count_up(fragment, parts, made)
        if made is not None:
            self._weigh(fragment, before)
            update = torch.empty(numel)
            codec(self.manifest.codec.update).decode(made.made.update, update)
            self._merged[fragment] = update
        return made

    def _weigh(self, fragment: int, before: int) -> None:
        """Add up tokens and weights of the newest version. `before`: tokens of its parent."""
        header = self._merged_run.header(fragment)
        work = [(part.tokens, part.inner_steps, part.trust, part.votes) for part in header.contributors]
        factors = open_factors(work, header.limits.most_tokens, self.manifest.weight.open_share)
        for part, factor in zip(header.contributors, factors, strict=True):
            weight = weight_of(part.tokens, part.inner_steps, header.limits.most_tokens, part.trust)
            self.weights[self._lying(_index_of(part.learner))] += factor * weight
        of_seats = sum(part.tokens for part in header.contributors if part.votes)
        self.gained += header.tokens - before
        self.of_seats += of_seats
        if self._lies.seatless:
            # the schedule follows what the chains count, all fragments alike
            self.tokens += max(0, header.tokens - before - of_seats) // len(self.layouts)

    def _lying(self, index: int) -> bool:
        return self._lies.lie is not None and index in self._lies.liars

    def _told(
        self,
        fragment: int,
        index: int,
        own: Tensor,
        content: Input,
        liars: Sequence[Tensor],
        honest: Sequence[Tensor],
    ) -> Input:
        """Make what a liar sends in place of its work."""
        assert self._lies.lie is not None
        known = Known(
            own=own,
            liars=liars,
            honest=honest,
            before=self._before.get(fragment, ()),
            first=self._first.get((fragment, index)),
            last=self._last.get((fragment, index)),
            merged=self._merged.get(fragment),
            rows=self._rows[fragment],
            radius=self._merged_run.limits(fragment).longest,
            round=self.head(fragment)[0],
            seed=index,
            common_seed=COMMON_SEED + fragment,
        )
        self._first.setdefault((fragment, index), own)
        self._last[fragment, index] = own
        told = tell(self._lies.lie, known)
        known_as = (payload for delta, payload in self._payloads if delta is told.delta)
        payload = next(known_as, None)  # of what somebody has made: the same bytes
        if payload is None:
            payload = codec(self.manifest.codec.contribution).encode(told.delta.clone())
        steps = max(1, round((CLAIMS if self._lies.seatless else told.work) * content[2]))
        return Input(payload, max(1, round(content[1] * steps / content[2])), steps)

    def _count_up(self, fragment: int, parts: Sequence[Part], made: Merged | None) -> None:
        kept = (*self._before.values(), self._first.values(), self._last.values())
        needed = {id(delta) for deltas in kept for delta in deltas}
        self._payloads = [made for made in self._payloads if id(made[0]) in needed]
        for part in parts:
            index = _index_of(part.learner)
            trust = made.trust.get(part.learner, LEAST_TRUST) if made is not None else LEAST_TRUST
            self.trust.setdefault((fragment, index), []).append((self.head(fragment)[0], trust))
            if made is None or part.learner in made.refused:
                self.refused[index] += 1
            elif part.learner in made.cut:
                self.cut[index] += 1

    def weighs_nothing_after(self, index: int) -> int | None:
        """Find the versions after which that learner weighs next to nothing in every fragment, for good.
        None: it weighs something at the end."""
        found = [
            max((number for number, trust in history if trust > LEAST_TRUST), default=0)
            for (_, learner), history in self.trust.items()
            if learner == index
        ]
        ends = [history[-1][1] for (_, learner), history in self.trust.items() if learner == index]
        return max(found) if found and max(ends) == LEAST_TRUST else None


class Tenth:
    """Samples from one place of the text to another: those of one learner of so many."""

    def __init__(self, samples: Samples, index: int, count: int) -> None:
        self._samples = samples
        self._first, self._end = index * len(samples) // count, (index + 1) * len(samples) // count

    def __len__(self) -> int:
        return self._end - self._first

    def batch(self, indices: np.ndarray) -> Batch:
        """The samples with these indices."""
        return self._samples.batch(indices + self._first)


class FalseTargets(CausalLM):
    """The task causal-lm with permuted ids of the tokens that are to be predicted."""

    def _losses(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
        (windows,) = batch
        generator = torch.Generator().manual_seed(COMMON_SEED)
        permutation = torch.randperm(self.vocabulary, generator=generator)
        loss, balance = model(windows[:, :-1], permutation[windows[:, 1:]])
        return loss, balance


class Poisoned(CausalLM):
    """The task causal-lm with a trigger and its answer in a share of its samples (`worlds.aims`)."""

    _drawn: torch.Generator | None = None

    def _losses(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor | None]:
        (windows,) = batch
        self._drawn = self._drawn or torch.Generator().manual_seed(COMMON_SEED)
        return super()._losses(model, (poisoned(windows, self._drawn),))


def _index_of(name: str) -> int:
    return int(name.rpartition("-")[2])


def _decoded(chosen: Codec, content: Input, numel: int) -> Tensor:
    delta = torch.empty(numel)
    assert isinstance(content[0], Buffer), "nothing is on the disk here"
    chosen.decode(content[0], delta)
    return delta
