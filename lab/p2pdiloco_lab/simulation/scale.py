"""One calm world of up to ten thousand nodes: what a swarm costs each of them as it grows.

Links are those of the `wan` mix, nothing fails. All nodes join within a few seconds, and fall into groups
from version 0 on. After a warm-up of one version, a few outer updates of one fragment are watched, the groups
rotating once in between. What all nodes would hold alike (roster, headers, states, watermarks) is one object.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import fmean, median

import msgspec
from msgspec import Struct

from p2pdiloco.core.api.config import CoreConfig, Timing
from p2pdiloco.core.api.events import CommitVersion, Effect, PresenceSeen
from p2pdiloco.core.api.messages import Message, Progress
from p2pdiloco.core.api.types import Wire, signed_bytes
from p2pdiloco.core.api.versions import MemberList, VersionHeader, level_sizes
from p2pdiloco_lab.simulation.seed_plan import MIXES, RUN, NodeSpec, WorldPlan, genesis_version, random_stream
from p2pdiloco_lab.simulation.sim_host import Host
from p2pdiloco_lab.simulation.sim_world import World

GROUP_SIZE = 16
INNER_STEPS = 20
STEP_S = 0.3
PAYLOAD_BYTES = 100_000
HEARTBEAT_S = 1.0
"""Twice the usual: nine of ten events of a large world are heartbeats."""
JOIN_WITHIN_S = 3.0
LIST_EVERY_S = 10.0
LIMIT_S = 120.0
"""Virtual time after which what has been measured must do."""


class Load(Struct):
    """Traffic of one node, and the peers that it had to do with."""

    messages: int = 0
    heartbeats: int = 0
    control_bytes: int = 0
    label_bytes: int = 0
    payload_bytes: int = 0
    peers: set[str] = msgspec.field(default_factory=set)
    lately: set[str] = msgspec.field(default_factory=set)
    """Peers since the groups rotated last."""


class ScaleReport(Struct, kw_only=True):
    """Per node and outer update, over the updates that were watched."""

    nodes: int
    group_size: int
    levels: int
    updates: int
    virtual_s: float
    events: int
    update_interval_s: float
    messages_mean: float
    messages_max: float
    heartbeats_mean: float
    control_bytes_mean: float
    control_bytes_max: float
    label_bytes_mean: float
    """Headers of contributions, partial merges and versions: they name learners."""
    payload_bytes_mean: float
    payload_bytes_max: float
    peers_mean: float
    """Distinct peers in the whole window, in which the groups rotate once."""
    peers_max: int
    peers_epoch_max: int
    """Most peers of a node between two rotations, which is as long as the groups stay."""
    latency_median_s: float
    """Time from a learner's copy-out to the version with it in its own chain."""
    latency_p95_s: float
    spread_median_s: float
    """Time from a version's publication to its being held by a node."""
    spread_p95_s: float
    participation: float
    """Contributors of a version, of all nodes."""


