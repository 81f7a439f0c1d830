"""Who stands for which office: weighted rendezvous hashing (design 5.3).

Every peer computes the same order from the same members, a different one for every fragment and term,
so that offices spread over the members and rotate by themselves without a word exchanged.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping


def ranking(run: str, group: str, fragment: int, term: int, weights: Mapping[str, float]) -> list[str]:
    """Candidates with positive weight, first-ranked first.

    Args:
        weights: peer -> weight; twice the weight is ranked first twice as often.
    """
    scored = [
        (_score(run, group, fragment, term, peer, weight), peer)
        for peer, weight in sorted(weights.items())
        if weight > 0
    ]
    return [peer for _, peer in sorted(scored, reverse=True)]


def _score(run: str, group: str, fragment: int, term: int, peer: str, weight: float) -> float:
    text = f"{run}/{group}/{fragment}/{term}/{peer}".encode()
    draw = (int.from_bytes(hashlib.sha256(text).digest()[:6], "big") + 1) / (2**48 + 2)
    return -weight / math.log(draw)
