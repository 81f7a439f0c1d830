"""Rotating groups of a fragment: which member belongs to which, by arithmetic alone.

Everybody computes the same (docs/protocol/groups.md, section 1). While a run has at most `group_size`
members, all are in one group, `WHOLE_RUN`. Above that, every version header says into how many leaf groups
(`groups`) the members fall for the next version, and in which `epoch`.

A member's leaf group follows from its own peer id by a seeded hash. So nobody needs a list of all members to
know where it belongs, and two peers with different lists still agree. The syncers of the leaf groups form
groups one level up, and so on until one group is left. The syncer of that one is the root, and makes the
version.

Names of groups are "<epoch>/<level>/<index>"; level 0 are the leaves.
"""

from __future__ import annotations

import hashlib

from p2pdiloco.core.api.types import WHOLE_RUN
from p2pdiloco.util import BoundedDict

OUTGROWN = 2
"""Factor: groups with so many times `group_size` members on average are too large."""


def level_sizes(groups: int, group_size: int) -> tuple[int, ...]:
    """Number of groups on every level, leaves first, 1 last: (625, 40, 3, 1) for 625 groups of 16."""
    sizes = [groups]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // group_size))
    return tuple(sizes)


def group_name(epoch: int, groups: int, level: int, index: int) -> str:
    """Name a group as it is called on the wire."""
    return WHOLE_RUN if groups == 1 else f"{epoch}/{level}/{index}"


def parse_group(name: str) -> tuple[int, int, int] | None:
    """Split a group's name into (epoch, level, index); None for `WHOLE_RUN` and for anything malformed."""
    parts = name.split("/")
    if len(parts) != 3 or not all(part.isascii() and part.isdigit() and len(part) <= 18 for part in parts):
        return None
    epoch, level, index = (int(part) for part in parts)
    return epoch, level, index


def is_group(name: str) -> bool:
    """Tell whether this may be the name of a group, now or in another epoch."""
    return name == WHOLE_RUN or parse_group(name) is not None


def leaf_index(run: str, fragment: int, epoch: int, groups: int, peer: str) -> int:
    """Compute the leaf group of a peer by a seeded hash; another one for every fragment and epoch."""
    text = f"group/{run}/{fragment}/{epoch}/{peer}".encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:8], "big") % groups


def parent_index(sizes: tuple[int, ...], level: int, index: int) -> int:
    """Find the group of level + 1 to which the syncer of group `index` of `level` belongs."""
    return index * sizes[level + 1] // sizes[level]


def children(sizes: tuple[int, ...], level: int, index: int) -> range:
    """List the groups of level - 1 whose syncers form group `index` of `level` (at least 1)."""
    above, below = sizes[level], sizes[level - 1]
    first = -(-index * below // above)
    return range(first, -(-(index + 1) * below // above))


def leaf_span(sizes: tuple[int, ...], level: int, index: int) -> range:
    """List the leaf groups below (or equal to) group `index` of `level`: they are neighbours."""
    first, end = index, index + 1
    for below in range(level, 0, -1):
        first, end = children(sizes, below, first).start, children(sizes, below, end - 1).stop
    return range(first, end)


def is_below(sizes: tuple[int, ...], low: tuple[int, int], high: tuple[int, int]) -> bool:
    """Tell whether group `low` (level, index) is `high` or somewhere under it."""
    level, index = low
    while level < high[0]:
        index = parent_index(sizes, level, index)
        level += 1
    return (level, index) == high


def next_plan(
    epoch: int, groups: int, number: int, members: int, group_size: int, epoch_versions: int
) -> tuple[int, int]:
    """Decide (epoch, groups) that the header of version `number` states for the version after it.

    Groups rotate after every `epoch_versions` versions, and at once when they have become twice too large. A
    run that fits into one group does not rotate (the office's term does).
    """
    if number % epoch_versions and members <= OUTGROWN * groups * group_size:
        return epoch, groups
    wanted = 1 if members <= group_size else -(-members // group_size)
    return (epoch, groups) if wanted == groups == 1 else (epoch + 1, wanted)


class Roster:
    """Immutable list of all listed members; one object may serve many readers.

    `members` is sorted: (peer, incarnation).
    """

    def __init__(self, members: tuple[tuple[str, int], ...]) -> None:
        self.members = tuple(sorted(members))
        self._leaves: BoundedDict[tuple[str, int, int, int], tuple[tuple[str, ...], ...]] = BoundedDict(
            MAX_REMEMBERED
        )
        self._incarnations: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:
        return f"Roster({', '.join(peer for peer, _ in self.members[:8])}{', …' if len(self) > 8 else ''})"

    def incarnation(self, peer: str) -> int | None:
        """Incarnation of a listed peer; None for one that is not listed."""
        if not self._incarnations and self.members:
            self._incarnations.update(self.members)
        return self._incarnations.get(peer)

    def leaves(self, run: str, fragment: int, epoch: int, groups: int) -> tuple[tuple[str, ...], ...]:
        """List the peers of every leaf group, sorted. Worked out once; the last few answers are
        remembered."""
        key = (run, fragment, epoch, groups)
        found = self._leaves.get(key)
        if found is None:
            lists: list[list[str]] = [[] for _ in range(groups)]
            for peer, _ in self.members:
                lists[leaf_index(run, fragment, epoch, groups, peer)].append(peer)
            found = tuple(tuple(peers) for peers in lists)
            self._leaves[key] = found
        return found


MAX_REMEMBERED = 24
"""Partitions into leaf groups that a roster remembers: more than fragments that change their groups at one
time."""
