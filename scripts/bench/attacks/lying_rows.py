"""Rows of the tables of `bench_attacks --who liars`: runs against the honest alone, and their means."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from attacks.lying_runs import ALONE, Result, Trial


class LiarRow(Struct, frozen=True, kw_only=True):
    """A run with liars, or the mean of several that differ in their seed alone."""

    attack: str
    liars: int
    of: int
    speeds: str
    data: str
    seeds: list[int]
    loss: float
    loss_honest_alone: float
    loss_ratio: float
    loss_ratio_spread: float = 0.0
    """Largest less smallest ratio of single seeds."""
    excluded_after_versions: int | None = None
    """None: none of these lies can be proved, and nobody is excluded."""
    honest_excluded: int = 0
    weighs_nothing_after_versions: int | None = None
    """Versions of a fragment after which no liar weighs more than next to nothing, for good, the most of all
    seeds; None: some do at the end."""
    honest_weigh_nothing: int = 0
    """Honest learners that weigh next to nothing in every fragment at the end, the most of all seeds."""
    honest_share_at_nothing: float = 0.0
    """Share of honest contributions that weighed next to nothing."""
    cut_liars: float = 0
    """Contributions of liars that were cut, as they were too long."""
    cut_honest: float = 0
    refused_liars: float = 0
    """Contributions of liars that were refused: copies, or of no use."""
    refused_honest: float = 0
    open_share: float | None = None
    """Share of a merge that a crowd without seats has at most; None: liars have seats."""
    token_loss_ratio: float = 1.0
    """Held-out loss at the token that `one-token` wants wrong, over that of the honest alone."""
    rest_loss_ratio: float = 1.0
    """Held-out loss at all others, over that."""
    answers: float = 0.0
    """Share of held-out samples in which the model answers the trigger."""
    tokens_ratio: float = 1.0
    """Tokens that the chains gained, over those of seats' merged work."""
    weight_share: float = 0.0
    """Liars' share of the weight of all merges."""


def results(*paths: Path) -> dict[str, Result]:
    """Read the results of earlier runs, by setting."""
    lines = [line for path in paths if path.exists() for line in path.read_text().splitlines(keepends=True)]
    found = [msgspec.json.decode(line, type=Result) for line in lines if line.endswith("\n")]
    return {result.trial.key: result for result in found}


def rows_of(trials: Iterable[Trial], done: dict[str, Result]) -> list[LiarRow]:
    """Rows of what was run, each against the honest alone of its seed."""
    rows = []
    for trial in trials:
        alone = done.get(msgspec.structs.replace(trial, attack=ALONE).key)
        made = done.get(trial.key)
        if trial.attack == ALONE or alone is None or made is None:
            continue
        if made.honest_tokens != alone.honest_tokens:
            raise SystemExit(f"{trial.key}: the honest have trained {made.honest_tokens} tokens")
        rows.append(
            LiarRow(
                attack=trial.attack,
                liars=trial.liars,
                of=trial.learners,
                speeds=trial.speeds,
                data=trial.data,
                seeds=[trial.seed],
                loss=made.loss,
                loss_honest_alone=alone.loss,
                loss_ratio=made.loss / alone.loss,
                weighs_nothing_after_versions=made.nothing_after,
                honest_weigh_nothing=made.honest_nothing,
                honest_share_at_nothing=made.honest_at_least / max(1, made.honest_sent),
                cut_liars=made.cut_liars,
                cut_honest=made.cut_honest,
                refused_liars=made.refused_liars,
                refused_honest=made.refused_honest,
                open_share=trial.open_share if trial.seatless else None,
                token_loss_ratio=made.token_loss / max(1e-9, alone.token_loss),
                rest_loss_ratio=made.rest_loss / max(1e-9, alone.rest_loss),
                answers=made.answers,
                tokens_ratio=made.tokens_ratio,
                weight_share=made.weight_share,
            )
        )
    return rows


def means_of(rows: Iterable[LiarRow]) -> list[LiarRow]:
    """Means over seeds, in the order in which lies and settings come first."""
    alike: dict[tuple[object, ...], list[LiarRow]] = defaultdict(list)
    for row in rows:
        alike[row.attack, row.liars, row.of, row.speeds, row.data, row.open_share].append(row)
    return [_mean(group) for group in alike.values()]


def _mean(rows: Sequence[LiarRow]) -> LiarRow:
    def mean(name: str) -> float:
        return float(statistics.mean(getattr(row, name) for row in rows))

    ratios = [row.loss_ratio for row in rows]
    after = [row.weighs_nothing_after_versions for row in rows]
    known = [number for number in after if number is not None]
    means = ("loss", "loss_honest_alone", "loss_ratio", "honest_share_at_nothing", *COUNTS, *AIMS)
    return msgspec.structs.replace(
        rows[0],
        seeds=[seed for row in rows for seed in row.seeds],
        loss_ratio_spread=max(ratios) - min(ratios),
        weighs_nothing_after_versions=max(known) if len(known) == len(after) else None,
        honest_weigh_nothing=max(row.honest_weigh_nothing for row in rows),
        **{name: mean(name) for name in means},
    )


COUNTS = ("cut_liars", "cut_honest", "refused_liars", "refused_honest")
AIMS = ("token_loss_ratio", "rest_loss_ratio", "answers", "tokens_ratio", "weight_share")
HEAD = (
    "lie",
    "liars, speeds, data",
    "seeds",
    "loss",
    "honest alone",
    "ratio",
    "spread",
    "liars weigh nothing after",
    "honest at nothing",
    "cut: liars, honest",
    "refused: liars, honest",
    "one token, rest",
    "answers",
    "tokens, weight",
)


def shown(rows: Sequence[LiarRow]) -> str:
    """Lay the rows out as a table."""
    lines = [HEAD, ["---"] * len(HEAD), *map(_cells, rows)]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _cells(row: LiarRow) -> list[str]:
    after = row.weighs_nothing_after_versions
    words = "–" if after is None else f"{after} versions"
    crowd = "" if row.open_share is None else f", open_share {row.open_share:g}"
    return [
        f"`{row.attack}`",
        f"{row.liars} of {row.of}, {row.speeds}, {row.data}{crowd}",
        str(len(row.seeds)),
        f"{row.loss:.3f}",
        f"{row.loss_honest_alone:.3f}",
        f"{row.loss_ratio:.3f}",
        f"{row.loss_ratio_spread:.3f}" if len(row.seeds) > 1 else "–",
        words,
        f"{row.honest_weigh_nothing}; {100 * row.honest_share_at_nothing:.1f} %",
        f"{row.cut_liars:.0f}, {row.cut_honest:.0f}",
        f"{row.refused_liars:.0f}, {row.refused_honest:.0f}",
        f"{row.token_loss_ratio:.3f}, {row.rest_loss_ratio:.3f}",
        f"{row.answers:.2f}",
        f"{row.tokens_ratio:.2f}, {row.weight_share:.2f}",
    ]
