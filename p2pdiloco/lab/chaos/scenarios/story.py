"""What happened in a scenario (`chaos --scenario`), from the nodes' event logs. Pure: no processes, no clock.

All times are seconds of the machine's monotonic clock, which all processes of one machine share.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from msgspec import Struct

from p2pdiloco.lab.chaos.facts import Pace

Place = tuple[str, int]
"""(node, fragment)"""


class Held(Struct, frozen=True):
    """From now on a node's head was this version."""

    at_s: float
    node: str
    fragment: int
    number: int
    digest: str
    tokens: int
    """Cumulative, in its chain."""
    made: bool
    """The node itself made it."""


class Resent(Struct, frozen=True):
    """A node's chain was replaced by one that lacks work of it, which it sends again as one contribution."""

    at_s: float
    node: str
    fragment: int
    stamp: int
    """Sequence of the last contribution of it."""
    contributions: int
    tokens: int


class Story:
    """Versions, forks and what became of contributions, of all nodes."""

    def __init__(self) -> None:
        self.held: list[Held] = []
        self.closed: dict[tuple[str, int, int], float] = {}
        """(node, fragment, number) -> when its round closed."""
        self.resent: list[Resent] = []
        self.merged: dict[Place, list[tuple[float, int]]] = {}
        """When a node saw a contribution merged, and its sequence."""
        self.given_up: list[str] = []

    def feed(self, node: str, line: dict[str, Any]) -> None:
        """Take in one line of a node's event log (docs/events.md)."""
        at_s, reason = line["mono"], line["reason"]
        fragment: Any = line.get("fragment")  # what is counted here is of one
        match line["kind"]:
            case "publish" | "apply" | "catchup" if "digest" in line:
                made = line["kind"] == "publish"
                version = (line["number"], line["digest"], line["tokens"])
                self.held.append(Held(at_s, node, fragment, *version, made))
            case "merge" if "contributors" in line:
                self.closed[node, fragment, line["number"]] = at_s
            case "fork" if "contributions" in line:
                figures = (line["stamp"], line["contributions"], line["tokens"])
                self.resent.append(Resent(at_s, node, fragment, *figures))
            case "contribution" if reason == "merged":
                self.merged.setdefault((node, fragment), []).append((at_s, line["stamp"]))
            case "fork" if reason.startswith("given up"):
                self.given_up.append(f"{node}, fragment {fragment}: {reason}, {line['tokens']} tokens")
            case "contribution" if line.get("lost"):
                self.given_up.append(f"{node}, fragment {fragment}: {reason}, {line['tokens']} tokens")


# --- who -----------------------------------------------------------------------------------------------


def split_of(names: Sequence[str], seed: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(the larger side, the smaller one): 5 and 3 of 8."""
    start = seed % len(names)
    order = (*names[start:], *names[:start])
    larger = len(names) // 2 + 1
    return order[:larger], order[larger:]


# --- when ----------------------------------------------------------------------------------------------


def first_rounds(story: Story, nodes: Iterable[str], since_s: float, until_s: float) -> dict[int, float]:
    """Fragment -> when one of these nodes first published a version whose round it closed after `since_s`."""
    found: dict[int, float] = {}
    for held in story.held:
        closed_s = story.closed.get((held.node, held.fragment, held.number), since_s)
        if held.made and held.node in nodes and since_s < closed_s and held.at_s <= until_s:
            found[held.fragment] = min(held.at_s, found.get(held.fragment, until_s))
    return found


def equal_at(story: Story, nodes: Sequence[str], fragments: int, since_s: float) -> float | None:
    """When all of these nodes held one version, made after `since_s`, of every fragment; None: not yet.

    They need not hold it at one moment: heads move on while the last ones follow.
    """
    holders: dict[tuple[int, int, str], dict[str, float]] = {}
    made: set[tuple[int, int, str]] = set()
    for held in story.held:
        if held.at_s > since_s:
            version = (held.fragment, held.number, held.digest)
            holders.setdefault(version, {}).setdefault(held.node, held.at_s)
            if held.made:
                made.add(version)
    whole: dict[int, float] = {}
    for version, by_node in holders.items():
        if version in made and set(nodes) <= set(by_node):
            last_s = max(by_node.values())
            whole[version[0]] = min(last_s, whole.get(version[0], last_s))
    return max(whole.values()) if len(whole) == fragments else None


def merged_again(story: Story, again: Resent) -> float | None:
    """When the node's own chain contained what it sent again; None: not yet."""
    times = [
        at_s
        for at_s, stamp in story.merged.get((again.node, again.fragment), [])
        if at_s >= again.at_s and stamp >= again.stamp
    ]
    return min(times, default=None)


def last_resent(story: Story) -> list[Resent]:
    """Of every node and fragment the last one: a later switch of chains sends what is still lost again."""
    return list({(again.node, again.fragment): again for again in story.resent}.values())


# --- how much ------------------------------------------------------------------------------------------


def trained(paces: Sequence[Pace], since_s: float, until_s: float) -> int:
    """Tokens by which a learner's count grew between the last progress lines before these times."""
    before = [p.tokens_total for p in paces if p.at_s <= since_s]
    after = [p.tokens_total for p in paces if p.at_s <= until_s]
    return max(after, default=0) - max(before, default=0)


def chain_tokens(story: Story, nodes: Iterable[str], fragment: int, at_s: float) -> int:
    """Tokens of the heaviest version of a fragment that any of these nodes held by that time."""
    found = [h.tokens for h in story.held if h.fragment == fragment and h.at_s <= at_s and h.node in nodes]
    return max(found, default=0)
