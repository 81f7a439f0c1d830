"""Questions that the verdicts of scenarios (`chaos --scenario`) ask of a chronicle. No processes, no clock.

All times are seconds of the machine's monotonic clock, which all processes of one machine share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from p2pdiloco.demo.swarm import Chronicle, Line

# --- who -----------------------------------------------------------------------------------------------


def split_of(names: Sequence[str], seed: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Divide the nodes into (the larger side, the smaller one): 5 and 3 of 8."""
    start = seed % len(names)
    order = (*names[start:], *names[:start])
    larger = len(names) // 2 + 1
    return order[:larger], order[larger:]


# --- when ----------------------------------------------------------------------------------------------


def first_rounds(log: Chronicle, nodes: Iterable[str], since_s: float, until_s: float) -> dict[int, float]:
    """Fragment -> when one of these nodes first published a version whose round it closed after `since_s`."""
    closed_s = {(line.node, line.version): line.mono for line in log.merges}
    found: dict[int, float] = {}
    for made in log.published:
        later = closed_s.get((made.node, made.version), since_s) > since_s
        if later and made.node in nodes and made.mono <= until_s:
            found[made.fragment] = min(made.mono, found.get(made.fragment, until_s))
    return found


def equal_at(log: Chronicle, nodes: Sequence[str], since_s: float) -> float | None:
    """Time by which all of these nodes had held one version, made after `since_s`, of every fragment.

    None: not yet. They need not hold it at one moment: heads move on while the last ones follow.
    """
    holders: dict[tuple[int, int, str], dict[str, float]] = {}
    made: set[tuple[int, int, str]] = set()
    for held in log.held:
        if held.mono > since_s:
            version = (*held.version, held.digest)
            holders.setdefault(version, {}).setdefault(held.node, held.mono)
            if held.is_made():
                made.add(version)
    whole: dict[int, float] = {}
    for version, by_node in holders.items():
        if version in made and set(nodes) <= set(by_node):
            last_s = max(by_node.values())
            whole[version[0]] = min(last_s, whole.get(version[0], last_s))
    return max(whole.values()) if len(whole) == log.fragments else None


def merged_again(log: Chronicle, again: Line) -> float | None:
    """Time from which the node's own chain contained what it sent again; None: not yet."""
    times = [
        line.mono
        for line in log.nodes[again.node].merged
        if line.fragment == again.fragment and line.mono >= again.mono and line.stamp >= again.stamp
    ]
    return min(times, default=None)


def last_resent(log: Chronicle) -> list[Line]:
    """List what nodes sent again as one contribution, because their chain was replaced by one that lacks it.

    Of every node and fragment the last one: a later switch of chains sends what is still lost again.
    """
    return list({(fork.node, fork.fragment): fork for fork in log.forks if fork.contributions}.values())


# --- how much ------------------------------------------------------------------------------------------


def trained(progress: Sequence[Line], since_s: float, until_s: float) -> int:
    """Tokens by which a learner's count grew between the last progress lines before these times."""
    before = [line.tokens_total for line in progress if line.mono <= since_s]
    after = [line.tokens_total for line in progress if line.mono <= until_s]
    return max(after, default=0) - max(before, default=0)


def chain_tokens(log: Chronicle, nodes: Iterable[str], fragment: int, at_s: float) -> int:
    """Tokens of the heaviest version of a fragment that any of these nodes held by that time."""
    held = [line for line in log.held if line.fragment == fragment and line.mono <= at_s]
    return max((line.tokens for line in held if line.node in nodes), default=0)
