"""A simulated swarm: clock, network, disks and nodes of one seed, from the first start to the verdict.

`World` has everything; `run_seed` plays one. `Faults` are drawn per seed within what the protocol promises to
survive.
"""

from __future__ import annotations

import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from msgspec import structs

from p2pdiloco.core.api.events import (
    AcceptTransfer,
    CommitVersion,
    Effect,
    Guided,
    LeaveRequested,
    Merge,
    Persist,
    PresenceSeen,
    SayWord,
    Send,
    UpdateRecord,
)
from p2pdiloco.core.api.messages import Elected, VoteGranted, VoteRequest
from p2pdiloco.core.api.papers import THE_OWNER, Admission, Grant, Paper, Word, paper_bytes
from p2pdiloco.core.api.versions import MemberList, VersionHeader
from p2pdiloco_lab.simulation.lineage import (
    NOTHING,
    Clock,
    HashCrypto,
    Losses,
    Substance,
    genesis_state,
)
from p2pdiloco_lab.simulation.liveness import Backing, Liveness
from p2pdiloco_lab.simulation.seed_plan import (
    MAX_JOINS,
    OWNER,
    RUN,
    SURE,
    NodeSpec,
    PaperKind,
    WorldPlan,
    draw_plan,
    draw_spec,
    random_stream,
    stated_lengths,
)
from p2pdiloco_lab.simulation.seed_report import SeedResult, Trace, Violation
from p2pdiloco_lab.simulation.sim_crowd import Crowd, Rider
from p2pdiloco_lab.simulation.sim_disk import FORMER_LIFE, Disk, Past
from p2pdiloco_lab.simulation.sim_host import Host
from p2pdiloco_lab.simulation.sim_liars import Liar, Perjurer, Stranger, Withholder, lying_members
from p2pdiloco_lab.simulation.sim_network import Bulk, Network
from p2pdiloco_lab.simulation.sim_rules import Exclusion, InvariantWatch, too_large
from p2pdiloco_lab.simulation.sim_usurper import usurpers

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
        self.network = Network(self.clock, random_stream(plan.seed, "network"), plan.mix, RUN)
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
        self.crowd = None if plan.crowd is None else Crowd(self, plan.crowd)
        self.perjurers: dict[str, Perjurer | Withholder | Rider] = {**usurpers(self), **lying_members(self)}
        if self.crowd is not None:
            self.perjurers.update(self.crowd.riders)
        """Members whose lies can be proved, or that withhold. None of the rules for honest ones is theirs."""
        self.owner = Owner(self, plan)
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
        self.auditing = random_stream(plan.seed, "auditing")
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
        if self.crowd is not None:
            self.crowd.join()
        self.clock.at(plan.sleeps_s, self._sleep)
        self.faults = Faults(self, plan)
        self.strangers = [Stranger(self, number) for number in range(plan.mix.strangers)]
        for spec in plan.nodes[-plan.mix.liars :] if len(plan.nodes) >= 3 * plan.mix.liars > 0 else ():
            self.bulk.liars[spec.peer] = Liar(plan.config, random_stream(plan.seed, f"liar/{spec.peer}"))
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
        self.owner.tells(host, [peer])

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

    def _sleep(self) -> None:
        for peer, until_s in self.plan.wakes_s:
            if (host := self.hosts.get(peer)) is not None:
                self.trace.decision(self.clock.now, peer, f"sleeps until {until_s:.1f} s")
                self.crash(host, until_s - self.clock.now)

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
            reader.later(0.05, reader.feed, PresenceSeen(MemberList(members)))
            self.owner.tells(reader, [peer for peer, _ in members])
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
        if self.crowd is not None and not self.plan.seated_riders:
            self.crowd.check_tokens()
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


# Papers.

INVITE = "k0"
INVITE_USES = 64
HEARD_WITHIN_S = 3.0
"""Time in which papers of a listed member come, with what else its door tells."""
LAST_WORD = 100
"""Number of the owner's word that ends a seat: above those by which seats begin."""


