"""Exclusion of a liar by the members of a swarm of real nodes, as their event logs tell it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from p2pdiloco.demo.swarm import Line, of_kind


def excluded_after(logs: Mapping[str, Sequence[Line]], liars: Sequence[str], from_s: float) -> int | None:
    """Count the versions of a fragment, the most of all fragments, that honest nodes have made since `from_s`
    until the last of them had excluded the last liar. None: one of them has not."""
    last_s = from_s
    for lines in logs.values():
        for liar in liars:
            times = [line.mono for line in of_kind(lines, "excluded") if line.peer == liar]
            if not times:
                return None
            last_s = max(last_s, min(times))
    made = {
        line.version
        for lines in logs.values()
        for line in lines
        if line.is_head() and from_s <= line.mono <= last_s
    }
    return max(Counter(fragment for fragment, _ in made).values(), default=0)


def honest_excluded(logs: Mapping[str, Sequence[Line]], liars: Sequence[str]) -> int:
    """Count the members that some node excludes, and that do not lie."""
    shown = {line.peer for lines in logs.values() for line in of_kind(lines, "excluded")}
    return len(shown - set(liars))
