"""Cells of the matrix of liars: small calm worlds in which some learners lie about their work.

A cell is held against the honest learners alone: the same world, in which the liars never are. Cores, rounds,
offices, merges and outer steps are production's; learners train a bigram model, so that the loss is exact.
"""

from __future__ import annotations

import dataclasses
from statistics import fmean

import msgspec
from msgspec import Struct

from p2pdiloco.core.api.config import Timing
from p2pdiloco.core.api.events import CommitVersion, Effect
from p2pdiloco.core.api.types import LEAST_TRUST
from p2pdiloco_lab.simulation.seed_plan import NodeSpec, WorldPlan, draw_plan, genesis_version
from p2pdiloco_lab.simulation.seed_report import Violation
from p2pdiloco_lab.simulation.sim_host import Host
from p2pdiloco_lab.simulation.sim_world import World
from worlds.kinds import Lie
from worlds.lying import LyingVectors

ALONE, CALM = "alone", "none"
"""Names of cells without a lie: liars are absent, or honest."""
FRAGMENTS, INNER_STEPS = 2, 10
STEP_S = 0.2
SLOWEST = 5.0
"""Times that the slowest learner takes for a step, where speeds are spread."""
JOIN_WITHIN_S = 1.5
LOOKS, LOOK_EVERY_S = 5, 2.0
"""Looks at the loss at the end, whose mean it is: one of them says little where learning rates stay high."""
TIMING = Timing(heartbeat_s=2.0, suspect_s=12.0, member_ttl_s=40.0)
"""Timing of worlds in which nothing fails: heartbeats of a large swarm would take most of the computing."""


class Cell(Struct, frozen=True, kw_only=True):
    """Setting of a world. Two with equal settings do the same in every process."""

    attack: str
    """A lie's name, or `ALONE`, `CALM`."""
    liars: int
    of: int
    speeds: str = "equal"
    """"equal", or "spread": from one to a fifth of it."""
    data: str = "equal"
    """"equal", or "different": each learner sees half of the contexts."""
    seed: int = 0
    until_s: float = 70.0

    @property
    def lying(self) -> frozenset[str]:
        """Names of the liars, spread over the learners: where speeds are, some lie who are slow."""
        return frozenset(f"n{(2 * k + 1) * self.of // (2 * self.liars)}" for k in range(self.liars))

    @property
    def alone(self) -> Cell:
        """Cell of the same world without its liars."""
        return msgspec.structs.replace(self, attack=ALONE)


class CellResult(Struct, frozen=True, kw_only=True):
    """Result of a cell."""

    loss: float
    start_loss: float
    floor: float
    versions: int
    """Newest version of all fragments, added up."""
    liars_trust: float | None
    """Mean trust weight of what liars sent at the end, of 1."""
    distrusted_after: int | None
    """Version of a fragment from which on no liar's work weighed, on average; None: one does in the end."""
    honest_doubted: int
    """Contributions of honest learners with next to no trust weight."""
    honest_contributions: int
    honest_excluded: int
    token_loss: float = 0.0
    """Loss where the token of `one-token` comes next."""
    violation: str = ""


class LiarCellRow(Struct, frozen=True, kw_only=True):
    """Row of the table."""

    attack: str
    liars: int
    of: int
    speeds: str
    data: str
    seed: int
    loss: float
    loss_alone: float
    loss_ratio: float
    gain_lost: float
    """Share of what the honest alone gain over version 0 that is lost."""
    excluded_after_versions: int | None
    """Versions of a fragment after which no liar's work weighs any more."""
    liars_trust: float | None
    honest_excluded: int
    honest_doubted: float
    """Share of honest contributions with next to no trust weight."""
    token_loss_ratio: float
    """Loss where the token of `one-token` comes next, over that of the honest alone."""
    versions: int
    violation: str


