"""The verdict of one seed."""

from __future__ import annotations

from msgspec import Struct


class SeedResult(Struct, frozen=True, kw_only=True):
    """What a seed did. `violation` names a broken rule, `stuck` what did not happen after the faults."""

    seed: int
    mix: str
    nodes: int
    digest: str
    virtual_s: float
    events: int
    messages: int
    versions: int
    elections: int
    split_terms: int
    """Terms in which two sides of a split each elected a syncer, by disjoint votes."""
    switches: int
    """Nodes that moved to a heavier chain which does not continue their own."""
    lost_to_forks: int
    """Inner steps (summed over fragments) that only an abandoned version holds."""
    faults: int
    records: dict[str, int]
    violation: str
    detail: str
    stuck: str

    @property
    def ok(self) -> bool:
        """No rule broken, everything live."""
        return not self.violation and not self.stuck


def replay_command(result: SeedResult, nodes: int | None, mix: str | None) -> str:
    """The one command that plays a seed again, with its trace."""
    options = f" --nodes {nodes}" if nodes else ""
    options += f" --mix {mix}" if mix else ""
    return f"p2pdiloco simulate --seed {result.seed}{options} --trace"
