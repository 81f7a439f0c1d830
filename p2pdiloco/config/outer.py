"""What the outer step's numbers follow from, as measured (docs/experiments.md)."""

from __future__ import annotations

LONGEST_WARMUP = 20


def momentum_warmup(merges: int) -> int:
    """Merges of a fragment over which outer momentum grows, in a run of so many: a third, at most 20."""
    return min(LONGEST_WARMUP, round(merges / 3))
