"""Volunteers: nodes on home links that come and go, and what of their work reaches the merged state.

Sessions have exponential lengths. A session ends without a word (the default) or by an orderly leave, and
after a short gap its place is taken again: by the same machine with its disk, or by one that nobody knows. So
the number of nodes stays about constant. Nothing else goes wrong but what the `wan` mix does to messages.

Goodput is measured over a window of time, by the lineage: inner steps whose work is in the heaviest chain,
over the steps that the same machines would have made in the time they were switched on (arXiv 2604.21428).
What is missing was not made (catching up) or was lost (made, but in no contribution when the session ended
without a word).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from p2pdiloco.core.api.config import CoreConfig, Timing
from p2pdiloco.core.api.events import CommitVersion, Effect, LeaveRequested
from p2pdiloco_lab.simulation.lineage import FragmentLineage, missing_spans
from p2pdiloco_lab.simulation.seed_plan import MIXES, RUN, NodeSpec, WorldPlan, genesis_version, random_stream
from p2pdiloco_lab.simulation.seed_report import Violation
from p2pdiloco_lab.simulation.sim_host import Host
from p2pdiloco_lab.simulation.sim_world import World


@dataclass(frozen=True, slots=True)
class Home:
    """A run among volunteers. Protocol numbers are those of the preset `small`, where they matter here."""

    nodes: int
    mean_session_s: float
    orderly_share: float = 0.0
    """Share of sessions that end by an orderly leave instead of without a word."""
    return_share: float = 0.5
    """Share that is followed by the same machine with its disk; the others by a new one."""
    mean_gap_s: float = 30.0
    warm_up_s: float = 150.0
    window_s: float = 900.0
    drain_s: float = 150.0
    """After the window: what was made in it is merged."""
    uplink_bytes_s: float = 2.5e6
    """20 Mbit/s."""
    parameters: int = 10_700_000
    fragments: int = 12
    inner_steps: int = 48
    delay_steps: int = 6
    step_s: tuple[float, float] = (1.0, 1.5)
    """Inner step time, uniform between the machines."""
    group_size: int = 16
    term_versions: int = 16
    """The genesis node is alone at first and takes all offices: shorter terms spread them sooner."""
    heartbeat_s: float = 0.5
    """Longer ones make a large swarm cheaper to play; what depends on them is stretched with them."""

    def config(self) -> CoreConfig:
        """The protocol part: int8 contributions and updates, equal fragments."""
        groups = -(-self.nodes // self.group_size)
        usual = Timing()
        slower = self.heartbeat_s / usual.heartbeat_s
        return CoreConfig(
            run=RUN,
            inner_steps=self.inner_steps,
            delay_steps=self.delay_steps,
            quorum=1,
            grace_fraction=0.8,
            grace_cap_s=30.0,
            group_size=self.group_size,
            term_versions=self.term_versions,
            log_versions=16,
            max_base_age_versions=4,
            tokens_per_step=8192,
            update_codec="sim",
            contribution_codec="sim",
            genesis_versions=tuple(genesis_version(f, groups) for f in range(self.fragments)),
            max_payload_bytes=(self.parameters // self.fragments,) * self.fragments,
            seats=tuple(f"h{index}" for index in range(self._machines)),
            timing=Timing(
                heartbeat_s=self.heartbeat_s,
                suspect_s=usual.suspect_s * slower,
                member_ttl_s=usual.member_ttl_s * slower,
            ),
        )

    def plan(self, seed: int) -> WorldPlan:
        """Plan a world: all nodes start within seconds; faults are sessions and the weather of `wan`."""
        rng = random_stream(seed, "home/specs")
        return WorldPlan(
            seed=seed,
            mix_name="wan",
            mix=replace(MIXES["wan"], corrupt=0.0, crash=0.0, slow_link=0.0, slow_learner=0.0),
            config=self.config(),
            nodes=tuple(
                self.machine(f"h{i}", rng.uniform(*self.step_s), rng.random()) for i in range(self.nodes)
            ),
            joins_s=(0.0, *(rng.uniform(0.5, 8.0) for _ in range(self.nodes - 1))),
            faults_from_s=0.0,
            faults_until_s=self.end_s,
            settle_s=0.0,
            faults=False,
        )

    def machine(self, peer: str, step_time_s: float, share: float) -> NodeSpec:
        """A home computer."""
        return NodeSpec(
            peer=peer,
            step_time_s=step_time_s,
            bandwidth_bytes_s=self.uplink_bytes_s,
            write_s=0.02,
            checkpoint_every_s=60.0 * (0.5 + share),
            clock_offset_s=1e5 * share,
        )

    @property
    def _machines(self) -> int:
        """Number of machines that have a seat: hardly ever do so many come."""
        sessions = self.nodes * self.end_s / self.mean_session_s
        return self.nodes + 8 + round(2 * sessions * (1.0 - self.return_share))

    @property
    def end_s(self) -> float:
        """Time at which a simulation of this ends."""
        return self.warm_up_s + self.window_s + self.drain_s


@dataclass(slots=True)
class Session:
    """One session of one machine, as far as it lies in the window."""

    host: Host
    online_s: float = 0.0
    first_step: int = 0
    end_step: int = 0
    from_s: float = 0.0


@dataclass(slots=True)
class Outcome:
    """Result of a window. Shares are of the steps that undisturbed learners would have made."""

    goodput: float = 0.0
    not_made: float = 0.0
    """Start-up and catching up."""
    lost: float = 0.0
    """Made in a session that has ended, and in no contribution of the heaviest chain."""
    pending: float = 0.0
    """Steps not merged yet when the simulation ended, though the session goes on."""
    participation: list[float] = field(default_factory=list)
    """Contributors over running learners, per version made in the window."""
    tokens_made: float = 0.0
    tokens_lost: float = 0.0
    sessions_ended: int = 0
    catch_up_s: list[float] = field(default_factory=list)
    """Start of a session to its learner's first step, of sessions begun in the window."""
    mean_up: float = 0.0
    versions: int = 0
    elections: int = 0
    messages: int = 0


