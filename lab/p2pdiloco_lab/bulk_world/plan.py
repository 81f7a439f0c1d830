"""Plan of a seed of the bulk worlds, made before it starts: members, sizes, links, and what goes wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from p2pdiloco_lab.simulation.world.plan import stream

MIX_NAMES = ("calm", "churn", "datacentre", "partition", "storm", "wan")
"""Names as in the simulator of the core."""
INTERVAL_S = (4.0, 9.0)
"""Between two versions of a fragment."""
LARGE_NUMEL, SMALL_NUMEL = (270_000.0, 350_000.0), (3_000.0, 130_000.0)
"""Sizes of a fragment: large ones are copied in pieces from several, and passed on while they arrive."""


@dataclass(frozen=True, slots=True)
class Weather:
    """A kind of weather: the range of uplinks, and how many faults of which kind there are, at most."""

    uplink_bytes_s: tuple[float, float]
    latency_s: tuple[float, float]
    faults: tuple[tuple[str, int], ...] = ()
    tight_memory: float = 0.0
    """Share of members that have hardly more memory than they need, and little scratch on the disk."""
    job_s: float = 0.002
    """Longest usual job of a thread; some take fifty times as long."""


IN_THE_MIDDLE = frozenset({"break", "kill", "wipe"})
"""Faults that wait for a moment in the middle of a transfer; half of them strike a newcomer that copies."""
MIXES = {
    "calm": Weather((2e6, 2e7), (0.001, 0.04)),
    "datacentre": Weather((2e7, 2e8), (0.0002, 0.002), (("kill", 1), ("lies", 2))),
    "wan": Weather((2e5, 2e6), (0.01, 0.15), (("slow", 4), ("hold", 2)), 0.4),
    "churn": Weather((1e6, 2e7), (0.002, 0.05), (("kill", 4), ("wipe", 2), ("break", 2)), 0.2),
    "partition": Weather((1e6, 2e7), (0.002, 0.05), (("cut", 4), ("hold", 4), ("break", 4))),
    "storm": Weather(
        (4e5, 1e7),
        (0.002, 0.1),
        (
            ("kill", 2),
            ("wipe", 1),
            ("cut", 2),
            ("hold", 3),
            ("stall", 2),
            ("break", 4),
            ("lies", 2),
            ("slow", 2),
        ),
        0.3,
        0.01,
    ),
}


@dataclass(frozen=True, slots=True)
class BulkFault:
    """One thing that goes wrong.

    kill, wipe: the member dies, with its disk or without, when `part` of a fragment's state has moved through
    it since `at_s`, and is back at `until_s`. cut: no way between two members, what is under way fails.
    hold: bytes from one to the other wait until it is over. stall: so do all of a member's. break: all that
    is under way at a member fails once, at such a moment. slow: all that a member sends crawls. lies: what a
    member gives or pushes is not what its label says."""

    kind: str
    at_s: float
    until_s: float
    member: str
    other: str
    part: float


@dataclass(frozen=True, slots=True)
class MemberSpec:
    """One machine."""

    name: str
    starts_s: float
    """0: it holds version 0 from the beginning. Later: a newcomer, that copies everything."""
    uplink_bytes_s: float
    tight: bool
    """Tells whether its memory is bounded closely."""


@dataclass(frozen=True, slots=True)
class BulkPlan:
    """Everything that a seed fixes in advance."""

    seed: int
    mix_name: str
    mix: Weather
    members: tuple[MemberSpec, ...]
    numel: int
    """Elements of each fragment."""
    fragments: int
    versions: int
    """Versions of each fragment, after version 0."""
    codec: str
    """Codec of contributions and updates."""
    log_versions: int
    """Updates that a member follows one by one; who is further behind copies the state."""
    faults: tuple[BulkFault, ...]
    faults_until_s: float

    @property
    def settle_s(self) -> float:
        """After the faults everything must have arrived in so much virtual time: pauses, patience and
        forgiveness are minutes, and each version may be fetched after another."""
        slowest = min(member.uplink_bytes_s for member in self.members)
        moved = len(self.members) * self.fragments * self.numel * (8 + 4 * self.versions)
        return 300.0 + 60.0 * self.versions + 2 * moved / slowest


def draw_plan(seed: int, mix_name: str | None = None, members: int | None = None) -> BulkPlan:
    """The plan of a seed. Mix and number of members are drawn too unless they are given."""
    rng = stream(seed, "bulk plan")
    drawn_mix, drawn_members = rng.choice(sorted(MIXES)), min(rng.randint(4, 12), rng.randint(4, 12))
    name, count = mix_name or drawn_mix, members or drawn_members
    mix = MIXES[name]
    newcomers = rng.randint(1, max(1, count // 3)) if count > 2 else 0
    names = [f"n{i}" for i in range(count)]
    starts = [0.0 if i < count - newcomers else rng.uniform(2.0, 20.0) for i in range(count)]
    specs = tuple(
        MemberSpec(peer, start_s, _between(rng, *mix.uplink_bytes_s), rng.random() < mix.tight_memory)
        for peer, start_s in zip(names, starts, strict=True)
    )
    versions = rng.randint(2, 3)
    until_s = versions * INTERVAL_S[1]
    faults = []
    for kind, most in mix.faults:
        for _ in range(rng.randint(0, most)):
            member, other = rng.sample(names, 2)
            at_s, part = rng.uniform(1.0, until_s - 1.0), rng.uniform(0.0, 1.0)
            length_s = rng.choice((rng.uniform(0.5, 4.0), rng.uniform(4.0, 25.0)))
            newcomer = next((spec for spec in specs[::-1] if 0.0 < spec.starts_s < until_s), None)
            if kind in IN_THE_MIDDLE and newcomer is not None and rng.random() < 0.5:
                member, at_s = newcomer.name, newcomer.starts_s
            elif kind == "lies":
                at_s, length_s = at_s / 2, until_s
            faults.append(BulkFault(kind, at_s, min(at_s + length_s, until_s), member, other, part))
    return BulkPlan(
        seed=seed,
        mix_name=name,
        mix=mix,
        members=specs,
        numel=int(_between(rng, *(LARGE_NUMEL if rng.random() < 0.3 else SMALL_NUMEL))),
        fragments=1 + (rng.random() < 0.3),
        versions=versions,
        codec=rng.choice(("int8", "int8", "int4", "bf16")),
        log_versions=rng.randint(1, 3),
        faults=tuple(sorted(faults, key=lambda fault: fault.at_s)),
        faults_until_s=until_s,
    )


def _between(rng: Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))
