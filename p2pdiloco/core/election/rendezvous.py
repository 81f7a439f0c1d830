"""Rendezvous hashing: the order in which candidates stand for an office.

Every peer computes the same order from the same members, and a different one for every fragment and term. So
offices spread over the members and rotate by themselves, without a word exchanged (docs/protocol/election.md,
section 3).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def ranking(run: str, group: str, fragment: int, term: int, candidates: Iterable[str]) -> list[str]:
    """Rank all candidates, the first first."""

    def score(peer: str) -> bytes:
        return hashlib.sha256(f"{run}/{group}/{fragment}/{term}/{peer}".encode()).digest()

    return sorted(candidates, key=score, reverse=True)
