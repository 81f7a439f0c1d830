"""The verdicts on the scenarios of `p2pdiloco chaos`. Pure: no processes, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from msgspec import Struct

from p2pdiloco_lab.chaos.facts import Facts
from p2pdiloco_lab.chaos.scenarios.story import (
    chain_tokens,
    equal_at,
    first_rounds,
    last_resent,
    merged_again,
    trained,
)


class Survived(Struct, kw_only=True, frozen=True):
    """report.json of `survivor`. Durations in seconds; what did not happen is null."""

    scenario: str = "survivor"
    nodes: int
    min_step_s: float = 0.0
    """Least time of an inner step; 0: as short as may be."""
    survivor: str
    next_version_s: float | None
    """Time from the kill to the first version of any fragment whose round the survivor closed after it."""
    all_fragments_s: float | None
    """Time from the kill to such a version of the slowest fragment."""
    versions_alone: int
    """Versions that the survivor made until the others were started again."""
    tokens_alone: int
    """Tokens by which the survivor's chain grew in that time; the least fragment."""
    back_s: dict[str, float]
    """Node -> from its relaunch (process start included) to the first merge of its work."""
    last_back_s: float | None
    equal_s: float | None
    """Time from the relaunch until all held one and the same new version of every fragment."""
    digests_agree: bool
    failures: tuple[str, ...]


class Side(Struct, kw_only=True, frozen=True):
    """One side of a split, while it lasted."""

    nodes: tuple[str, ...]
    versions: dict[int, int]
    """Fragment -> how many were made."""
    first_version_s: float | None
    """Time from the split until every fragment had a version whose round was closed after it."""
    tokens_trained: int
    tokens_merged: int
    """Tokens by which the side's chain grew; the least fragment."""


class Healed(Struct, kw_only=True, frozen=True):
    """report.json of `split`. Durations in seconds; what did not happen is null."""

    scenario: str = "split"
    nodes: int
    min_step_s: float = 0.0
    """Least time of an inner step; 0: as short as may be."""
    split_s: float
    sides: tuple[Side, Side]
    equal_s: float | None
    """Time from the healing until all held one and the same version of every fragment, made after it."""
    sent_again: int
    """Merged contributions whose chain lost the fork: each is counted once."""
    tokens_sent_again: int
    merged_again_s: float | None
    """Time from the healing until the last of them was in everybody's chain; null also if there were none."""
    not_merged_again: tuple[str, ...]
    given_up: tuple[str, ...]
    tokens_trained: int
    """Tokens that all nodes trained in the whole run."""
    tokens_merged: int
    """Tokens merged of the fragment that has the least."""
    digests_agree: bool
    failures: tuple[str, ...]


def side_of(facts: Facts, nodes: tuple[str, ...], since_s: float, until_s: float) -> Side:
    """Sum up one side between the split and the healing."""
    log = facts.log
    fragments = range(log.fragments)
    first = first_rounds(log, nodes, since_s, until_s)
    versions = dict.fromkeys(fragments, 0)
    for made in log.published:
        if made.node in nodes and since_s < made.mono <= until_s:
            versions[made.fragment] += 1
    grown = [chain_tokens(log, nodes, f, until_s) - chain_tokens(log, nodes, f, since_s) for f in fragments]
    whole = len(first) == log.fragments
    return Side(
        nodes=nodes,
        versions=versions,
        first_version_s=round(max(first.values()) - since_s, 3) if whole else None,
        tokens_trained=sum(trained(log.nodes[node].progress, since_s, until_s) for node in nodes),
        tokens_merged=min(grown),
    )


