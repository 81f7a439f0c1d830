"""Budgets of what a peer is given that is no member of our run: it may ask for as much as it likes.

Each is a bucket that fills again with time, so what a peer had is remembered for longer than its connection.
Peer ids cost nothing: what all strangers have together is bounded by their streams
(`adapters.net.places`), and by the states' share of the uplink (`daemon.bulk.states.courtesy`).

Listed in docs/reference/bounds.md, section 7.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from p2pdiloco.adapters.streams import PutOff
from p2pdiloco.util import BoundedDict

MAX_PEERS = 4096
LISTING_BYTES = 1024 * 1024
REPORT_BYTES = 16 * 1024 * 1024
LISTING_S = 600.0
"""Time in which a peer has so many bytes of manifests and lists of runs, and of reports."""
HISTORY_BYTES = 256 * 1024 * 1024
"""Bytes of a run's history that a peer has at once: labels of more than a million contributions."""
HISTORY_S = 3600.0
COPIES = 3.0
"""Copies of a run's whole state, or of a file, that a peer has at once: one, and what was lost on the way."""
COPIES_S = 3600.0 / 2
"""Time in which it may have another one."""
SMALL_BYTES = 4 * 1024 * 1024
"""Bytes as which a smaller copy counts: nobody is hurt by a few."""
UPDATE_COPIES = 4
MAX_UPDATES = 8192


class Enough(Enum):
    """Kinds of what a stranger had enough of, as refusals are counted."""

    LISTINGS = "enough-listings"
    REPORTS = "enough-reports"
    FILES = "enough-files"
    STATES = "enough-states"
    UPDATES = "enough-updates"
    ADMISSIONS = "enough-admissions"
    HISTORIES = "enough-histories"


class Budget:
    """Budget of one kind of bytes for each peer."""

    def __init__(self, kind: Enough, most: float, full_again_s: float, now: Callable[[], float]) -> None:
        """`most`: what a peer has at once; `full_again_s`: time in which all of it is there again."""
        self._kind = kind
        self._most = most
        self._per_s = most / full_again_s
        self._now = now
        self._used: BoundedDict[str, tuple[float, float]] = BoundedDict(MAX_PEERS)
        """Amount that each peer had, as far as it is not there again, and when."""

    def check(self, peer: str) -> None:
        """Check that there is something left. Raises: PutOff."""
        if self._left(peer) <= 0:
            raise PutOff(self._kind.value)

    def take(self, peer: str, amount: float) -> None:
        """Count what the peer is given: the last time it may be more than was left."""
        self._used[peer] = (self._most - self._left(peer) + amount, self._now())

    def _left(self, peer: str) -> float:
        used, at_s = self._used.get(peer, (0.0, 0.0))
        return self._most - max(0.0, used - self._per_s * (self._now() - at_s))


class BulkBudgets:
    """Budgets of a run's states and updates."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._states = Budget(Enough.STATES, COPIES, COPIES * COPIES_S, now)
        self._updates: BoundedDict[tuple[str, int, int], int] = BoundedDict(MAX_UPDATES)
        """Bytes of each update that each peer was given."""

    def check_state(self, peer: str) -> None:
        """Check that the peer may have something of a state. Raises: PutOff."""
        self._states.check(peer)

    def state(self, peer: str, size: int, all_bytes: int) -> None:
        """Count bytes of a state; those of all fragments are so many."""
        self._states.take(peer, size / max(all_bytes, SMALL_BYTES))

    def check_update(self, peer: str, fragment: int, number: int, update_bytes: int) -> None:
        """Check that the peer did not have all of that update too often. Raises: PutOff."""
        if self._updates.get((peer, fragment, number), 0) >= UPDATE_COPIES * max(update_bytes, 1):
            raise PutOff(Enough.UPDATES.value)

    def update(self, peer: str, fragment: int, number: int, size: int) -> None:
        """Count bytes of an update."""
        key = peer, fragment, number
        self._updates[key] = self._updates.get(key, 0) + size
