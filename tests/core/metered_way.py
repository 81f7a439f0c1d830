"""One way of a link, with a clock and a counter that a test moves."""

from __future__ import annotations

import math

from p2pdiloco.core.capacity import Meter, UplinkMeter


class MeteredWay:
    """An uplink, with a clock and a counter of its own. `overhead`: bytes on the link for each."""

    def __init__(self, overhead: float, remembered: float = math.inf) -> None:
        self.now_s, self.bytes = 0.0, 0
        self.uplink = UplinkMeter(lambda: Meter(lambda: self.bytes, lambda: self.now_s, overhead), remembered)
        self.meter = self.uplink.own

    def move(self, size: int, took_s: float, meter: Meter | None = None) -> None:
        with (meter or self.meter).moving():
            self.now_s += took_s
            self.bytes += size
