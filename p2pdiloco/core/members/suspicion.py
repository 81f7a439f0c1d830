"""When a peer's silence means something: after what is unusual for its link (design 5.6).

Heartbeats over a good link come every half second, over a bad one in bursts. So each peer has its own
patience, from the mean and the mean deviation of the gaps between its heartbeats, never below a floor.
"""

from __future__ import annotations

GAP_SHARE = 0.1
"""How much the newest gap counts: the last ten or so heartbeats."""
DEVIATIONS = 4.0


def suspect_after_s(mean_s: float, deviation_s: float, floor_s: float, cap_s: float) -> float:
    """Silence after which a peer is not counted on: mean + 4 mean deviations, within floor and cap."""
    return max(floor_s, min(cap_s, mean_s + DEVIATIONS * deviation_s))


class Gaps:
    """Moving mean and mean deviation of the gaps between one peer's heartbeats."""

    __slots__ = ("deviation_s", "last_s", "mean_s")

    def __init__(self, expected_s: float) -> None:
        self.mean_s = expected_s
        self.deviation_s = 0.0
        self.last_s: float | None = None

    def heard(self, now: float, most_s: float) -> None:
        """A heartbeat. A gap above `most_s` counts as that: an outage tells little of the link."""
        if self.last_s is not None:
            gap_s = min(now - self.last_s, most_s)
            self.deviation_s += GAP_SHARE * (abs(gap_s - self.mean_s) - self.deviation_s)
            self.mean_s += GAP_SHARE * (gap_s - self.mean_s)
        self.last_s = now

    def after_s(self, floor_s: float, cap_s: float) -> float:
        """See `suspect_after_s`."""
        return suspect_after_s(self.mean_s, self.deviation_s, floor_s, cap_s)
