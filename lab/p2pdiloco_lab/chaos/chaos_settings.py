"""Settings of `p2pdiloco chaos`: read by the command, which must not load what a swarm needs."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from msgspec import Struct


class ChaosSettings(Struct, frozen=True, kw_only=True):
    """`p2pdiloco chaos`: a swarm of real processes on this machine, and all that goes wrong with it."""

    nodes: int = 8
    preset: str = "micro"
    minutes: float = 10.0
    seconds: float = 0.0
    """Seconds of training under faults; if positive, instead of `minutes`."""
    faults_per_hour: float = 125.0
    seed: int = 0
    """Seed of the schedule of faults."""
    compare: bool = True
    """Run the same swarm without faults first, and compare."""
    compare_minutes: float = 0.0
    """Minutes without faults; 0: as long as with."""
    load: float = 0.08
    """Share of this machine's processors that all learners together use, or more where H inner steps would
    take longer than 4 s; 1: as much as they get."""
    netns: bool = False
    """Put every node into a network namespace of its own, so that links can be cut and slowed down."""
    scenario: Literal["none", "survivor", "split"] = "none"
    """Scenario to play instead of faults drawn from the seed."""
    split_seconds: float = 120.0
    """Seconds for which the two sides of `split` cannot hear each other."""
    out: Path = Path("p2pdiloco-chaos")
    """Folder of faults.jsonl, report.json and chaos.png."""
    keep: bool = False
    """Keep everything that the processes wrote too."""
    json: bool = False
    """Print the report as JSON."""