class Sessions(World):
    """A world in which the nodes have sessions."""

    def __init__(self, home: Home, seed: int) -> None:
        self.home = home
        self.outcome = Outcome()
        self._rng = random_stream(seed, "home/sessions")
        self._open: dict[str, Session] = {}
        self._closed: list[Session] = []
        self._machines = home.nodes
        self._measuring = False
        super().__init__(home.plan(seed))
        self.on_effect = self._watch_effect
        self.clock.at(home.warm_up_s, self._begin_window)
        self.clock.at(home.warm_up_s + home.window_s, self._end_window)

    def play(self) -> Outcome:
        """Play it, from start to the figures.

        Raises:
            Violation: the protocol broke one of its rules.
        """
        self.clock.run_until(self.home.end_s)
        self._sum_up()
        return self.outcome

    # --- sessions ------------------------------------------------------------------------------------

    def launch(self, spec: NodeSpec) -> None:
        """A session begins."""
        before = self.hosts.get(spec.peer)
        super().launch(spec)
        host = self.hosts.get(spec.peer)
        if host is None or host is before:
            return
        self.clock.after(self._rng.expovariate(1.0 / self.home.mean_session_s), self._over, host)
        if self._measuring:
            self._open_session(host)
            self._await_learner(host, self.clock.now)

    def crash(self, host: Host, back_in_s: float | None) -> None:
        """A session ends, this way or that; whoever replaces a lost machine comes after a gap."""
        if host.up:
            self._close_session(host)
            self.outcome.sessions_ended += self._measuring
            if back_in_s is None or (host.leaving and host.returns_in_s is None):
                self._replace(host)
        super().crash(host, back_in_s)

    def _gap_s(self) -> float:
        return self._rng.expovariate(1.0 / self.home.mean_gap_s)

    def _over(self, host: Host) -> None:
        if not host.up or host.leaving:
            return
        returns = self._rng.random() < self.home.return_share or not self._others_can_carry_on(host)
        back_in_s = self._gap_s() if returns else None
        if self._rng.random() < self.home.orderly_share:
            host.leaving, host.returns_in_s = True, back_in_s
            host.run_when_awake(host.feed, LeaveRequested())
        else:
            self.crash(host, back_in_s)

    def _others_can_carry_on(self, host: Host) -> bool:
        """The last machine that has anything saved may not be lost with its disk."""
        return any(h.may_serve and not h.leaving for h in self.up_hosts() if h is not host)

    def _replace(self, host: Host) -> None:
        home = self.home
        peer = f"h{self._machines}"
        self._machines += 1
        spec = home.machine(peer, self._rng.uniform(*home.step_s), self._rng.random())
        self.specs[peer] = spec
        self.clock.after(self._gap_s(), self.launch, spec)

    # --- the ledger ----------------------------------------------------------------------------------

    def _begin_window(self) -> None:
        self._measuring = True
        self.outcome.elections = -self.watch.elections
        self.outcome.messages = -self.network.messages
        for host in self.up_hosts():
            self._open_session(host)

    def _end_window(self) -> None:
        for host in self.up_hosts():
            self._close_session(host)
        self._measuring = False
        self.outcome.elections += self.watch.elections
        self.outcome.messages += self.network.messages

    def _open_session(self, host: Host) -> None:
        step = host.learner.model.step_at(self.clock.now)
        self._open[host.peer] = Session(host, first_step=step, from_s=self.clock.now)

    def _close_session(self, host: Host) -> None:
        session = self._open.pop(host.peer, None)
        if session is not None:
            session.online_s = self.clock.now - session.from_s
            session.end_step = host.learner.model.step_at(self.clock.now)
            self._closed.append(session)

    def _await_learner(self, host: Host, since_s: float) -> None:
        if not host.up:
            return
        if host.learner.model.running:
            self.outcome.catch_up_s.append(self.clock.now - since_s)
        else:
            self.clock.after(0.1, self._await_learner, host, since_s)

    def _watch_effect(self, host: Host, effect: Effect) -> None:
        if not isinstance(effect, CommitVersion) or not self._measuring:
            return
        header = effect.version.header
        if header.syncer == host.peer and header.digest() not in self.watch.headers:
            alive = {h.peer for h in self.up_hosts() if h.learner.model.running}
            part = alive & {contributor.learner for contributor in header.contributors}
            self.outcome.participation.append(len(part) / max(1, len(alive)))
            self.outcome.versions += 1

    # --- figures -------------------------------------------------------------------------------------

    def _heaviest(self, fragment: int) -> FragmentLineage:
        up = self.up_hosts()
        if not up:
            raise Violation("somebody-is-up", "nobody is left at the end of the window")
        best = max(up, key=lambda h: h.stores[fragment].version.header.head().weight)
        return best.stores[fragment].state

    def _sum_up(self) -> None:
        """Every step of every session against the heaviest chain, averaged over the fragments."""
        home, outcome = self.home, self.outcome
        states = [self._heaviest(fragment) for fragment in range(home.fragments)]
        undisturbed = made = merged = pending = 0.0
        for session in self._closed:
            host, steps = session.host, session.end_step - session.first_step
            undisturbed += session.online_s / host.spec.step_time_s
            made += steps
            for state in states:
                covered = state.covered.get(host.peer, ())
                gaps = missing_spans(covered, session.first_step, session.end_step)
                missing = sum(end - first for first, end in gaps)
                merged += (steps - missing) / len(states)
                pending += missing / len(states) if host.up else 0.0
        per_step = home.config().tokens_per_step
        outcome.goodput = merged / undisturbed if undisturbed else math.nan
        outcome.pending = pending / undisturbed
        outcome.lost = (made - merged - pending) / undisturbed
        outcome.not_made = 1.0 - made / undisturbed
        outcome.tokens_made = made * per_step
        outcome.tokens_lost = (made - merged - pending) * per_step
        outcome.mean_up = sum(s.online_s for s in self._closed) / home.window_s