class ScaleWorld(World):
    """Measures from the first version on."""

    def __init__(self, plan: WorldPlan, updates: int) -> None:
        super().__init__(plan)
        self._updates = updates
        self._loads = {spec.peer: Load() for spec in plan.nodes}
        self._measuring = False
        self._from_s = 0.0
        self._published: dict[int, tuple[float, VersionHeader]] = {}
        self._holders: dict[int, int] = {}
        self._latency_s: list[float] = []
        self._spread_s: list[float] = []
        self._roster = MemberList(())
        self._epoch = 0
        self._lately_max = 0
        self.network.meter = self
        self.on_effect = self._effect

    # --- the world -----------------------------------------------------------------------------------

    def _presence_round(self) -> None:
        """Everybody reads the same list."""
        members = tuple((peer, host.incarnation) for peer, host in self.hosts.items())
        if len(members) != len(self._roster):
            self._roster = MemberList(members)
        for host in self.hosts.values():
            host.later(0.05 + host.spec.step_time_s / 10, host.feed, PresenceSeen(self._roster))
        self.clock.after(LIST_EVERY_S if self.clock.now > 1.0 else 1.0, self._presence_round)

    def measure(self, each: Callable[[str], None] | None = None) -> ScaleReport:
        """Play until enough updates are held by everybody."""
        while self.clock.now < LIMIT_S and self._complete() < self._updates + 1:
            self.clock.run_until(self.clock.now + 0.5)
            if each is not None:
                each(f"{self.clock.now:.1f} s, {len(self._published)} versions, {self.clock.fired} events")
        return self._report()

    def _complete(self) -> int:
        everybody = len(self.plan.nodes)
        return sum(count >= 0.99 * everybody for count in self._holders.values())

    # --- what is measured ----------------------------------------------------------------------------

    def control(self, source: str, target: str, size_bytes: int, message: Message) -> None:
        """A control message leaves (`Network.meter`)."""
        if self._measuring:
            load = self._loads[source]
            load.messages += 1
            load.heartbeats += type(message) is Progress
            load.control_bytes += size_bytes
            self._met(source, target)

    def _met(self, source: str, target: str) -> None:
        for one, other in ((source, target), (target, source)):
            load = self._loads[one]
            load.peers.add(other)
            load.lately.add(other)

    def _rotated(self, epoch: int) -> None:
        self._epoch = epoch
        for load in self._loads.values():
            self._lately_max = max(self._lately_max, len(load.lately))
            load.lately.clear()

    def streamed(self, source: str, target: str, label: Wire | None, payload_bytes: int) -> None:
        """A part of a stream leaves (`Network.meter`)."""
        if self._measuring:
            load = self._loads[source]
            load.label_bytes += len(signed_bytes("version", label)) if label is not None else 0
            load.payload_bytes += payload_bytes
            self._met(source, target)

    def _effect(self, host: Host, effect: Effect) -> None:
        if self._measuring and isinstance(effect, CommitVersion) and effect.merged_ticket is not None:
            copied = host.tickets.contribution(effect.merged_ticket)
            model = host.learner.model
            age_steps = model.step_at(host.now) - copied.end
            self._latency_s.append(age_steps * model.step_time_s)

    def committed(self, host: Host, header: VersionHeader) -> None:
        number, now = header.number, self.clock.now
        if number not in self._published:
            self._published[number] = (now, header)
            if not self._measuring:
                self._measuring, self._from_s = True, now
            if header.epoch != self._epoch:
                self._rotated(header.epoch)
        self._holders[number] = self._holders.get(number, 0) + 1
        if self._measuring and header.syncer != host.peer:
            self._spread_s.append(now - self._published[number][0])

    def _report(self) -> ScaleReport:
        first = min(self._published, default=0)
        watched = [entry for number, entry in sorted(self._published.items()) if number > first]
        updates = max(1, len(watched))
        nodes, size = len(self.plan.nodes), self.plan.config.group_size
        loads = list(self._loads.values())
        elapsed_s = (watched[-1][0] if watched else self.clock.now) - self._from_s

        def mean(values: list[int]) -> float:
            return round(fmean(values) / updates, 1)

        def worst(values: list[int]) -> float:
            return round(max(values) / updates, 1)

        return ScaleReport(
            nodes=nodes,
            group_size=size,
            levels=len(level_sizes(-(-nodes // size), size)),
            updates=len(watched),
            virtual_s=round(self.clock.now, 1),
            events=self.clock.fired,
            update_interval_s=round(elapsed_s / updates, 2),
            messages_mean=mean([load.messages for load in loads]),
            messages_max=worst([load.messages for load in loads]),
            heartbeats_mean=mean([load.heartbeats for load in loads]),
            control_bytes_mean=mean([load.control_bytes for load in loads]),
            control_bytes_max=worst([load.control_bytes for load in loads]),
            label_bytes_mean=mean([load.label_bytes for load in loads]),
            payload_bytes_mean=mean([load.payload_bytes for load in loads]),
            payload_bytes_max=worst([load.payload_bytes for load in loads]),
            peers_mean=round(fmean(len(load.peers) for load in loads), 1),
            peers_max=max(len(load.peers) for load in loads),
            peers_epoch_max=max(self._lately_max, *(len(load.lately) for load in loads)),
            latency_median_s=round(median(self._latency_s or [0.0]), 2),
            latency_p95_s=_quantile(self._latency_s, 0.95),
            spread_median_s=round(median(self._spread_s or [0.0]), 2),
            spread_p95_s=_quantile(self._spread_s, 0.95),
            participation=round(fmean([len(h.contributors) / nodes for _, h in watched] or [0.0]), 3),
        )


def scale_plan(nodes: int, seed: int = 0, group_size: int = GROUP_SIZE) -> WorldPlan:
    """A run of one fragment among so many equals, on wide-area links."""
    rng = random_stream(seed, "scale")
    groups = 1 if nodes <= group_size else -(-nodes // group_size)
    config = CoreConfig(
        run=RUN,
        inner_steps=INNER_STEPS,
        delay_steps=INNER_STEPS // 3,
        quorum=4,
        grace_fraction=0.9,
        grace_cap_s=3.0,
        group_size=group_size,
        term_versions=3,
        log_versions=8,
        max_base_age_versions=4,
        tokens_per_step=64,
        update_codec="sim",
        contribution_codec="sim",
        genesis_versions=(genesis_version(0, groups),),
        max_payload_bytes=(PAYLOAD_BYTES,),
        seats=tuple(f"12D3KooW{index:044d}" for index in range(nodes)),
        timing=Timing(heartbeat_s=HEARTBEAT_S),
    )
    specs = tuple(
        NodeSpec(
            peer=f"12D3KooW{index:044d}",  # as long as a real one
            step_time_s=STEP_S * rng.uniform(1.0, 1.2),
            bandwidth_bytes_s=rng.uniform(2e6, 1e7),
            write_s=0.01,
            checkpoint_every_s=1e9,
            clock_offset_s=rng.uniform(0.0, 1e5),
            clock_rate=rng.uniform(0.999, 1.001),
        )
        for index in range(nodes)
    )
    wan = MIXES["wan"]
    return WorldPlan(
        seed=seed,
        mix_name="wan",
        mix=replace(MIXES["calm"], latency_s=wan.latency_s, jitter=wan.jitter),
        config=config,
        nodes=specs,
        joins_s=(0.0, *(rng.uniform(0.1, JOIN_WITHIN_S) for _ in specs[1:])),
        faults_from_s=0.0,
        faults_until_s=LIMIT_S,
        settle_s=0.0,
        faults=False,
    )


def run_scale(
    nodes: int,
    seed: int = 0,
    group_size: int = GROUP_SIZE,
    updates: int = 3,
    each: Callable[[str], None] | None = None,
) -> ScaleReport:
    """Play one calm world of so many nodes. Raises: Violation, as everywhere."""
    return ScaleWorld(scale_plan(nodes, seed, group_size), updates).measure(each)


def _quantile(values: list[float], share: float) -> float:
    ordered = sorted(values) or [0.0]
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)
