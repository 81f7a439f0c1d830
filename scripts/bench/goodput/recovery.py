"""Cost of a death in the simulated protocol, in a data centre; `bench_goodput.py` feeds its table with it.

M learners of a 5-billion-parameter model (int8 on the wire, 24 fragments, H = 24, tau = 2, K = 1 as in the
paper) on 100 Gbit/s links run the production core under the virtual clock. Every `SPACING_S` one of three
things happens to a random node: its learner process dies; the node is killed and comes back with its disk; it
is killed and a machine that has nothing takes its place.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from p2pdiloco.core.api.config import CoreConfig, Timing
from p2pdiloco.core.api.events import CommitVersion, Effect, Record
from p2pdiloco_lab.simulation.lineage import missing_spans
from p2pdiloco_lab.simulation.seed_plan import MIXES, RUN, NodeSpec, WorldPlan, genesis_version, random_stream
from p2pdiloco_lab.simulation.sim_host import Host
from p2pdiloco_lab.simulation.sim_world import World

KINDS = ("learner", "node", "machine")
FRAGMENTS = 24
INNER_STEPS = 24
STEP_S = 1.0
PARAMETERS = 5_000_000_000
LINK_BYTES_S = 12.5e9
WARM_UP_S = 90.0
SPACING_S = 60.0
DOWN_S = 20.0
"""Between a node's death and its next start: the downscale stall of the chip-level process."""
POLL_S = 0.02


@dataclass
class Death:
    """One death and what followed. Times in seconds."""

    kind: str
    peer: str
    at_s: float
    steps: tuple[int, int]
    """Inner steps of the life that ended: [first, end)."""
    offices: dict[int, int]
    """Fragment -> head's number, of the fragments that this node was syncer of."""
    elected_s: dict[int, float] = field(default_factory=dict)
    """Fragment -> another syncer has a certificate, after the death."""
    resumed_s: dict[int, float] = field(default_factory=dict)
    """Fragment -> next version, after the death."""
    restarted_s: float = 0.0
    successor: str = ""
    idle_s: float | None = None
    """Restart to the learner's first inner step: chips stand still."""
    back_s: float | None = None
    """Restart to the first merged contribution (T_back)."""
    lost_steps: tuple[int, ...] = ()
    """Per fragment: steps that were trained and are in no merged contribution in the end."""


@dataclass
class Costs:
    """Everything measured for one number of learners."""

    learners: int
    deaths: list[Death]
    quiet_s: list[float]
    """Random moment without a death to the next version of a fragment."""

    def of(self, kind: str) -> list[Death]:
        """Deaths of a kind."""
        return [death for death in self.deaths if death.kind == kind]


