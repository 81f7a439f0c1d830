"""Names by which members call themselves, and who was called so lately: an owner may mean one by a name."""

from __future__ import annotations

import time
from collections.abc import Callable

from p2pdiloco.util import BoundedDict

MAX_NAMED = 4096
"""Number of peers that are remembered by name; the one unseen for longest is forgotten first."""
LATELY_S = 86_400.0


class Names(BoundedDict[str, str]):
    """Names of peers as they were seen last."""

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._seen: BoundedDict[tuple[str, str], float] = BoundedDict(MAX_NAMED)
        """Time at which a peer was seen with a name last."""
        super().__init__(MAX_NAMED)

    def __setitem__(self, peer: str, name: str) -> None:
        super().__setitem__(peer, name)
        self._seen[name, peer] = self._now()

    def lately(self, name: str) -> tuple[str, ...]:
        """List the peers that were called so lately, those seen last first."""
        now = self._now()
        seen = ((when_s, peer) for (called, peer), when_s in self._seen.items() if called == name)
        return tuple(peer for when_s, peer in sorted(seen, reverse=True) if now - when_s < LATELY_S)
