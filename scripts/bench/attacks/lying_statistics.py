"""Statistics of a round's contributions that a defence can go by: lengths, and how far they agree.

    cd scripts/bench && python -m attacks.lying_statistics FILE … [--versions 1-3] [--first 0.3,1]

FILES are written by `bench_attacks.py --who liars --rounds FOLDER`. Lengths are for H inner steps: divided by
sqrt(min(1, steps / H)), over the round's median. The *agreement* of a contribution is the median of its
cosines with all others of its round, over the round's median of that. *Trust* of a learner in a fragment is
the average of its agreement, and follows from what is sent alone: nothing here changes a merge.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
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
LEAST = 1e-6
"""Least figure by which others are divided."""

Matrix = list[list[float]]


class Begins(Struct, frozen=True):
    """Trust with which everybody begins."""

    trust: float = 1.0
    rounds: float = 1 / (1 - KEEP)
    """Rounds that it is worth, above zero: the usual makes a plain moving average."""


USUAL = Begins()


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
    cosines: Tensor = units @ units.T
    return cosines


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 5) for value in values.tolist()]


class Run(Struct, frozen=True):
    """Rounds of a run."""

    name: str
    liars: list[int]
    period: int
    rounds: list[Seen]


Agreement = Callable[[Matrix, Sequence[float]], list[float]]
"""Agreement of every contribution with the others, from their cosines and the learners' weights."""
Trust = dict[tuple[int, int], list[float]]
"""Average agreement by fragment and learner, round after round."""


def with_most(cosines: Matrix, _weights: Sequence[float] = ()) -> list[float]:
    """Median cosine of each with the others."""
    count = range(len(cosines))
    return [statistics.median([cosines[i][j] for j in count if j != i] or [1.0]) for i in count]


def with_the_rest(cosines: Matrix, weights: Sequence[float]) -> list[float]:
    """Cosine of each with the weighed mean direction of the others."""
    count = range(len(cosines))
    sums = [sum(weights[j] * cosines[i][j] for j in count) for i in count]
    square = sum(weights[i] * sums[i] for i in count)
    found = []
    for i in count:
        own = weights[i] * cosines[i][i]
        rest = square - 2 * weights[i] * sums[i] + weights[i] * own
        found.append((sums[i] - own) / math.sqrt(rest) if rest > LEAST else 0.0)
    return found


def relative(values: Sequence[float]) -> list[float]:
    """Values over their median; all 1 where that is not above zero: nothing is to be told."""
    middle = statistics.median(values)
    return [value / middle for value in values] if middle > LEAST else [1.0] * len(values)


def lengths_of_h_steps(round_: Seen, period: int) -> list[float]:
    """Lengths relative to the round's median, as if all had made H inner steps."""
    made = zip(round_.lengths, round_.inner_steps, strict=True)
    return relative([length / math.sqrt(min(1.0, steps / period)) for length, steps in made])


def weight(trust: float) -> float:
    """Weight of a learner that is trusted so."""
    return min(1.0, max(0.0, (trust - NOTHING) / (FULL - NOTHING)))


def trust_of(rounds: Iterable[Seen], agreement: Agreement = with_most, begins: Begins = USUAL) -> Trust:
    """Follow the trust in every learner."""
    found: Trust = defaultdict(list)
    state: dict[tuple[int, int], tuple[float, float]] = {}
    for round_ in rounds:
        keys = [(round_.fragment, learner) for learner in round_.learners]
        sums = [state.get(key, (begins.trust * begins.rounds, begins.rounds)) for key in keys]
        weights = [weight(total / count) for total, count in sums]
        values = relative(agreement(round_.cosines, weights))
        for key, (total, count), value in zip(keys, sums, values, strict=True):
            total, count = KEEP * total + min(1.0, max(-1.0, value)), KEEP * count + 1
            state[key] = total, count
            found[key].append(total / count)
    return dict(found)


