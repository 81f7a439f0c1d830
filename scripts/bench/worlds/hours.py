"""Long worlds of honest learners: is any of them doubted for ever, or excluded?

Learners are as different as they come: one is five times as fast as another, each reads half of the
contexts, links are cut, machines crash, stand still and leave for a while. What is to be learned turns
slowly, so that there is a direction to agree on. The world is thin, so that hours can be played: six nodes,
two fragments, rounds of two minutes, few heartbeats.
"""

from __future__ import annotations

import dataclasses
import time

import msgspec
from msgspec import Struct

from p2pdiloco.core.api.config import Timing
from p2pdiloco.core.api.events import CommitVersion, Effect
from p2pdiloco.core.api.types import FULL_TRUST, LEAST_SCORE, LEAST_TRUST
from p2pdiloco_lab.simulation.seed_plan import Mix, WorldPlan, draw_plan, genesis_version
from p2pdiloco_lab.simulation.seed_report import Violation
from p2pdiloco_lab.simulation.sim_host import Host
from p2pdiloco_lab.simulation.sim_world import World
from p2pdiloco_lab.vectors import LARGER
from worlds.cells import SLOWEST
from worlds.lying import LyingVectors

NODES, FRAGMENTS = 6, 2
STEP_S, INNER_STEPS = 8.0, 10
TURNS = 0.02
"""Angle by which the data turn with each version, in radians."""
TIMING = Timing(heartbeat_s=24.0, suspect_s=80.0, member_ttl_s=160.0)
WEATHER = Mix(
    latency_s=(0.005, 0.1),
    bandwidth_bytes_s=(1e6, 5e7),
    jitter=0.3,
    loss=0.002,
    crash=0.01,
    learner_crash=0.005,
    freeze=0.01,
    visit=0.005,
    partition=0.02,
    slow_learner=0.01,
    lasts=16.0,
)
"""Faults per node and minute: one in three minutes somewhere, cuts of up to nine minutes among them."""
FIRST_VERSIONS = 2
"""Versions of a fragment in which everybody is new."""


class HoursRow(Struct, frozen=True, kw_only=True):
    """Row of the table."""

    seed: int
    hours: float
    versions: int
    faults: int
    contributions: int
    measured: float
    """Share of contributions whose round could be measured."""
    doubted: int
    """Contributions with next to no trust weight."""
    longest_doubt: int
    """Most contributions of one learner to one fragment in a row that had next to no trust weight."""
    doubted_in_the_end: int
    """Learners and fragments whose newest contribution had it."""
    below_half: float
    """Share of contributions with less than half of the trust weight."""
    least_mean: float
    """Least mean trust weight of a learner over all of it, of 1."""
    excluded: int
    loss: float
    floor: float
    cpu_s: float
    violation: str = ""


class _Doubts:
    """Trust weights that versions state, each counted once."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()
        self._row: dict[tuple[str, int], int] = {}
        """Doubted contributions in a row, up to now."""
        self._sums: dict[str, list[int]] = {}
        self.contributions = self.measured = self.doubted = self.below_half = self.longest = 0

    def look(self, _host: Host, effect: Effect) -> None:
        """See an effect."""
        if not isinstance(effect, CommitVersion) or effect.version.header.digest() in self._seen:
            return
        header = effect.version.header
        self._seen.add(header.digest())
        if header.number <= FIRST_VERSIONS:
            return
        for part in header.contributors:
            key, doubted = (part.learner, header.fragment), part.trust <= LEAST_TRUST
            self._row[key] = self._row.get(key, 0) + 1 if doubted else 0
            self.longest = max(self.longest, self._row[key])
            self.contributions += 1
            self.measured += part.score >= LEAST_SCORE
            self.doubted += doubted
            self.below_half += 2 * part.trust < FULL_TRUST
            total = self._sums.setdefault(part.learner, [0, 0])
            total[0] += part.trust
            total[1] += 1

    def in_the_end(self) -> int:
        """Count learners and fragments that are doubted now."""
        return sum(row > 0 for row in self._row.values())

    def least_mean(self) -> float:
        """Find the mean trust weight of the learner that has the least."""
        return min((total / count for total, count in self._sums.values()), default=0.0) / FULL_TRUST


def hours_plan(seed: int, hours: float) -> WorldPlan:
    """Plan a long world."""
    plan = draw_plan(seed, "calm", NODES)
    config = msgspec.structs.replace(
        plan.config,
        inner_steps=INNER_STEPS,
        delay_steps=2,
        quorum=2,
        grace_fraction=0.5,
        grace_cap_s=40.0,
        group_size=64,
        term_versions=6,
        log_versions=8,
        max_base_age_versions=6,
        tokens_per_step=64,
        admits=False,
        genesis_versions=tuple(genesis_version(f) for f in range(FRAGMENTS)),
        max_payload_bytes=(1000,) * FRAGMENTS,
        timing=TIMING,
    )
    specs = tuple(
        dataclasses.replace(
            spec, step_time_s=STEP_S * SLOWEST ** (index / (NODES - 1)), write_s=0.02, checkpoint_every_s=60.0
        )
        for index, spec in enumerate(plan.nodes)
    )
    return dataclasses.replace(
        plan,
        config=config,
        mix=WEATHER,
        nodes=specs,
        joins_s=tuple(0.5 * index for index in range(NODES)),
        faults_until_s=3600.0 * hours,
        hidden=(),
    )


def play_hours(seed: int, hours: float) -> HoursRow:
    """Play a long world."""
    plan, began_s, violation = hours_plan(seed, hours), time.process_time(), ""
    world = World(plan, substance=LyingVectors(plan, parted=True, size=LARGER, turns=TURNS))
    doubts = _Doubts()
    world.on_effect = doubts.look
    try:
        world.clock.run_until(plan.faults_until_s)
    except Violation as broken:
        violation = str(broken)
    losses = world.losses()
    excluded = {peer for host in world.up_hosts() for peer in host.core.shared.excluded.peers}
    return HoursRow(
        seed=seed,
        hours=round(world.clock.now / 3600, 2),
        versions=world.watch.versions,
        faults=sum(world.faults.counts.values()),
        contributions=doubts.contributions,
        measured=round(doubts.measured / max(1, doubts.contributions), 3),
        doubted=doubts.doubted,
        longest_doubt=doubts.longest,
        doubted_in_the_end=doubts.in_the_end(),
        below_half=round(doubts.below_half / max(1, doubts.contributions), 4),
        least_mean=round(doubts.least_mean(), 3),
        excluded=len(excluded),
        loss=losses.end if losses else 0.0,
        floor=losses.floor if losses else 0.0,
        cpu_s=round(time.process_time() - began_s, 1),
        violation=violation,
    )
