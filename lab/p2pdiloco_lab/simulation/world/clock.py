"""Virtual time: one heap of callbacks, ordered by (time, sequence), and nothing else that moves."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

Action = Callable[..., None]


class Clock:
    """A discrete-event clock. Callbacks due at one instant run in the order in which they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fired = 0
        self._heap: list[tuple[float, int, Action, tuple[Any, ...]]] = []
        self._sequence = 0

    def at(self, time_s: float, action: Action, *args: Any) -> None:
        """Call `action(*args)` at virtual time `time_s` (not before now)."""
        self._sequence += 1
        heapq.heappush(self._heap, (max(time_s, self.now), self._sequence, action, args))

    def after(self, delay_s: float, action: Action, *args: Any) -> None:
        """Call `action(*args)` in `delay_s` virtual seconds."""
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + max(delay_s, 0.0), self._sequence, action, args))

    def run_until(self, end_s: float) -> None:
        """Run everything that is due before `end_s`, then stand at `end_s`."""
        heap = self._heap
        while heap and heap[0][0] < end_s:
            self.now, _, action, args = heapq.heappop(heap)
            self.fired += 1
            action(*args)
        self.now = end_s