def quantiles(values: Iterable[float]) -> str:
    """Fifth, fiftieth and ninety-fifth percentile."""
    ranked = sorted(values)
    last = len(ranked) - 1
    shown = (f"{ranked[round(share * last)]:.2f}" for share in (0.05, 0.5, 0.95))
    return " ".join(shown) if ranked else "-"


def values_of(
    run: Run, liars: bool, figure: Callable[[Seen], Sequence[float]], after: int = 0
) -> Iterator[float]:
    """A figure of all contributions of liars, or of the honest, to versions after that one."""
    for round_ in run.rounds:
        if round_.number > after:
            pairs = zip(round_.learners, figure(round_), strict=True)
            yield from (value for learner, value in pairs if (learner in run.liars) == liars)


def cosines_of(run: Run, liars: int) -> Iterator[float]:
    """Cosines of all pairs of a round in which so many are liars."""
    for round_ in run.rounds:
        lying = [learner in run.liars for learner in round_.learners]
        for i in range(len(lying)):
            yield from (round_.cosines[i][j] for j in range(i) if lying[i] + lying[j] == liars)


def trusted(run: Run, agreement: Agreement, begins: Begins = USUAL) -> list[str]:
    """Cells on trust: the least that an honest learner ever has, liars' at the end, and the versions until
    liars weigh half and nothing: until all do, in all fragments."""
    trust = trust_of(run.rounds, agreement, begins)
    honest = [value for (_, learner), values in trust.items() if learner not in run.liars for value in values]
    liars = [values for (_, learner), values in trust.items() if learner in run.liars]
    if not liars:
        return [f"{min(honest):.2f}", "", ""]

    def versions(most: float) -> str:
        found = [next((n + 1 for n, v in enumerate(values) if weight(v) <= most), 0) for values in liars]
        return str(max(found)) if all(found) else "never"

    last = statistics.mean(values[-1] for values in liars)
    return [f"{min(honest):.2f}", f"{last:.2f}", f"{versions(0.5)}, {versions(0.0)}"]


def row(run: Run, begins: Begins = USUAL) -> list[str]:
    """Cells of a run."""
    cells = [run.name, *(quantiles(cosines_of(run, liars)) for liars in (0, 1, 2))]
    for figure, after in (
        (lambda seen_: lengths_of_h_steps(seen_, run.period), 0),
        (lambda seen_: relative(with_most(seen_.cosines)), 0),
        (lambda seen_: seen_.momentum, 1),
    ):
        cells += [quantiles(values_of(run, liars, figure, after)) for liars in (False, True)]
    return [*cells, *trusted(run, with_most, begins), *trusted(run, with_the_rest, begins)]


HEAD = [
    "run",
    *("cosines hh", "hl", "ll"),
    *("lengths h", "l", "agreement h", "l", "with momentum h", "l"),
    *("trust h, least", "l, end", "versions to half, none"),
    *("with the rest: trust h, least", "l, end", "versions to half, none"),
]


def main() -> None:
    """Print a table, a line for each run. h: honest, l: liars."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--versions", metavar="FIRST-LAST", default="1-1000000")
    parser.add_argument(
        "--first", metavar="TRUST,ROUNDS", help="the first trust, and rounds that it is worth"
    )
    chosen = parser.parse_args()
    first, last = (int(word) for word in chosen.versions.split("-"))
    begins = Begins(*map(float, chosen.first.split(","))) if chosen.first else USUAL
    print("| " + " | ".join(HEAD) + " |\n|" + "---|" * len(HEAD))
    for file in chosen.files:
        run = msgspec.json.decode(file.read_bytes(), type=Run)
        rounds = [round_ for round_ in run.rounds if first <= round_.number <= last]
        print(
            "| " + " | ".join(row(msgspec.structs.replace(run, rounds=rounds), begins)) + " |",
            flush=True,
        )


if __name__ == "__main__":
    main()
