"""The links of a bulk world: every member's uplink, and a way to every other with a delay of its own."""

from __future__ import annotations

from p2pdiloco_lab.bulk_world.plan import BulkPlan
from p2pdiloco_lab.simulation.world.plan import stream


class OutLane:
    """Lane out of a member: what it sends goes out one after the other, to whomever."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._free_s = 0.0

    def through_s(self, nbytes: int, at_s: float) -> float:
        """Return when so many bytes are out that come at a time."""
        self._free_s = max(self._free_s, at_s) + nbytes / self.bytes_per_s
        return self._free_s


class Ways:
    """Links of a world. Implements `lab.memory_pipe.Delays`."""

    def __init__(self, plan: BulkPlan) -> None:
        self._uplinks = {spec.name: OutLane(spec.uplink_bytes_s) for spec in plan.members}
        rng = stream(plan.seed, "bulk ways")
        names = [spec.name for spec in plan.members]
        self._latency_s = {(a, b): rng.uniform(*plan.mix.latency_s) for a in names for b in names}
        self._held_until_s: dict[tuple[str, str], float] = {}
        self._last_s: dict[tuple[str, str], float] = {}

    def arrival_s(self, sender: str, receiver: str, nbytes: int, sent_s: float) -> float:
        """See `Delays`."""
        way = sender, receiver
        out_s = self._uplinks[sender].through_s(nbytes, sent_s)
        on_s = max(out_s, self._held_until_s.get(way, 0.0)) + self._latency_s[way]
        self._last_s[way] = max(on_s, self._last_s.get(way, 0.0))
        return self._last_s[way]

    def hold(self, sender: str, receiver: str, until_s: float) -> None:
        """Let what goes that way arrive after this time, if a connection outlives it."""
        self._held_until_s[sender, receiver] = max(until_s, self._held_until_s.get((sender, receiver), 0.0))

    def slow_down(self, sender: str, factor: float) -> None:
        """Let what a member sends from now on take so many times longer."""
        self._uplinks[sender].bytes_per_s /= factor