def survived(
    facts: Facts,
    survivor: str,
    killed_s: float,
    back_at_s: float,
    others: Sequence[str],
    wrong: Sequence[str],
    agree: bool,
) -> Survived:
    """The verdict on `survivor`: it was alone from `killed_s` to `back_at_s`. `wrong`: what else failed."""
    log = facts.log
    first = first_rounds(log, (survivor,), killed_s, back_at_s)
    made = [v for v in log.published if v.node == survivor and killed_s < v.mono <= back_at_s]
    grown = [
        chain_tokens(log, (survivor,), f, back_at_s) - chain_tokens(log, (survivor,), f, killed_s)
        for f in range(log.fragments)
    ]
    back = {}
    for node in others:
        times = [line.mono for line in log.nodes[node].merged if line.mono > back_at_s]
        if times:
            back[node] = round(min(times) - back_at_s, 3)
    whole, all_back = len(first) == log.fragments, len(back) == len(others)
    equal_s = equal_at(log, [survivor, *others], back_at_s)
    failures = list(wrong)
    if not whole:
        failures.append(f"{survivor} did not go on with every fragment while it was alone")
    failures += [f"{node}: nothing of it was merged after it returned" for node in others if node not in back]
    if equal_s is None:
        failures.append("not all nodes came to hold one new version of every fragment")
    return Survived(
        nodes=1 + len(others),
        survivor=survivor,
        next_version_s=round(min(first.values()) - killed_s, 3) if first else None,
        all_fragments_s=round(max(first.values()) - killed_s, 3) if whole else None,
        versions_alone=len(made),
        tokens_alone=min(grown),
        back_s=back,
        last_back_s=max(back.values(), default=None) if all_back else None,
        equal_s=round(equal_s - back_at_s, 3) if equal_s is not None else None,
        digests_agree=agree,
        failures=tuple(failures),
    )


def healed(
    facts: Facts,
    sides: tuple[tuple[str, ...], tuple[str, ...]],
    split_s: float,
    healed_s: float,
    wrong: Sequence[str],
    agree: bool,
) -> Healed:
    """The verdict on `split`, which lasted from `split_s` to `healed_s`. `wrong`: what else failed."""
    log, nodes = facts.log, (*sides[0], *sides[1])
    made = side_of(facts, sides[0], split_s, healed_s), side_of(facts, sides[1], split_s, healed_s)
    equal_s = equal_at(log, nodes, healed_s)
    again = last_resent(log)
    done = [merged_again(log, one) for one in again]
    given_up = [
        f"{line.node}, fragment {line.fragment}: {line.reason}, {line.tokens} tokens" for line in log.given_up
    ]
    missing = [
        f"{a.node}, fragment {a.fragment}" for a, at_s in zip(again, done, strict=True) if at_s is None
    ]
    in_all = sum(trained(log.nodes[node].progress, -inf, inf) for node in nodes)
    merged = min(chain_tokens(log, nodes, f, facts.ended_s) for f in range(log.fragments))
    failures = list(wrong)
    failures += [
        f"{', '.join(side.nodes)} did not make a version of every fragment alone"
        for side in made
        if side.first_version_s is None
    ]
    if equal_s is None:
        failures.append("not all nodes came to hold one version of every fragment made after the healing")
    failures += [f"{who}: what the fork cost was not merged again" for who in missing]
    failures += [f"given up: {words}" for words in given_up]
    # What is under way at the end is far less; a lost branch would be at least all of it.
    if equal_s is not None and in_all - merged > min(side.tokens_trained for side in made) / 2:
        failures.append(f"{in_all} tokens were trained, only {merged} are merged")
    times = [at_s for at_s in done if at_s is not None]
    return Healed(
        nodes=len(nodes),
        split_s=round(healed_s - split_s, 3),
        sides=made,
        equal_s=round(equal_s - healed_s, 3) if equal_s is not None else None,
        sent_again=sum(one.contributions for one in again),
        tokens_sent_again=sum(one.tokens for one in again),
        merged_again_s=round(max(times) - healed_s, 3) if times and not missing else None,
        not_merged_again=tuple(missing),
        given_up=tuple(given_up),
        tokens_trained=in_all,
        tokens_merged=merged,
        digests_agree=agree,
        failures=tuple(failures),
    )
