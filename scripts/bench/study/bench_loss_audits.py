#!/usr/bin/env python3
"""Findings of loss audits: of a swarm with a liar an honest learner measures every contribution of it.

Learners, merges, lies and measurements are production's, in virtual time (`attacks.lying_swarm`). In every
round an honest learner that is drawn measures the liar's contribution and an honest one, against its own. The
second batch is of what that learner trained on last, or, with --shares unknown, of what the measuring one
did.

Rows: `lie`, `who` ("liar" or "honest"), `measured` (of so many), `ratio` and `deviation`, `found` (what is
shown first) and `audits` until then, `doubt` (the most that ever spoke against one of them).

    python scripts/bench/study/bench_loss_audits.py [--lies flip,noise,none] [--data different] [--json FILE]
"""

from __future__ import annotations

import random
import statistics
import sys
from collections import defaultdict, deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # scripts/bench: what its studies share

import numpy as np
import torch

from attacks.lying_runs import CALM, Trial
from attacks.lying_swarm import Lies, LyingSwarm, Round
from benchkit import arguments, finish
from p2pdiloco.core.audit_state import Accounts, ratio_of
from p2pdiloco.learner.loop import gains
from p2pdiloco.tasks.initial import named_parameters
from p2pdiloco.tasks.task import Samples, Shards
from p2pdiloco.tensors.layout import scatter
from p2pdiloco.tensors.vault import Appraisable
from study.virtual import Circumstances
from worlds.kinds import Lie

if TYPE_CHECKING:
    from p2pdiloco.tasks.task import Batch

LIES = "none,flip,turning,noise,zero,stale-first,stale-last,copycat,labels,alie,min-max,drift,knows-trust"
TOKENS = 512
"""Tokens of a batch, as production measures here."""


class Remembered:
    """Samples that remember which of them were taken last."""

    def __init__(self, samples: Samples, steps: int) -> None:
        self._samples = samples
        self.last: deque[Batch] = deque(maxlen=steps)

    def __len__(self) -> int:
        return len(self._samples)

    def batch(self, indices: np.ndarray) -> Batch:
        """Take the samples with these indices."""
        found = self._samples.batch(indices)
        self.last.append(found)
        return found


class AuditedSwarm(LyingSwarm):
    """Swarm in which contributions are measured in every round."""

    def __init__(self, trial: Trial, shares: bool) -> None:
        setting = trial.setting()
        world = Circumstances(
            delay=setting.delay,
            grace=setting.grace,
            speeds=trial.each_speed,
            largest_share=setting.manifest().weight.largest_share,
            seed=trial.seed,
        )
        lie = None if trial.attack == CALM else Lie(trial.attack)
        liars = frozenset[int]() if lie is None else trial.lying
        self._read: dict[int, Remembered] = {}
        self._inner_steps, self._shares, self._liars = trial.inner_steps, shares, liars
        self.ratios: dict[str, list[tuple[int, float | None]]] = defaultdict(list)
        """Measurements by kind of learner: (learner, ratio)."""
        lies = Lies(lie=lie, liars=liars, parted=trial.data == "different")
        super().__init__(setting.manifest(), trial.learners, world, trial.heldout_tokens, lies, self._audit)
        self._draws, self._numbers = random.Random(trial.seed), np.random.default_rng(trial.seed)
        self._other_model = self.task.model()

    def samples_of(self, index: int) -> Samples | Shards:
        """Find what a learner reads, which is remembered."""
        samples = super().samples_of(index)
        assert not isinstance(samples, Shards)
        self._read[index] = Remembered(samples, self._inner_steps)
        return self._read[index]

    def _audit(self, round_: Round) -> None:
        """Measure the liar's contribution and an honest one."""
        sent = {each.learner: each.delta for each in round_.sent}
        honest = [index for index in sent if index not in self._liars]
        if len(honest) < 2:
            return
        auditor, other = self._draws.sample(honest, 2)
        for who in [other, *(index for index in sent if index in self._liars)]:
            parameters = named_parameters(self._other_model)
            for layout in self.layouts:
                scatter(self.global_state.theta(layout.index), layout, parameters)
            start = self.global_state.theta(round_.fragment).clone()
            given = Appraisable(start, sent[who], sent[auditor])
            batches = [self._heldout_batch(), self._batch_of(who if self._shares else auditor)]
            found = gains(self.task, self._other_model, round_.layout, given, batches)
            kind = "liar" if who in self._liars else "honest"
            self.ratios[kind].append((who, ratio_of(*found)))

    def _heldout_batch(self) -> Batch:
        count = TOKENS // self.task.tokens_per_sample
        return self.data.heldout.batch(self._numbers.integers(0, len(self.data.heldout), count))

    def _batch_of(self, index: int) -> Batch:
        """Draw some of what that learner trained on last."""
        columns = [torch.cat(column) for column in zip(*self._read[index].last, strict=True)]
        drawn = self._numbers.permutation(len(columns[0]))[: TOKENS // self.task.tokens_per_sample]
        return tuple(column[torch.from_numpy(drawn)] for column in columns)


def row(lie: str, who: str, measured: list[tuple[int, float | None]], shares: bool) -> dict[str, Any]:
    """Say what these measurements come to."""
    accounts, found, audits, doubt = Accounts(), None, None, 1.0
    ratios = [ratio for _, ratio in measured if ratio is not None]
    for count, (learner, ratio) in enumerate(measured, 1):
        if ratio is None:
            continue
        shown = accounts.add(str(learner), ratio, shares)
        doubt = max(doubt, accounts.doubt(str(learner)))
        if shown is not None and found is None:
            found, audits = shown.value, count
    return {
        "lie": lie,
        "who": who,
        "measured": len(ratios),
        "of": len(measured),
        "ratio": statistics.mean(ratios) if ratios else None,
        "deviation": statistics.pstdev(ratios) if ratios else None,
        "found": found,
        "audits": audits,
        "doubt": doubt,
    }


def main() -> int:
    """Run and print."""
    parser = arguments(__doc__ or "")
    parser.add_argument("--lies", default=LIES, help="lies, with commas; none: everybody is honest")
    parser.add_argument("--data", choices=("equal", "different"), default="equal")
    parser.add_argument("--speeds", choices=("equal", "spread"), default="equal")
    parser.add_argument("--shares", choices=("known", "unknown"), default="known")
    parser.add_argument("--learners", type=int, default=5, help="one of them lies")
    parser.add_argument("--steps", type=int, default=240, help="inner steps of the fastest learner")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for lie in options.lies.split(","):
        trial = Trial(
            attack=lie,
            liars=1,
            learners=options.learners,
            steps=options.steps,
            seed=options.seed,
            speeds=options.speeds,
            data=options.data,
        )
        shares = options.shares == "known"
        swarm = AuditedSwarm(trial, shares)
        try:
            swarm.play(options.steps, options.steps)
        finally:
            swarm.close()
        for who, measured in sorted(swarm.ratios.items()):
            rows.append(row(lie, who, measured, shares))
            print(" ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    finish("loss-audits", {"rows": rows}, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
