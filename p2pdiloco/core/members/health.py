"""Health of this node itself: time in which it did not run is not the silence of others.

The core knows when it asked to be woken. If it is handed its next event much later, the process was stopped,
starved, or its loop blocked; what others sent meanwhile waits in our own queues. So everybody's silence is
counted from that much later; before we have listened for a while nobody is suspected, no office sought
(docs/protocol/membership.md, section 3).
"""

from __future__ import annotations

import math

LAG_S = 0.5
"""Least lateness that counts. Less is usual on a busy machine: a heartbeat."""
LISTEN_S = 1.0
"""Time for listening afterwards, two heartbeats: what waited in our queues, and what comes next."""


class Health:
    """Lateness of this node's event loop."""

    def __init__(self) -> None:
        self._promised_s = math.inf
        self._counted_s = -1e18
        self.listens_until_s = -1e18
        """End of listening: until then silence and failed sends mean nothing, and we stand for no office."""

    def promise(self, due_s: float) -> None:
        """Remember the time at which we asked to be woken."""
        self._promised_s = due_s

    def lag_s(self, now: float) -> float:
        """Compute how much too late the event that is handled now comes; 0 unless that is remarkable. Asked
        once."""
        # What was due meanwhile is still due after the first event: no second is counted twice.
        late_s = now - max(self._promised_s, self._counted_s)
        if late_s < LAG_S:
            return 0.0
        self._counted_s = now
        self.listens_until_s = now + LISTEN_S
        return late_s
