"""A simulated swarm: clock, network, disks and nodes of one seed, from the first start to the verdict."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import replace

from p2pdiloco.core.api.effects import Effect
from p2pdiloco.core.api.events import PresenceSeen
from p2pdiloco.core.api.versions import Roster, VersionHeader
from p2pdiloco_lab.simulation.node.host import Host
from p2pdiloco_lab.simulation.node.lineage import genesis_state
from p2pdiloco_lab.simulation.node.substance import NOTHING, Losses, Substance
from p2pdiloco_lab.simulation.report import SeedResult
from p2pdiloco_lab.simulation.rules.backing import Backing
from p2pdiloco_lab.simulation.rules.bounds import too_large
from p2pdiloco_lab.simulation.rules.exclusion import Exclusion
from p2pdiloco_lab.simulation.rules.invariants import InvariantWatch
from p2pdiloco_lab.simulation.rules.liveness import Liveness
from p2pdiloco_lab.simulation.rules.violation import Violation
from p2pdiloco_lab.simulation.trace import Trace
from p2pdiloco_lab.simulation.world.bulk import Bulk
from p2pdiloco_lab.simulation.world.clock import Clock
from p2pdiloco_lab.simulation.world.disk import Disk
from p2pdiloco_lab.simulation.world.faults import Faults
from p2pdiloco_lab.simulation.world.liar import Liar
from p2pdiloco_lab.simulation.world.lying import lying_members
from p2pdiloco_lab.simulation.world.network import Network
from p2pdiloco_lab.simulation.world.past import FORMER_LIFE, Past
from p2pdiloco_lab.simulation.world.plan import RUN, NodeSpec, WorldPlan, stated_lengths, stream
from p2pdiloco_lab.simulation.world.stranger import Stranger

PRESENCE_EVERY_S = 2.0
PRESENCE_TTLS = 6
"""Rounds of presence for which a record is believed."""
TRANSFER_PATIENCE_S = 60.0
"""A receiver that has not given its last word by then has forgotten the transfer."""


class World:
    """Everything there is. Nodes reach each other only through `network` and `bulk`."""

    def __init__(
        self,
        plan: WorldPlan,
        write: Callable[[str], None] | None = None,
        verbose: bool = False,
        substance: Substance = NOTHING,
    ) -> None:
        self.plan = plan = stated_lengths(plan, substance)
        self.substance = substance
        self.clock = Clock()
        self.trace = Trace(write, verbose)
        self.hosts: dict[str, Host] = {}
        """The newest run of every node that ever started."""
        self.specs: dict[str, NodeSpec] = {}
        self.network = Network(self.clock, stream(plan.seed, "network"), plan.mix, RUN)
        self.network.hidden = frozenset(plan.hidden)
        self.bulk = Bulk(self.clock, self.network, self.hosts)
        self.false_syncers: set[str] = set()
        """Nodes whose versions have updates that are no merge of their contributions."""
        self.false_groups: set[str] = set()
        """Nodes whose partial merges are no sum of what they name."""
        self.false_states: set[str] = set()
        """Nodes whose versions have states that their updates do not make."""
        self.states_told: set[bytes] = set()
        """Digests of such states."""
        self.perjurers = lying_members(self)
        """Members whose lies can be proved, or that withhold. None of the rules for honest ones is theirs."""
        self.exclusion = Exclusion(self)
        self.watch = InvariantWatch(plan.config, plan.calm_from_s, frozenset(self.perjurers))
        self.backing = Backing(frozenset(self.perjurers))
        self.records: dict[str, int] = {}
        self.on_effect: Callable[[Host, Effect], None] | None = None
        """Hook for hand-made scenarios: sees every effect just before it is carried out."""
        self.last_syncer = ""
        self.healed = False
        self.gone: set[str] = set()
        """Left, or lost with their disk: never to return. Only asked for membership."""
        self.broken: set[str] = set()
        """Outside of the core that is healed: crashed, cut off or frozen for ever."""
        self.auditing = stream(plan.seed, "auditing")
        self.full: set[str] = set()
        """Nodes of the healed core whose disk is full for ever."""
        self.genesis = tuple(
            replace(genesis_state(f), matter=substance.genesis(f)) for f in range(plan.config.fragments)
        )
        """One state of version 0 for all: what follows from it is worked out once."""
        self.past = Past(plan, self.genesis) if plan.mix.old else None
        self._presence_every_s = max(PRESENCE_EVERY_S, plan.config.timing.heartbeat_s)
        self._disks: dict[str, Disk] = {}
        self._incarnations: dict[str, int] = {}
        self._presence: dict[str, dict[str, tuple[int, float]]] = {}
        self.liveness = Liveness(self)
        for spec, at_s in zip(plan.nodes, plan.joins_s, strict=True):
            self.specs[spec.peer] = spec
            self.clock.at(at_s, self.launch, spec)
        if self.past is not None:
            self._begin_with(self.past)
        self.faults = Faults(self, plan)
        self.strangers = [Stranger(self, number) for number in range(plan.mix.strangers)]
        for spec in plan.nodes[-plan.mix.liars :] if len(plan.nodes) >= 3 * plan.mix.liars > 0 else ():
            self.bulk.liars[spec.peer] = Liar(plan.config, stream(plan.seed, f"liar/{spec.peer}"))
        self.clock.at(0.0, self._presence_round)

    def _begin_with(self, past: Past) -> None:
        """Put on the disks what was saved before."""
        for peer in past.members:
            self._incarnations[peer] = FORMER_LIFE
            for checkpoint in past.saved:
                self.disk_of(peer).keep_checkpoint(checkpoint)
                self.disk_of(peer).keep_vote(past.vote(checkpoint.version.header))
        for checkpoint in past.saved:
            self.watch.known(checkpoint.version, checkpoint.watermarks)
            self.backing.known(checkpoint.version)

    # --- nodes ---------------------------------------------------------------------------------------

    def up_hosts(self) -> list[Host]:
        """Running nodes, by name."""
        return [host for _, host in sorted(self.hosts.items()) if host.up]

    def core_hosts(self) -> list[Host]:
        """Honest running nodes that the end of the faults heals."""
        out = self.broken | self.perjurers.keys()
        return [host for host in self.up_hosts() if host.peer not in out]

    def staying(self) -> int:
        """Nodes that will be there in the end, for all that is known now."""
        leaving = {p for p, host in self.hosts.items() if host.leaving and host.returns_in_s is None}
        out = self.gone | leaving | self.broken | self.perjurers.keys()
        return len([peer for peer in self.specs if peer not in out])

    def disk_of(self, peer: str) -> Disk:
        """Return the disk of a node, with what it has saved."""
        return self._disks.setdefault(peer, Disk(self.specs[peer].write_s))

    def launch(self, spec: NodeSpec) -> None:
        """Start a node, for the first time or again."""
        peer = spec.peer
        known = self.hosts.get(peer)
        if peer in self.gone or (peer in self.broken and self.healed) or (known is not None and known.up):
            return
        disk = self.disk_of(peer)
        self._incarnations[peer] = self._incarnations.get(peer, 0) + 1
        first_step = known.learner.model.step_at(self.clock.now) if known is not None else 0
        self.trace.decision(self.clock.now, peer, f"starts, incarnation {self._incarnations[peer]}")
        host = Host(self, spec, disk, self._incarnations[peer], first_step, peer == self.plan.nodes[0].peer)
        self.hosts[peer] = host
        self.network.endpoints[peer] = host
        host.start()

    def crash(self, host: Host, back_in_s: float | None) -> None:
        """kill -9, and a restart with the same disk unless the machine is lost for ever."""
        if not host.up:
            return
        host.crash()
        self.network.forget(host.peer)
        self.bulk.host_down(host)
        if back_in_s is None or (host.leaving and host.returns_in_s is None):
            self.gone.add(host.peer)
        else:
            self.clock.after(back_in_s, self.launch, host.spec)

    def later_left(self, host: Host) -> None:
        """A node says that it has left: its process ends after this event."""
        self.clock.after(0.0, self._left, host)

    def _left(self, host: Host) -> None:
        if host.up:
            self.trace.decision(self.clock.now, host.peer, "has left")
            if host.returns_in_s is not None:
                host.learner.save_at_leave()
            self.crash(host, host.returns_in_s)

    # --- presence ------------------------------------------------------------------------------------

    def _presence_round(self) -> None:
        """Everybody publishes its record where it can, then reads what has reached it."""
        now = self.clock.now
        up = [host for host in self.up_hosts() if not host.frozen]
        for publisher in up:
            for reader in up:
                if reader is publisher or self._hears_of(reader.peer, publisher.peer):
                    held = self._presence.setdefault(reader.peer, {})
                    held[publisher.peer] = (
                        publisher.incarnation,
                        now + PRESENCE_TTLS * self._presence_every_s,
                    )
        for reader in up:
            held = self._presence[reader.peer]
            members = tuple((p, inc) for p, (inc, expires) in sorted(held.items()) if expires > now)
            reader.later(0.05, reader.feed, PresenceSeen(Roster(members)))
        self.clock.after(self._presence_every_s, self._presence_round)

    def _hears_of(self, reader: str, publisher: str) -> bool:
        """Tell whether a record gets from one to the other: two hidden ones have it from somebody between."""
        network = self.network
        if not {reader, publisher} <= network.hidden:
            network.dial(reader, publisher)
            network.dial(publisher, reader)
            return network.both_ways(reader, publisher)
        between = (host.peer for host in self.up_hosts() if host.peer not in network.hidden)
        return any(network.both_ways(p, reader) and network.both_ways(p, publisher) for p in between)

    # --- what nodes report ---------------------------------------------------------------------------

    def committed(self, host: Host, header: VersionHeader) -> None:
        """A node made a version its own."""
        if header.syncer == host.peer:
            self.last_syncer = host.peer
        state = header.state_digest.hex()[:12]
        self.trace.fact(host.peer, f"holds f{header.fragment} v{header.number} {state} term {header.term}")
        self.exclusion.takes(host, header)
        self.liveness.committed(header.fragment)

    # --- the run -------------------------------------------------------------------------------------

    def heal(self) -> None:
        """Faults stop for a core of the nodes: its links and disks recover, it is started. The rest of them
        is broken for ever."""
        self.broken = self.faults.left_broken()
        self.healed = True
        self.faults.trap = None
        self.network.heal()
        self._expose_somebody()
        text = f"faults stop, but for {','.join(sorted(self.broken))}" if self.broken else "faults stop"
        self.trace.decision(self.clock.now, "-", text)
        self.faults.break_for_ever(self.broken)
        self.full = self.faults.left_full(self.broken)
        for peer in sorted(self.full):
            self.trace.decision(self.clock.now, peer, "disk is full for ever")
        for peer, disk in sorted(self._disks.items()):
            disk.full, disk.slow_factor = peer in self.full, 1.0
        for _, spec in sorted(self.specs.items()):
            host = self.hosts.get(spec.peer)
            if (host is None or not host.up) and spec.peer not in self.broken:
                self.clock.after(0.5, self.launch, spec)
        self._check_bounds()
        self.liveness.begin()

    def _expose_somebody(self) -> None:
        """Make hidden nodes dialable where only such are left: without one that can be dialled there is no
        swarm."""
        leaving = {host.peer for host in self.up_hosts() if host.leaving}
        exposed = self.specs.keys() - self.gone - self.broken - leaving - self.network.hidden
        if self.network.hidden and not exposed:
            self.network.hidden = frozenset()
            for host in self.up_hosts():
                host.run_when_awake(host.look_outside)

    def run(self) -> SeedResult:
        """Play the plan to its end."""
        violation = detail = stuck = ""
        try:
            self.clock.run_until(self.plan.faults_until_s)
            self.heal()
            stuck = self.liveness.settle(self.plan.settle_s)
            if not stuck:
                self._check_end()
        except Violation as error:
            violation, detail = error.rule, str(error)
        except Exception:  # noqa: BLE001 - any escape from the core is a finding, reported with its seed
            violation, detail = "crashed", traceback.format_exc(limit=-6)
        if violation or stuck:
            self.trace.decision(self.clock.now, "-", f"FAILED: {detail or stuck}")
        return SeedResult(
            seed=self.plan.seed,
            mix=self.plan.mix_name,
            nodes=len(self.specs),
            digest=self.trace.digest(),
            virtual_s=round(self.clock.now, 1),
            events=self.clock.fired,
            messages=self.network.messages,
            versions=self.watch.versions,
            elections=self.watch.elections,
            split_terms=self.watch.forks,
            switches=self.watch.switches,
            lost_to_forks=self.liveness.lost_to_forks,
            faults=sum(self.faults.counts.values()),
            fault_kinds=dict(sorted(self.faults.counts.items())),
            records=dict(sorted(self.records.items())),
            violation=violation,
            detail=detail,
            stuck=stuck,
            losses=self.losses(),
            tail=self.trace.tail() if violation or stuck else (),
        )

    def losses(self) -> Losses | None:
        """Evaluate the heaviest heads."""
        stores = [host.stores for host in self.core_hosts()]
        if not stores:
            return None
        best = [
            max((mine[f] for mine in stores), key=lambda store: store.version.header.head().weight)
            for f in range(self.plan.config.fragments)
        ]
        return self.substance.losses([store.state.matter for store in best])

    def _check_end(self) -> None:
        now = self.clock.now
        for transfer in self.bulk.open.values():
            receiver = transfer.receiver
            owes = receiver.up and receiver.peer not in self.broken
            if owes and now - transfer.opened_s > TRANSFER_PATIENCE_S:
                header = transfer.offer.signed.header
                where = f"{transfer.receiver.peer} fragment {header.fragment} from {transfer.sender.peer}"
                raise Violation("last-word", f"{where}: never answered")
        for host in self.core_hosts():
            limit = len(host.stores) * (10 + 2 * len(self.specs))
            if len(host.tickets) > limit:
                raise Violation("bounded", f"{host.peer} ends with {len(host.tickets)} buffers")
        self._check_bounds()

    def _check_bounds(self) -> None:
        for host in self.core_hosts():
            text = too_large(host.core, len(self.specs))
            if text:
                raise Violation("bounded", f"{host.peer}: {text}")
