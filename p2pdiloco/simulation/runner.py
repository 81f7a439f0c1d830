"""Plays seeds one after another and sums them up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct, field, to_builtins

from p2pdiloco.simulation.plan import draw_plan
from p2pdiloco.simulation.report import SeedResult, replay_command
from p2pdiloco.simulation.world import World


class Summary(Struct, kw_only=True):
    """What many seeds did together."""

    seeds: int = 0
    violations: int = 0
    stuck: int = 0
    versions: int = 0
    elections: int = 0
    faults: int = 0
    switches: int = 0
    lost_to_forks: int = 0
    virtual_s: float = 0.0
    failed: list[SeedResult] = field(default_factory=list)

    def add(self, result: SeedResult) -> None:
        """Count one seed in."""
        self.seeds += 1
        self.violations += bool(result.violation)
        self.stuck += bool(result.stuck)
        self.versions += result.versions
        self.elections += result.elections
        self.faults += result.faults
        self.switches += result.switches
        self.lost_to_forks += result.lost_to_forks
        self.virtual_s += result.virtual_s
        if not result.ok:
            self.failed.append(result)

    def sentence(self, seeds_per_minute: float) -> str:
        """For people."""
        return (
            f"{self.seeds} seeds, {self.violations} violations, {self.stuck} stuck; "
            f"{self.versions} versions, {self.elections} elections, {self.faults} faults "
            f"in {self.virtual_s:.0f} virtual seconds; "
            f"{seeds_per_minute:.0f} seeds per minute"
        )

    def as_dict(self, seeds_per_minute: float, nodes: int | None, mix: str | None) -> dict[str, Any]:
        """For machines: the counters, and every failed seed with the command that replays it."""
        numbers: dict[str, Any] = to_builtins(self)
        for entry, result in zip(numbers["failed"], self.failed, strict=True):
            entry["replay"] = replay_command(result, nodes, mix)
        return {**numbers, "seeds_per_minute": round(seeds_per_minute, 1)}


def run_seed(
    seed: int, mix: str | None = None, nodes: int | None = None, write: Callable[[str], None] | None = None
) -> SeedResult:
    """Play one seed; `write` gets the trace line by line."""
    return World(draw_plan(seed, mix, nodes), write).run()


def run_seeds(
    seeds: Iterable[int],
    mix: str | None = None,
    nodes: int | None = None,
    each: Callable[[SeedResult], None] | None = None,
) -> Summary:
    """Play many seeds; `each` hears of every one as it ends."""
    summary = Summary()
    for seed in seeds:
        result = run_seed(seed, mix, nodes)
        summary.add(result)
        if each is not None:
            each(result)
    return summary