def cell_plan(cell: Cell) -> WorldPlan:
    """Plan a cell's world: equal links, no faults."""
    plan = draw_plan(cell.seed, "calm", cell.of)
    config = msgspec.structs.replace(
        plan.config,
        inner_steps=INNER_STEPS,
        delay_steps=2,
        quorum=max(1, cell.of // 3),
        grace_fraction=0.5,
        grace_cap_s=1.0,
        group_size=64,
        term_versions=6,
        log_versions=8,
        max_base_age_versions=6,
        tokens_per_step=64,
        audited=False,
        admits=False,
        genesis_versions=tuple(genesis_version(f) for f in range(FRAGMENTS)),
        max_payload_bytes=(1000,) * FRAGMENTS,
        timing=TIMING,
    )
    last = max(1, cell.of - 1)
    present = [index for index in range(cell.of) if cell.attack != ALONE or f"n{index}" not in cell.lying]
    return dataclasses.replace(
        plan,
        config=config,
        nodes=tuple(_spec(plan.nodes[index], index / last, cell.speeds == "spread") for index in present),
        joins_s=tuple(JOIN_WITHIN_S * index / last for index in present),
        faults_until_s=cell.until_s,
        faults=False,
        hidden=(),
    )


def _spec(spec: NodeSpec, place: float, spread: bool) -> NodeSpec:
    factor = SLOWEST**place if spread else 1.0
    return dataclasses.replace(spec, step_time_s=STEP_S * factor, write_s=0.02, checkpoint_every_s=20.0)


class _Trusted:
    """Trust weights that versions state, each counted once."""

    def __init__(self, lying: frozenset[str]) -> None:
        self._lying = lying
        self._seen: set[bytes] = set()
        self.weighed: dict[int, int] = {}
        """Newest version of each fragment in which work of a liar weighed."""
        self.newest: dict[int, int] = {}
        self.liars: list[float] = []
        """Trust weights of liars, in the order of versions."""
        self.honest = self.doubted = 0

    def look(self, _host: Host, effect: Effect) -> None:
        """See an effect."""
        if not isinstance(effect, CommitVersion) or effect.version.header.digest() in self._seen:
            return
        header = effect.version.header
        self._seen.add(header.digest())
        self.newest[header.fragment] = max(self.newest.get(header.fragment, 0), header.number)
        for part in header.contributors:
            trusted = part.trust > LEAST_TRUST
            if part.learner not in self._lying:
                self.honest += 1
                self.doubted += not trusted
                continue
            self.liars.append(part.trust / 64)
            if trusted:
                self.weighed[header.fragment] = max(self.weighed.get(header.fragment, 0), header.number)

    def over_after(self) -> int | None:
        """Find the version from which on no liar's work weighed."""
        if not self.liars or any(self.weighed.get(f, 0) >= end - 1 for f, end in self.newest.items()):
            return None
        return round(fmean(self.weighed.get(f, 0) + 1 for f in self.newest))


def play(cell: Cell) -> CellResult:
    """Play a cell."""
    plan, lying = cell_plan(cell), cell.lying if cell.attack not in (ALONE, CALM) else frozenset[str]()
    lie = next((lie for lie in Lie if lie.value == cell.attack), None)
    vectors = LyingVectors(plan, lie, lying, cell.data == "different")
    world = World(plan, substance=vectors)
    trusted = _Trusted(lying)
    world.on_effect = trusted.look
    losses, of_token, violation = [], list[float](), ""
    try:
        world.clock.run_until(cell.until_s - LOOKS * LOOK_EVERY_S)
        for _ in range(LOOKS):
            world.clock.run_until(world.clock.now + LOOK_EVERY_S)
            losses.append(world.losses())
            of_token.append(vectors.token_loss)
    except Violation as broken:
        violation = str(broken)
        losses.append(world.losses())
        of_token.append(vectors.token_loss)
    found = [each for each in losses if each is not None]
    honest = [host for host in world.up_hosts() if host.peer not in lying]
    excluded = {peer for host in honest for peer in host.core.shared.excluded.peers}
    late = trusted.liars[-len(trusted.liars) // 4 :]
    return CellResult(
        loss=fmean(each.end for each in found),
        start_loss=found[0].start,
        floor=found[0].floor,
        versions=sum(trusted.newest.values()),
        liars_trust=fmean(late) if late else None,
        distrusted_after=trusted.over_after(),
        honest_doubted=trusted.doubted,
        honest_contributions=trusted.honest,
        honest_excluded=len(excluded - lying),
        token_loss=fmean(of_token),
        violation=violation,
    )


def row_of(cell: Cell, result: CellResult, alone: CellResult) -> LiarCellRow:
    """Hold a cell against its honest learners alone."""
    return LiarCellRow(
        attack=cell.attack,
        liars=cell.liars,
        of=cell.of,
        speeds=cell.speeds,
        data=cell.data,
        seed=cell.seed,
        loss=round(result.loss, 4),
        loss_alone=round(alone.loss, 4),
        loss_ratio=round(result.loss / alone.loss, 4),
        gain_lost=round((result.loss - alone.loss) / (alone.start_loss - alone.loss), 4),
        excluded_after_versions=result.distrusted_after,
        liars_trust=None if result.liars_trust is None else round(result.liars_trust, 3),
        honest_excluded=result.honest_excluded,
        honest_doubted=round(result.honest_doubted / max(1, result.honest_contributions), 4),
        token_loss_ratio=round(result.token_loss / alone.token_loss, 4),
        versions=result.versions,
        violation=result.violation,
    )