class Owner:
    """Owner of the run, in worlds where seats come by papers; in others it says nothing.

    A node has its own paper from its start on, and another's some moments after that node is listed. So it
    also hears that a seat has ended: of anybody who is there.
    """

    def __init__(self, world: World, plan: WorldPlan) -> None:
        self.papers: dict[str, Paper] = {}
        """Papers that give a seat, by the node that has it."""
        self._world, self._plan = world, plan
        self._rng = random_stream(plan.seed, "heard papers")
        self._ending: Word | None = None
        self._told: dict[str, tuple[int, set[Paper]]] = {}
        """Papers that each node has heard of in its present life."""
        if plan.unseated:
            world.clock.at(plan.unseated_s, self._unseat)

    @property
    def unseated(self) -> str:
        """Node whose seat it has ended; empty: nobody's."""
        return self._ending.peer if self._ending else ""

    def _unseat(self) -> None:
        peer = self._plan.unseated
        self._world.trace.decision(self._world.clock.now, peer, "the owner ends its seat")
        self._ending = self._word(peer, LAST_WORD, False)

    def _word(self, peer: str, number: int, seated: bool) -> Word:
        word = Word(RUN, peer, number, seated)
        return structs.replace(word, signatures=((THE_OWNER, HashCrypto(OWNER).sign(paper_bytes(word))),))

    def _paper(self, peer: str) -> Paper:
        """Make a node's paper, once."""
        if peer not in self.papers:
            invites = self._plan.papers is PaperKind.INVITE
            self.papers[peer] = _admission(peer) if invites else self._word(peer, len(self.papers) + 1, True)
        return self.papers[peer]

    def tells(self, host: Host, peers: Sequence[str]) -> None:
        """Let a node hear the papers of these, its own at once."""
        if self._plan.papers is None:
            return
        if self._plan.papers is PaperKind.SEATS and not self._seats_are_gone(host):
            for peer in peers:
                self._paper(peer)
            for peer in sorted({*peers, self.unseated} - {""}):  # one that is listed no more, too
                host.feed(SayWord(peer, seated=peer != self.unseated))
            return
        life, told = self._told.get(host.peer, (0, set()))
        if life != host.incarnation:
            told = set()
            self._told[host.peer] = host.incarnation, told
        known = [self._paper(peer) for peer in peers if peer not in self._plan.config.seats]
        ending = [self._ending] if self._ending and set(peers) - {host.peer} else []
        news = tuple(paper for paper in (*known, *ending) if paper not in told)
        told.update(news)
        if news and [*peers] == [host.peer]:
            host.feed(Guided(papers=news))
        elif news:
            host.later(self._rng.uniform(0.0, HEARD_WITHIN_S), host.feed, Guided(papers=news))

    def _seats_are_gone(self, host: Host) -> bool:
        """Tell whether half of the seats that a node knows, or more, never come back: what they do not know
        of, the others cannot tell it, and the owner speaks."""
        world = self._world
        rosters = [fragment.context.roster.deputies for fragment in host.core.fragments]
        gone = world.gone | world.broken
        return world.healed and any(2 * len(seats - gone) <= len(seats) for seats in rosters)


def _admission(peer: str) -> Admission:
    granted = Grant(RUN, INVITE, 0, INVITE_USES, b"")
    granted = structs.replace(granted, signature=HashCrypto(OWNER).sign(paper_bytes(granted)))
    shown = Admission(granted, peer, b"")
    return structs.replace(shown, signature=HashCrypto(INVITE).sign(paper_bytes(shown)))


# Faults.

NOT_BEFORE_THE_END_S = 1e9
"""Faults end long before; what is still down is started again then."""
WHOLE_CORE_SHARE = 0.5
"""Share of the seeds in which every node is healed in the end."""
FULL_SHARE = 0.5
"""Share of the seeds with full disks in which one disk is full for ever."""
LEAVE_PATIENCE_S = 20.0
"""A node that was asked to leave must have left by then, whatever the network does."""
MOMENTS: tuple[type[Any], ...] = (
    VoteGranted,
    VoteRequest,
    Elected,
    AcceptTransfer,
    Merge,
    UpdateRecord,
    CommitVersion,
)
KINDS = (
    "crash",
    "replace",
    "learner_crash",
    "freeze",
    "leave",
    "visit",
    "join",
    "partition",
    "slow_link",
    "slow_disk",
    "full_disk",
    "slow_learner",
)
PER_SEED = ("blackout",)
"""Faults of the whole swarm: their rate does not grow with it."""


