"""Vectors of a world in which some learners lie about their work.

A liar trains as honest learners do, and its work counts as trained. Before it sends a contribution it waits
for a moment, and then knows all that the others have copied out of that fragment, which is more than any liar
can know: mostly they have done so in this round.
"""

from __future__ import annotations

import math
import zlib

import numpy as np
import torch
from msgspec import Struct
from torch import Tensor

from p2pdiloco.config.presets import USUAL
from p2pdiloco.core.api.types import MergeLimits
from p2pdiloco.tensors.codecs import codec
from p2pdiloco_lab.simulation.lineage import FalseWork, Losses, MergeContribution, MergeOutcome
from p2pdiloco_lab.simulation.seed_plan import WorldPlan, random_stream
from p2pdiloco_lab.vectors import LARGE, WHOLE, MarkovChain, Share, Size, Vectors
from worlds.aims import rows_of
from worlds.kinds import Lie
from worlds.telling import Known, tell

CODEC = "int8"
COMMON_SEED = 77
TOKEN = 5
"""Token that `one-token` wants wrong."""
TABLES = frozenset({"embedding", "output", "bias"})
"""Tensors with a row for every token."""
PARTED_SHARE = 0.5
"""Share of the contexts that a learner sees where data are different."""
STEPS_KEPT = 16
WAITS_S = 0.1
"""Time for which a liar looks at what others send: less than a round waits for stragglers."""


class Work(Struct):
    """Honest work of a learner in one fragment: the first, and the newest two."""

    first: Tensor
    last: Tensor
    before: Tensor | None = None


class LyingVectors(Vectors):
    """See the module. Codec, outer optimizer and size are those of usual runs, not drawn."""

    waits_s = WAITS_S

    def __init__(
        self,
        plan: WorldPlan,
        lie: Lie | None = None,
        liars: frozenset[str] = frozenset(),
        parted: bool = False,
        size: Size = LARGE,
        turns: float = 0.0,
    ) -> None:
        """`parted`: each learner sees a part of the contexts only. `turns`: angle by which the data turn with
        each version, in radians."""
        super().__init__(plan, size, CODEC, USUAL)
        self._turns, self._newest = turns, 0
        self.liars = liars if lie is not None else frozenset()
        self._lie, self._parted = lie, parted
        self._work: list[dict[str, Work]] = [{} for _ in self.layouts]
        self._rounds: dict[tuple[str, int], int] = {}
        self._stepped: dict[tuple[int, int, bytes, bytes, int], bytes] = {}
        self._radius = [math.inf] * len(self.layouts)
        """Length beyond which contributions were cut last."""
        self._merged: dict[int, Tensor] = {}
        """Update of each fragment that was merged last."""
        self._rows = [rows_of(layout, size.specs, TOKEN, TABLES) for layout in self.layouts]
        self.token_loss = math.nan
        """Loss where the token of `one-token` comes next, when losses were asked for last."""

    def share_of(self, peer: str) -> Share:
        contexts = targets = None
        tokens = self.size.tokens
        if self._parted:
            seen = sorted(
                random_stream(self.seed, f"data/{peer}").sample(range(tokens), round(PARTED_SHARE * tokens))
            )
            contexts = np.array(seen)
        if self._lie is Lie.LABELS and peer in self.liars:
            targets = np.random.default_rng([self.seed, COMMON_SEED]).permutation(tokens)
        return WHOLE if contexts is None and targets is None else Share(contexts, targets)

    def copied(self, peer: str, fragment: int, payload: bytes) -> None:
        if not self.liars:
            return
        delta, known = self.decoded(fragment, payload), self._work[fragment].get(peer)
        if known is None:
            self._work[fragment][peer] = Work(delta, delta)
        else:
            known.before, known.last = known.last, delta

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
        self._radius[fragment] = limits.longest
        if self._turns and number > self._newest:
            self._newest = number
            self.chain = MarkovChain.drawn(self.seed, self.size.tokens, self._turns * number)
        made = super().merge(fragment, number, state, inputs, partials, longest_steps, limits, seed)
        if self.liars:
            self._merged[fragment] = torch.empty(self.layouts[fragment].numel)
            codec(CODEC).decode(made.matter, self._merged[fragment])
        return made

    def losses(self, states: list[bytes]) -> Losses | None:
        self.token_loss = self.chain.loss_at(self.params_of(states), TOKEN)
        return super().losses(states)

    def outer_step(
        self, fragment: int, number: int, state: bytes, update: bytes, longest_steps: int
    ) -> bytes:
        """Work it out once for all who apply that update to that state."""
        key = fragment, number, state, update, longest_steps
        if key not in self._stepped:
            self._stepped[key] = super().outer_step(fragment, number, state, update, longest_steps)
            for old in list(self._stepped)[:-STEPS_KEPT]:
                del self._stepped[old]
        return self._stepped[key]

    def told(self, peer: str, fragment: int, matter: bytes) -> FalseWork:
        assert self._lie is not None
        work = self._work[fragment]
        mine = work[peer]
        own = self.decoded(fragment, matter)
        round_ = self._rounds[peer, fragment] = self._rounds.get((peer, fragment), 0) + 1
        honest = [each for other, each in sorted(work.items()) if other not in self.liars]
        known = Known(
            own=own,
            liars=[work[other].last for other in sorted(self.liars & work.keys())],
            honest=[each.last for each in honest],
            before=[each.before for each in honest if each.before is not None],
            first=mine.first if round_ > 1 else None,
            last=mine.before,
            merged=self._merged.get(fragment),
            rows=self._rows[fragment],
            radius=self._radius[fragment],
            round=round_,
            seed=zlib.crc32(peer.encode()),
            common_seed=COMMON_SEED + fragment,
        )
        told = tell(self._lie, known)
        return FalseWork(bytes(codec(CODEC).encode(told.delta.clone())), told.work)
