"""Statistics of a round's contributions that a defence can go by: lengths, and how far they agree.

    python -m attacks.lying_statistics FILE ...     # of `bench_attacks.py --who liars --rounds FOLDER`

Lengths are for H inner steps: divided by sqrt(min(1, steps / H)). The *agreement* of a contribution is the
median of its cosines with all others of its round.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from torch import Tensor

from attacks.lying_swarm import Round

SAMPLES = (1 << 12, 1 << 16, 1 << 18)
"""Elements of samples on which cosines are worked out as well, where a fragment has twice as many."""
KEEP = 0.9
"""Share of an average over rounds that the next round leaves."""
FULL, NOTHING = 0.5, 0.1
"""Average of the relative agreement from which on a learner weighs in full, and below which it has no
weight."""

Matrix = list[list[float]]


class Seen(Struct, frozen=True):
    """Figures of a round."""

    fragment: int
    number: int
    learners: list[int]
    inner_steps: list[int]
    lengths: list[float]
    momentum: list[float]
    """Cosine of every contribution with the outer momentum."""
    cosines: Matrix
    by_piece: Matrix
    """Cosines of the pieces of tensors, their mean by number of elements."""
    sampled: dict[int, Matrix]
    """Cosines on samples of so many elements."""


def seen(round_: Round) -> Seen:
    """Look at a round."""
    deltas = torch.stack([one.delta for one in round_.sent])
    lengths = torch.linalg.vector_norm(deltas, dim=1)
    units = deltas / lengths.clamp_min(1e-30)[:, None]
    momentum = units @ round_.momentum / max(float(round_.momentum.norm()), 1e-30)
    generator = torch.Generator().manual_seed((round_.fragment << 32) + round_.number)
    sampled = {}
    for size in SAMPLES:
        if 2 * size <= deltas.shape[1]:
            chosen = torch.randint(deltas.shape[1], (size,), generator=generator)
            sampled[size] = [_rounded(row) for row in _cosines(deltas[:, chosen])]
    by_piece = torch.zeros(len(deltas), len(deltas))
    for piece in round_.layout.pieces:
        part = deltas[:, piece.fragment_offset : piece.fragment_offset + piece.numel]
        by_piece += _cosines(part) * (piece.numel / round_.layout.numel)
    return Seen(
        round_.fragment,
        round_.number,
        [one.learner for one in round_.sent],
        [one.inner_steps for one in round_.sent],
        [float(f"{length:.5g}") for length in lengths.tolist()],
        _rounded(momentum),
        [_rounded(row) for row in _cosines(deltas)],
        [_rounded(row) for row in by_piece],
        sampled,
    )


def _cosines(deltas: Tensor) -> Tensor:
    units = deltas / torch.linalg.vector_norm(deltas, dim=1).clamp_min(1e-30)[:, None]
    return units @ units.T


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 5) for value in values.tolist()]


def agreements(cosines: Matrix) -> list[float]:
    """Agreement of each contribution with the others."""
    count = range(len(cosines))
    return [statistics.median([cosines[i][j] for j in count if j != i] or [1.0]) for i in count]


def relative(values: Sequence[float]) -> list[float]:
    """Values over their median; all 1 where that is not above zero: nothing is to be told."""
    middle = statistics.median(values)
    return [value / middle for value in values] if middle > 0 else [1.0] * len(values)


def lengths_of_h_steps(round_: Seen, period: int) -> list[float]:
    """Lengths relative to the round's median, as if all had made H inner steps."""
    made = zip(round_.lengths, round_.inner_steps, strict=True)
    return relative([length / math.sqrt(min(1.0, steps / period)) for length, steps in made])


def averages(
    rounds: Iterable[Seen], figure: Mapping[int, Sequence[float]] | None = None
) -> dict[int, list[float]]:
    """Average of every learner's relative agreement, round after round, over all fragments' rounds of their
    own: the least of fragments is not taken, all follow one another. `figure`: other values, by position."""
    found: dict[int, list[float]] = defaultdict(list)
    state: dict[tuple[int, int], float] = {}
    for position, round_ in enumerate(rounds):
        values = figure[position] if figure is not None else relative(agreements(round_.cosines))
        for learner, value in zip(round_.learners, values, strict=True):
            key = round_.fragment, learner
            old = state.get(key, 1.0)
            state[key] = KEEP * old + (1 - KEEP) * min(1.0, max(-1.0, value))
            found[learner].append(state[key])
    return dict(found)


def weight(average: float) -> float:
    """Weight of a learner whose agreement is so on the average."""
    return min(1.0, max(0.0, (average - NOTHING) / (FULL - NOTHING)))


class Run(Struct, frozen=True):
    """Rounds of a run."""

    name: str
    liars: list[int]
    period: int
    rounds: list[Seen]


def quantiles(values: Sequence[float]) -> str:
    """Fifth, fiftieth and ninety-fifth percentile."""
    if not values:
        return "-"
    ranked = sorted(values)
    last = len(ranked) - 1
    return " ".join(f"{ranked[round(share * last)]:.2f}" for share in (0.05, 0.5, 0.95))


def row(run: Run) -> list[str]:
    """Figures of a run, honest learners' and liars', as cells of a table."""
    lying = set(run.liars)
    lengths: tuple[list[float], list[float]] = [], []
    agreeing: tuple[list[float], list[float]] = [], []
    momentum: tuple[list[float], list[float]] = [], []
    pairs: dict[int, list[float]] = {0: [], 1: [], 2: []}
    for round_ in run.rounds:
        of = [learner in lying for learner in round_.learners]
        figures = (
            (lengths, lengths_of_h_steps(round_, run.period)),
            (agreeing, relative(agreements(round_.cosines))),
            (momentum, round_.momentum if round_.number > 2 else ()),
        )
        for kept, values in figures:
            for lies, value in zip(of, values, strict=False):
                kept[lies].append(value)
        for i in range(len(of)):
            for j in range(i):
                pairs[of[i] + of[j]].append(round_.cosines[i][j])
    ends = averages(run.rounds)
    last = {learner: statistics.mean(values[-8:]) for learner, values in ends.items()}
    honest = [weight(value) for learner, value in last.items() if learner not in lying]
    liars = [weight(value) for learner, value in last.items() if learner in lying]
    least = min(min(values) for learner, values in ends.items() if learner not in lying)
    cells = [run.name]
    cells += [quantiles(pairs[kind]) for kind in (0, 1, 2)]
    cells += [quantiles(values) for kept in (lengths, agreeing, momentum) for values in kept]
    cells += [f"{min(honest):.2f}", f"{least:.2f}", f"{max(liars):.2f}" if liars else "-"]
    return cells


HEAD = [
    "run",
    *("cos hh", "cos hl", "cos ll"),
    *("length h", "length l", "agreement h", "agreement l", "momentum h", "momentum l"),
    *("weight h, least", "average h, least ever", "weight l, most"),
]


def main(files: Sequence[str]) -> None:
    """Print a table, a line for each run."""
    print("| " + " | ".join(HEAD) + " |")
    print("|" + "---|" * len(HEAD))
    for file in files:
        run = msgspec.json.decode(Path(file).read_bytes(), type=Run)
        print("| " + " | ".join(row(run)) + " |", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
