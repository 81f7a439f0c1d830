"""What a node's link carries, from transfers that it made: the best of the latest, once there were a few."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator

LEAST_BYTES = 256 * 1024
"""What is shorter says more about round trips than about the link."""
LONG_S = 10.0
"""On a busy link transfers overlap for ever: so often it is measured nevertheless."""
SAMPLES = 32
LEAST_SAMPLES = 6
"""Fewer say nothing yet: each may have waited for its sender or our own tensors, or shared a peer's link."""
LEAST_S = 5.0
"""What lasted so long together says something already, where a mistake is soon mended."""
TELL_EVERY_S = 5.0
"""How often the core is told what is new."""


class Meter:
    """The rate of transfers one way, while any of ours is under way."""

    def __init__(
        self,
        total_bytes: Callable[[], float],
        now: Callable[[], float],
        overhead: float = 1.0,
        least_bytes: int = LEAST_BYTES,
    ) -> None:
        """`total_bytes`: counts everything that went this way; `overhead`: bytes on the link for each."""
        self._total_bytes = total_bytes
        self._now = now
        self._overhead = overhead
        self._least_bytes = least_bytes
        self._active = 0
        self._since_s = 0.0
        self._from_bytes = 0.0
        self._rates: deque[float] = deque(maxlen=SAMPLES)
        self._measured_s = 0.0
        """How long all samples took."""

    @property
    def bits_per_s(self) -> float:
        """The best of the latest, on the link; infinite while unknown."""
        return max(self._rates) if len(self._rates) >= LEAST_SAMPLES else math.inf

    @property
    def early_bits_per_s(self) -> float:
        """The same, known sooner on a slow link: from fewer, longer transfers."""
        return max(self._rates) if self._rates and self._measured_s >= LEAST_S else self.bits_per_s

    @contextlib.contextmanager
    def moving(self) -> Iterator[None]:
        """While something is under way."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    def begin(self) -> None:
        """Something is under way from now on."""
        if not self._active:
            self._since_s, self._from_bytes = self._now(), self._total_bytes()
        self._active += 1

    def end(self) -> None:
        """It no longer is."""
        self._active -= 1
        now, total = self._now(), self._total_bytes()
        took_s, moved = now - self._since_s, total - self._from_bytes
        if self._active and took_s < LONG_S:
            return
        if moved >= self._least_bytes and took_s > 0:
            self._rates.append(8 * self._overhead * moved / took_s)
            self._measured_s += took_s
        self._since_s, self._from_bytes = now, total


class Uplink:
    """What our uplink carries, for all that we know: whoever holds all offices contributes to itself only,
    and whoever has just started has sent nothing."""

    def __init__(self, meter: Callable[[], Meter], remembered_bits_per_s: float = math.inf) -> None:
        """`meter`: makes one of all that goes out. `remembered_bits_per_s`: of an earlier life; infinite: of
        none."""
        self.own = meter()
        """While contributions or partial merges of ours are under way."""
        self.given = meter()
        """While updates are, to those who asked for them."""
        self._remembered = remembered_bits_per_s

    @property
    def measured_bits_per_s(self) -> float:
        """In this life; infinite while unknown. The better of both: each may have been held up elsewhere."""
        known = [rate for m in (self.own, self.given) if (rate := m.early_bits_per_s) < math.inf]
        return max(known, default=math.inf)

    @property
    def sure_bits_per_s(self) -> float:
        """The same, once contributions have shown it; else infinite."""
        return self.measured_bits_per_s if self.own.bits_per_s < math.inf else math.inf

    @property
    def bits_per_s(self) -> float:
        """Measured, else remembered; infinite while unknown."""
        measured = self.measured_bits_per_s
        return measured if measured < math.inf else self._remembered