class Faults:
    """Draws the times of all faults at once, and their victims when they happen."""

    def __init__(self, world: World, plan: WorldPlan) -> None:
        self._world = world
        self._plan = plan
        self._rng = random_stream(plan.seed, "faults")
        self.trap: type[Any] | None = None
        self.counts: dict[str, int] = {}
        minutes = (plan.faults_until_s - plan.faults_from_s) / 60.0
        self._hardware = random_stream(plan.seed, "hardware")
        for kind in (*KINDS, *PER_SEED):
            rate: float = getattr(plan.mix, kind)
            if kind in KINDS:
                rate *= len(plan.nodes) * minutes
            for _ in range(poisson(self._rng, rate)):
                at_s = self._rng.uniform(plan.faults_from_s, plan.faults_until_s)
                action: Callable[[], None] = getattr(self, f"_{kind}")
                world.clock.at(at_s, self._strike, kind, action)

    def _strike(self, kind: str, action: Callable[[], None]) -> None:
        if self._plan.faults:
            self.counts[kind] = self.counts.get(kind, 0) + 1
            action()

    # --- the end -------------------------------------------------------------------------------------

    def left_broken(self) -> set[str]:
        """Draw whom the end of the faults does not heal: often nobody, else every node but a core.

        The core holds a full member, or one node that comes back with every fragment saved: else there is no
        run.
        """
        world, rng = self._world, self._rng
        peers = sorted(p for p in world.specs if p not in world.gone)
        if (
            self._plan.mix.calm
            or world.perjurers
            or self._plan.mix.crowd
            or not self._plan.faults
            or len(peers) < 2
            or rng.random() < WHOLE_CORE_SHARE
        ):
            return set()
        core = set(rng.sample(peers, rng.randint(1, len(peers) - 1)))
        members = [h.peer for h in world.up_hosts() if h.may_serve and not h.leaving]
        saved = [p for p in peers if self._goes_on_alone(p)]
        holders = members or saved
        if not holders:
            return set()
        core.add(rng.choice(holders))
        if self._plan.papers is not None:
            core.add(SURE)
        core.update(h.peer for h in world.up_hosts() if h.leaving)
        return set(peers) - core

    def _goes_on_alone(self, peer: str) -> bool:
        """Tell whether a node has the run. A running one that came with nothing waits, even if it saved a
        copy since."""
        host = self._world.hosts.get(peer)
        if host is not None and host.up:
            return host.core.came_with_run
        return self._world.disk_of(peer).holds_run(self._plan.config.fragments)

    def left_full(self, broken: set[str]) -> set[str]:
        """Draw whose disk stays full for ever, if anybody's: of two or more that stay, never the only one.

        Nor one through which alone the others know of each other: they would be majorities of one, and work
        alone.
        """
        world, rng = self._world, random_stream(self._plan.seed, "full disks")
        if not self._plan.mix.full_disk or not self._plan.faults or rng.random() >= FULL_SHARE:
            return set()
        leaving = {host.peer for host in world.up_hosts() if host.leaving}
        stay = sorted(world.specs.keys() - world.gone - broken - leaving)
        if self._plan.papers is not None:  # without its vote there may be nobody's
            stay = [peer for peer in stay if peer != SURE]
        hidden = world.network.hidden
        apart = [peer for peer in stay if len(stay) > 2 and hidden.issuperset(p for p in stay if p != peer)]
        peer = rng.choice(stay) if len(stay) > 1 else ""
        return {peer} if peer and peer not in apart else set()

    def break_for_ever(self, peers: set[str]) -> None:
        """Break each of these in one of three ways: dead, frozen, or alive behind a link that carries
        nothing."""
        world, rng = self._world, self._rng
        for peer in sorted(peers):
            kind = rng.choice(["crashed", "frozen", "cut off"])
            self._note(peer, f"{kind} for ever")
            host = world.hosts.get(peer)
            if kind == "crashed" and host is not None and host.up:
                world.crash(host, NOT_BEFORE_THE_END_S)
            elif kind == "frozen" and host is not None:
                host.freeze()
            self._cut_off(peer, [other for other in sorted(world.specs) if other not in peers])

    def _cut_off(self, peer: str, others: list[str]) -> None:
        """Also of the dead and the frozen: those that come to life again by a timer find nobody."""
        if self._world.hosts.get(peer) is not None and not self._world.hosts[peer].frozen:
            for other in others:
                self._world.network.block(peer, other)
                self._world.network.block(other, peer)

    def chance(self, share: float) -> bool:
        """Draw whether this one of many small operations goes wrong; none does once faults have stopped."""
        active = share > 0.0 and self._plan.faults and not self._world.healed
        return active and self._hardware.random() < share

    def _victim(self) -> Host | None:
        """Any node that is up; often the one that published last, for syncers are the interesting ones."""
        up = self._world.up_hosts()
        if not up:
            return None
        if self._world.last_syncer and self._rng.random() < 0.4:
            for host in up:
                if host.peer == self._world.last_syncer:
                    return host
        return self._rng.choice(up)

    def _note(self, peer: str, text: str) -> None:
        self._world.trace.decision(self._world.clock.now, peer, f"fault: {text}")

    # --- nodes ---------------------------------------------------------------------------------------

    def _crash(self) -> None:
        """Kill a node at once or, as often, at the next moment of a chosen kind, when most is at stake."""
        if self._rng.random() < 0.5:
            self.trap = self._rng.choice(MOMENTS)
            return
        host = self._victim()
        if host is not None:
            down_s = self._rng.choice([0.3, 2.0, 8.0, 20.0]) * self._rng.uniform(0.5, 1.5)
            down_s *= self._plan.mix.lasts
            self._note(host.peer, f"kill -9, back in {down_s:.1f} s")
            self._world.crash(host, back_in_s=down_s)

    def _blackout(self) -> None:
        """Kill every node within a second. Some come back soon, some later, some only after the faults."""
        world, rng = self._world, self._rng
        self._note("-", "all nodes are killed within a second")
        for host in world.up_hosts():
            back_s = rng.choice([rng.uniform(0.3, 3.0), rng.uniform(1.0, 25.0), NOT_BEFORE_THE_END_S])
            world.clock.after(rng.uniform(0.0, 1.0), self._kill, host, back_s)

    def _kill(self, host: Host, back_s: float) -> None:
        if not self._world.healed:
            self._world.crash(host, back_s)

    def spring(self, host: Host, effect: Effect) -> None:
        """A trap is set: kill the node whose effect is of the awaited kind, in the middle of it."""
        message = effect.message if isinstance(effect, Send) else None
        record = effect.record if isinstance(effect, Persist) else None
        trap = self.trap
        if trap is not None and trap in (type(effect), type(message), type(record)):
            self._note(host.peer, f"kill -9 at {trap.__name__}")
            self.trap = None
            self._world.clock.after(0.0, self._world.crash, host, self._rng.choice([0.2, 1.0, 6.0]))

    def _removable(self) -> Host | None:
        """A node that may go for ever: enough others stay, and each fragment's state with them."""
        host, world = self._victim(), self._world
        others = [h for h in world.up_hosts() if h is not host and not h.leaving]
        # One of them must have saved something: else its crash, later, would end the run for good.
        serving = [h for h in others if h.may_serve and h.disk.holds_run(len(h.stores))]
        staying = world.staying() - 1
        enough = staying >= max(1, self._plan.config.quorum)
        sure = host is not None and host.peer == SURE and self._plan.papers is not None
        return host if host is not None and serving and enough and not sure else None

    def _replace(self) -> None:
        host = self._removable()
        if host is not None:
            self._note(host.peer, "machine lost with its disk")
            self._world.crash(host, back_in_s=None)
            self._join()

    def _leave(self) -> None:
        host = self._removable()
        if host is None or host.leaving:
            return
        self._note(host.peer, "asked to leave")
        self._ask_to_leave(host)

    def _visit(self) -> None:
        """Leaves in good order, and comes back with what it saved."""
        host = self._victim()
        if host is None or host.leaving:
            return
        host.returns_in_s = self._rng.uniform(0.5, 15.0)
        self._note(host.peer, f"asked to leave, back in {host.returns_in_s:.1f} s")
        self._ask_to_leave(host)

    def _ask_to_leave(self, host: Host) -> None:
        host.leaving = True
        host.run_when_awake(host.feed, LeaveRequested())
        self._world.clock.after(LEAVE_PATIENCE_S, self._must_have_left, host, host.thaws)

    def _must_have_left(self, host: Host, thaws: int) -> None:
        if host.up and (host.frozen or host.thaws != thaws):  # it heard of it late, or had less time
            self._world.clock.after(LEAVE_PATIENCE_S, self._must_have_left, host, host.thaws)
        elif host.up:
            raise Violation("leaves-in-time", f"{host.peer} was asked {LEAVE_PATIENCE_S} s ago")

    def _join(self) -> None:
        world, rng = self._world, self._rng
        if len(world.specs) >= len(self._plan.nodes) + MAX_JOINS:
            return
        some = rng.choice(self._plan.nodes)
        spec = draw_spec(rng, f"n{len(world.specs)}", self._plan.mix, some.step_time_s, 1.5)
        self._note(spec.peer, "joins")
        world.clock.after(rng.uniform(0.0, 3.0), world.launch, spec)
        world.specs[spec.peer] = spec

    def _learner_crash(self) -> None:
        host = self._victim()
        if host is not None and host.learner.model.running:
            self._note(host.peer, "learner dies")
            host.learner.crash(self._rng.uniform(0.5, 5.0))

    def _slow_learner(self) -> None:
        """Another program takes the processor for a while."""
        host = self._victim()
        if host is not None:
            factor, for_s = self._rng.uniform(1.3, 4.0), self._rng.uniform(3.0, 20.0)
            self._note(host.peer, f"learner {factor:.1f} times slower for {for_s:.1f} s")
            host.learner.slow_down(factor)
            self._world.clock.after(for_s, host.learner.slow_down, 1.0)

    def _freeze(self) -> None:
        host = self._victim()
        if host is None or host.frozen:
            return
        for_s = self._rng.choice([0.5, 4.0, 12.0]) * self._rng.uniform(0.5, 1.5) * self._plan.mix.lasts
        self._note(host.peer, f"stands still for {for_s:.1f} s")
        host.freeze()
        self._world.clock.after(for_s, host.thaw, for_s)

    # --- links and disks -----------------------------------------------------------------------------

    def _partition(self) -> None:
        rng, world = self._rng, self._world
        peers = sorted(world.specs)
        rng.shuffle(peers)
        cut = rng.randint(1, max(1, len(peers) // 2))
        one, other = peers[:cut], peers[cut:]
        kind = rng.choice(["symmetric", "symmetric", "asymmetric", "flapping", "bridged"])
        for_s = rng.choice([3.0, 8.0, 25.0]) * rng.uniform(0.5, 1.3) * self._plan.mix.lasts
        self._note("-", f"{kind} cut of {','.join(one)} for {for_s:.1f} s")
        # A bridge is a node that both sides reach: who is connected with whom is not transitive then.
        links = [(a, b) for a in one for b in (other[1:] if kind == "bridged" else other)]
        if kind != "asymmetric":
            links += [(b, a) for a, b in links]
        times = [(0.0, for_s)]
        if kind == "flapping":
            times = [(i * for_s / 4, i * for_s / 4 + for_s / 8) for i in range(4)]
        for start_s, end_s in times:
            world.clock.after(start_s, self._cut, links)
            world.clock.after(end_s, self._mend, links)

    def _cut(self, links: list[tuple[str, str]]) -> None:
        if not self._world.healed:
            for source, target in links:
                self._world.network.block(source, target)

    def _mend(self, links: list[tuple[str, str]]) -> None:
        if not self._world.healed:
            for source, target in links:
                self._world.network.unblock(source, target)

    def _slow_link(self) -> None:
        peers = sorted(self._world.specs)
        if len(peers) >= 2:
            a, b = self._rng.sample(peers, 2)
            factor = self._rng.uniform(3.0, 30.0)
            self._note(a, f"link to {b} {factor:.0f} times slower")
            self._world.network.slow_down(a, b, factor)

    def _slow_disk(self) -> None:
        host = self._victim()
        if host is not None:
            self._note(host.peer, "disk becomes slow")
            host.disk.slow_factor = self._rng.uniform(5.0, 60.0)

    def _full_disk(self) -> None:
        host = self._victim()
        if host is not None:
            self._note(host.peer, "disk is full")
            disk = host.disk
            disk.full = True
            self._world.clock.after(self._rng.uniform(2.0, 15.0), self._room_again, host.peer)

    def _room_again(self, peer: str) -> None:
        if peer not in self._world.full:
            self._world.disk_of(peer).full = False


def poisson(rng: random.Random, mean: float) -> int:
    """A Poisson draw by counting exponential gaps."""
    count, at = 0, rng.expovariate(1.0)
    while at < mean:
        count += 1
        at += rng.expovariate(1.0)
    return count


# Seeds.


def run_seed(
    seed: int,
    mix: str | None = None,
    nodes: int | None = None,
    write: Callable[[str], None] | None = None,
    verbose: bool = False,
    substance: Callable[[WorldPlan], Substance] = lambda plan: NOTHING,
) -> SeedResult:
    """Play one seed; `write` gets the trace line by line: decisions, and all else too if `verbose`.

    `substance` makes the world's arithmetic (`p2pdiloco_lab.vectors`)."""
    plan = draw_plan(seed, mix, nodes)
    return World(plan, write, verbose, substance(plan)).run()