def config(machines: int) -> CoreConfig:
    """The paper's numbers. `machines`: all that ever come, each with a seat."""
    return CoreConfig(
        run=RUN,
        inner_steps=INNER_STEPS,
        delay_steps=2,
        quorum=1,
        grace_fraction=0.8,
        grace_cap_s=STEP_S,
        group_size=64,
        term_versions=16,
        log_versions=16,
        max_base_age_versions=4,
        tokens_per_step=1024,
        update_codec="sim",
        contribution_codec="sim",
        genesis_versions=tuple(genesis_version(f) for f in range(FRAGMENTS)),
        max_payload_bytes=(PARAMETERS // FRAGMENTS,) * FRAGMENTS,
        seats=tuple(f"d{index}" for index in range(machines)),
        timing=Timing(),
    )


def machine(peer: str, share: float) -> NodeSpec:
    """A learner's host: equal chips, steps within 4 per cent."""
    return NodeSpec(peer, STEP_S * (0.98 + 0.04 * share), LINK_BYTES_S, 0.01, 30.0, 1e4 * share)


class Ward(World):
    """A calm world in which nodes die on schedule."""

    def __init__(self, learners: int, seed: int, deaths: int) -> None:
        rng = random_stream(seed, "recovery/specs")
        end_s = WARM_UP_S + (deaths + 1) * SPACING_S
        mix = replace(MIXES["datacentre"], crash=0.0, learner_crash=0.0)
        nodes = tuple(machine(f"d{i}", rng.random()) for i in range(learners))
        joins = tuple(0.2 * i for i in range(learners))
        plan = WorldPlan(
            seed, "datacentre", mix, config(learners + deaths), nodes, joins, 0.0, end_s, 0.0, faults=False
        )
        self.deaths: list[Death] = []
        self.quiet: list[tuple[float, int]] = []
        self.made: list[list[float]] = [[] for _ in range(FRAGMENTS)]
        """Per fragment: when its versions were made."""
        self._rng = random_stream(seed, "recovery/deaths")
        self._end_s = end_s
        super().__init__(plan)
        self.on_effect = self._see
        for i in range(deaths):
            at_s = WARM_UP_S + i * SPACING_S + self._rng.uniform(0.0, INNER_STEPS * STEP_S)
            self.quiet.append((at_s - 1e-3, self._rng.randrange(FRAGMENTS)))
            self.clock.at(at_s, self._kill, KINDS[i % len(KINDS)])

    def measure(self) -> Costs:
        """Run to the end and count."""
        self.clock.run_until(self._end_s)
        for death in self.deaths:
            death.lost_steps = tuple(self._lost(death, fragment) for fragment in range(FRAGMENTS))
        quiet = [next(t for t in self.made[f] if t > at_s) - at_s for at_s, f in self.quiet]
        return Costs(len(self.plan.nodes), self.deaths, quiet)

    # --- deaths --------------------------------------------------------------------------------------

    def _kill(self, kind: str) -> None:
        host = self._rng.choice(self.up_hosts())
        model, now = host.learner.model, self.clock.now
        life = (model.fragments[0].life_from, model.step_at(now))
        held = {f: part for f, part in enumerate(host.core.fragments) if part.office.holding}
        heads = {f: host.stores[f].version.header.number for f in held}
        death = Death(kind, host.peer, now, life, {} if kind == "learner" else heads)
        self.deaths.append(death)
        death.successor, death.restarted_s = host.peer, now + DOWN_S
        if kind == "learner":
            host.learner.crash(DOWN_S)
        elif kind == "node":
            self.crash(host, DOWN_S)
        else:
            self.crash(host, None)
            spec = machine(f"d{len(self.specs)}", self._rng.random())
            death.successor, self.specs[spec.peer] = spec.peer, spec
            self.clock.after(DOWN_S, self.launch, spec)
        self.clock.after(DOWN_S + 1e-3, self._await_learner, death)

    def _await_learner(self, death: Death) -> None:
        host = self.hosts[death.successor]
        if host.learner.model.running:
            death.idle_s = self.clock.now - death.restarted_s
        else:
            self.clock.after(POLL_S, self._await_learner, death)

    def _see(self, host: Host, effect: Effect) -> None:
        now = self.clock.now
        if isinstance(effect, Record) and effect.kind == "office":
            if dict(effect.fields).get("syncer") == host.peer:
                for death in self.deaths:
                    if effect.fragment in death.offices:
                        death.elected_s.setdefault(effect.fragment, now - death.at_s)
        elif isinstance(effect, CommitVersion) and effect.version.header.syncer == host.peer:
            header = effect.version.header
            self.made[header.fragment].append(now)
            learners = {part.learner for part in header.contributors}
            for death in self.deaths:
                number = death.offices.get(header.fragment)
                if number is not None and header.number > number:
                    death.resumed_s.setdefault(header.fragment, now - death.at_s)
                if death.back_s is None and death.successor in learners and now > death.restarted_s:
                    death.back_s = now - death.restarted_s

    def _lost(self, death: Death, fragment: int) -> int:
        up = [host.stores[fragment] for host in self.up_hosts()]
        best = max(up, key=lambda store: store.version.header.head().weight)
        gaps = missing_spans(best.state.covered.get(death.peer, ()), *death.steps)
        return sum(end - first for first, end in gaps)


def measure(learners: int, seed: int, deaths: int) -> Costs:
    """Deaths in a simulated data centre of so many learners.

    Raises:
        Violation: the protocol broke one of its rules.
    """
    return Ward(learners, seed, deaths).measure()
