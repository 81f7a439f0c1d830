"""Choice of the heads that a heartbeat carries: those that changed lately, and a few others in turn.

A head is some sixty bytes, and a run has up to hundreds of fragments. All heads twice a second to every
member would cost a small swarm more than its elections do, and a slow link its rounds. Heartbeats get lost,
so what changed is said several times, and what did not change is said again every few seconds.

Rules: docs/protocol/membership.md, section 2.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from p2pdiloco.core.api.messages import Progress
from p2pdiloco.core.api.types import Head
from p2pdiloco.core.chain.chain import Chain

SAID_BEATS = 4
"""Heartbeats that say a change: so many in a row are rarely lost on a link that carries any."""
ROUND_BEATS = 17
"""Heartbeats within which every head is said at least once.

A prime: where every second or fourth beat finds nobody whose turn it is, as looks at the DHT make it, a head
would else be said in just those, and never.
"""


class News:
    """Memory of what the members have been told of our heads."""

    def __init__(self, chains: Sequence[Chain]) -> None:
        self._chains = chains
        self._said: list[Head | None] = [None] * len(chains)
        self._until_beat = [0] * len(chains)
        self._beat = 0

    def all_anew(self) -> None:
        """Count every head as changed: there are others to tell."""
        self._said = [None] * len(self._chains)

    def beat(self) -> tuple[tuple[int, Head], ...]:
        """Choose the heads that this heartbeat carries, with their fragments; to be called once for each."""
        self._beat += 1
        carried = []
        for index, chain in enumerate(self._chains):
            if chain.head != self._said[index]:
                self._said[index] = chain.head
                self._until_beat[index] = self._beat + SAID_BEATS
            if self._beat < self._until_beat[index] or (self._beat - index) % ROUND_BEATS == 0:
                carried.append((index, chain.head))
        return tuple(carried)


def in_one(older: Progress, newer: Progress) -> Progress:
    """Merge two heartbeats: the newer one, with heads that only the older, unsent one carries."""
    if older.incarnation != newer.incarnation:
        return newer
    return replace(newer, heads=tuple(sorted((dict(older.heads) | dict(newer.heads)).items())))
