"""The verdict of one seed of the bulk worlds, and what many seeds did together."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field, to_builtins

from p2pdiloco_lab.simulation.report import counted, rate


class BulkResult(Struct, frozen=True, kw_only=True):
    """Verdict on a seed. `violation` names a broken rule, `stuck` what did not happen after the faults."""

    seed: int
    mix: str
    members: int
    digest: str
    virtual_s: float
    versions: int
    moved_bytes: int
    faults: dict[str, int]
    violation: str
    detail: str
    stuck: str
    tail: tuple[str, ...] = ()
    """Last decisions before the end, of a failed seed."""

    @property
    def ok(self) -> bool:
        """No rule broken, everything arrived."""
        return not self.violation and not self.stuck


class BulkSummary(Struct, kw_only=True):
    """Counters over many seeds."""

    seeds: int = 0
    violations: int = 0
    stuck: int = 0
    versions: int = 0
    moved_bytes: int = 0
    virtual_s: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)
    failed: list[BulkResult] = field(default_factory=list)

    def add(self, result: BulkResult) -> None:
        """Count one seed in."""
        self.seeds += 1
        self.violations += bool(result.violation)
        self.stuck += bool(result.stuck)
        self.versions += result.versions
        self.moved_bytes += result.moved_bytes
        self.virtual_s = round(self.virtual_s + result.virtual_s, 1)
        for kind, count in result.faults.items():
            self.faults[kind] = self.faults.get(kind, 0) + count
        if not result.ok:
            self.failed.append(result)

    def sentence(self, elapsed_s: float) -> str:
        """Sum up for people."""
        return (
            f"{counted(self.seeds, 'seed')}, {counted(self.violations, 'violation')}, {self.stuck} stuck; "
            f"{counted(self.versions, 'version')}, {self.moved_bytes / 2**20:.0f} MiB moved, "
            f"{counted(sum(self.faults.values()), 'fault')} in {self.virtual_s:.0f} virtual seconds; "
            f"{rate(self.seeds, elapsed_s):.0f} seeds per minute"
        )

    def as_dict(self, elapsed_s: float, members: int | None, mix: str | None) -> dict[str, Any]:
        """Sum up for machines: the counters, and every failed seed with the command that replays it."""
        numbers: dict[str, Any] = to_builtins(self)
        for entry, result in zip(numbers["failed"], self.failed, strict=True):
            entry["replay"] = replay_command(result, members, mix)
        return {**numbers, "seeds_per_minute": rate(self.seeds, elapsed_s)}


def replay_command(result: BulkResult, members: int | None, mix: str | None) -> str:
    """The one command that plays a seed again, with its trace."""
    options = f" --nodes {members}" if members else ""
    options += f" --mix {mix}" if mix else ""
    return f"p2pdiloco simulate --bulk --seed {result.seed}{options} --trace"
