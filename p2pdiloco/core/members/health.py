"""Our own health: time in which this node did not run is not the silence of others (design 5.6).

The core knows when it asked to be woken. If it is handed its next event much later, the process was stopped,
starved, or its loop blocked; what others sent meanwhile waits in our own queues. So everybody's silence is
counted from that much later; before we have listened for a while nobody is suspected, no office sought.
"""

from __future__ import annotations

import math

LAG_S = 0.5
"""Less is the ordinary lateness of a busy machine: a heartbeat."""
LISTEN_S = 1.0
"""Two heartbeats: what waited in our queues, and what comes next."""


class Health:
    """Of this node's event loop."""

    def __init__(self) -> None:
        self._promised_s = math.inf
        self._counted_s = -1e18
        self.listens_until_s = -1e18
        """Until then silence and failed sends mean nothing, and we stand for no office."""

    def promise(self, due_s: float) -> None:
        """We asked to be woken at this time."""
        self._promised_s = due_s

    def lag_s(self, now: float) -> float:
        """How much too late the event that is handled now comes; 0 unless that is remarkable. Asked once."""
        # What was due meanwhile is still due after the first event: no second is counted twice.
        late_s = now - max(self._promised_s, self._counted_s)
        if late_s < LAG_S:
            return 0.0
        self._counted_s = now
        self.listens_until_s = now + LISTEN_S
        return late_s
