"""References of a round: those against whom its contributions are measured.

Identities are free, so strangers can be most of a round. Votes are not: few may win one at a time
(docs/protocol/trust.md). Where three or more of a round vote, they alone say what is usual in it; where fewer
do, all say it, as one or two are no majority of anybody.

Rules: docs/protocol/weights.md, section 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

FEWEST = 3
"""Least number of contributions of which a minority can be told from the others."""
Each = TypeVar("Each")


def references(parts: Sequence[Each], votes: Sequence[bool]) -> list[Each]:
    """Choose those that are the measure of all: those that vote, if enough do, else all."""
    voting = [part for part, votes_too in zip(parts, votes, strict=True) if votes_too]
    return voting if len(voting) >= FEWEST else list(parts)
