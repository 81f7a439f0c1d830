"""Plan of a seed, drawn before it starts: run, nodes, links and how much goes wrong (swarm testing)."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import random
from dataclasses import dataclass, fields
from enum import Enum

from msgspec.structs import replace

from p2pdiloco.core.api.config import CoreConfig, Timing
from p2pdiloco.core.api.types import WHOLE_RUN
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.core.chain import FIRST_REACH
from p2pdiloco.core.fork_choice import TRUSTED_PLACES
from p2pdiloco_lab.simulation.lineage import Substance, genesis_state

RUN = "simulated"
OWNER = "owner"
MAX_JOINS = 6
"""Nodes that join while the faults last, at most."""


class CrowdKind(Enum):
    """Kinds of crowds: what many identities of one process do, once all are merged (`sim_crowd.Crowd`)."""

    RIDES = "rides"
    """They are merged, and no more."""
    FORGES = "forges"
    """Each works in one fragment, and all stand on states that they forged."""
    ACCUSES = "accuses"
    """They accuse every honest member of an old version."""
    MUTE = "mute"
    """They send heartbeats, and answer to nothing."""
    CLAIMS = "claims"
    """Their labels claim as much work as labels can."""


class UsurperKind(Enum):
    """Kinds of versions without an office, by what they are children of."""

    HEAD = "head"
    """The head, in a higher term."""
    TERM = "term"
    """The head, in the head's own term, which is another's."""
    SIBLING = "sibling"
    """The head's parent, in a term above the head's. Its member sends no work meanwhile: more of it counts,
    then, and the version is heavier than the head."""
    IDLE = "idle"
    """The head, in a higher term, of a member of which nothing was ever merged."""
    HISTORY = "history"
    """Each other, from version 0 on: a chain of its own, heavier than everybody's."""
    BRANCH = "branch"
    """The same, from a version on that others made."""

    @property
    def is_history(self) -> bool:
        """Tell whether the versions are a chain of their own."""
        return self in (UsurperKind.HISTORY, UsurperKind.BRANCH)

    @property
    def forks(self) -> bool:
        """Tell whether the version is no child of the head."""
        return self is UsurperKind.SIBLING or self.is_history


class PaperKind(Enum):
    """Kinds of papers by which nodes get their seats in a world (`sim_world.Owner`)."""

    WORDS = "words"
    """The owner's word on each."""
    INVITE = "invite"
    """Admissions by one invite, which counts for the first places only."""
    SEATS = "seats"
    """What more than half of the seats say."""


@dataclass(frozen=True, slots=True)
class Mix:
    """A kind of weather. Rates are faults per node and virtual minute; ranges are drawn per seed."""

    latency_s: tuple[float, float]
    bandwidth_bytes_s: tuple[float, float]
    jitter: float
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    crash: float = 0.0
    replace: float = 0.0
    learner_crash: float = 0.0
    freeze: float = 0.0
    leave: float = 0.0
    visit: float = 0.0
    join: float = 0.0
    partition: float = 0.0
    slow_link: float = 0.0
    slow_disk: float = 0.0
    full_disk: float = 0.0
    slow_learner: float = 0.0
    blackout: float = 0.0
    """Blackouts in a seed, on average: every node dies within a second."""
    spike: float = 0.0
    """Share of messages that take 2 to 10 times as long: the long tail of real links."""
    corrupt: float = 0.0
    """Share of bulk payloads that turn out unusable."""
    merge_fails: float = 0.0
    """Share of merges that come to nothing."""
    miscompute: float = 0.0
    """Share of outer steps whose result has another digest than everybody else's."""
    lasts: float = 1.0
    """Times that cuts and standstills last, of what is usual."""
    strangers: int = 0
    """Number of peers that boast of heads which they never give (`sim_liars.Stranger`)."""
    liars: int = 0
    """Number of members that lie with numbers (`sim_liars.Liar`), among at least three times as many."""

    perjurers: int = 0
    """Number of members whose lies can be proved (`sim_liars.Perjurer`), a third of all at most."""
    usurpers: int = 0
    """Number of members that sign versions without an office (`sim_usurper`), a third of all at most."""
    colluders: int = 0
    """Number of members, at most, that merge only each other's work when in office; of ten."""
    crowd: int = 0
    """Number of identities of one process that join, at most (`sim_crowd.Crowd`)."""
    quiet: bool = False
    """True: all members but a few sleep for a while, and some of those awake forge states (`draw_quiet`)."""
    old: bool = False
    """True: the run is older than its founding when the world begins (`sim_disk.Past`)."""

    @property
    def lies(self) -> bool:
        """Tell whether members may lie."""
        return bool(self.perjurers or self.usurpers or self.colluders or self.quiet)

    @property
    def least_nodes(self) -> int:
        """Nodes at least, unless their number is given."""
        return max(
            10 * (self.colluders > 0), (TRUSTED_PLACES + 1) * self.quiet, 4 * (self.old or self.crowd > 0), 1
        )

    @property
    def calm(self) -> bool:
        """Tell whether nothing goes wrong by chance."""
        return not any(getattr(self, f.name) for f in fields(self)[3:] if f.name not in ("lasts", "old"))


MIXES: dict[str, Mix] = {
    "calm": Mix(latency_s=(0.001, 0.03), bandwidth_bytes_s=(5e6, 5e7), jitter=0.2),
    "datacentre": Mix(
        latency_s=(0.0002, 0.002), bandwidth_bytes_s=(1e8, 1e9), jitter=0.5, crash=0.5, learner_crash=0.5
    ),
    "wan": Mix(
        latency_s=(0.02, 0.3),
        bandwidth_bytes_s=(3e5, 1e7),
        jitter=0.6,
        spike=0.02,
        corrupt=0.005,
        slow_learner=0.2,
        loss=0.02,
        duplicate=0.01,
        reorder=0.02,
        crash=0.2,
        slow_link=0.5,
    ),
    "churn": Mix(
        latency_s=(0.005, 0.1),
        bandwidth_bytes_s=(1e6, 5e7),
        jitter=0.3,
        crash=1.0,
        replace=0.4,
        learner_crash=0.5,
        leave=0.4,
        visit=0.6,
        join=0.8,
        blackout=0.25,
        corrupt=0.003,
    ),
    "partition": Mix(
        latency_s=(0.002, 0.08),
        bandwidth_bytes_s=(2e6, 5e7),
        jitter=0.3,
        loss=0.005,
        partition=0.6,
        crash=0.2,
    ),
    "storm": Mix(
        latency_s=(0.002, 0.2),
        bandwidth_bytes_s=(5e5, 5e7),
        jitter=0.8,
        loss=0.03,
        duplicate=0.03,
        reorder=0.05,
        crash=0.8,
        replace=0.2,
        learner_crash=0.6,
        freeze=0.5,
        leave=0.2,
        visit=0.3,
        join=0.3,
        partition=0.3,
        slow_link=0.5,
        slow_disk=0.5,
        full_disk=0.3,
        slow_learner=0.3,
        blackout=0.25,
        spike=0.01,
        corrupt=0.01,
        merge_fails=0.01,
        miscompute=0.005,
    ),
    "strangers": Mix(latency_s=(0.001, 0.03), bandwidth_bytes_s=(5e6, 5e7), jitter=0.2, strangers=2, liars=1),
    "liars": Mix(latency_s=(0.001, 0.05), bandwidth_bytes_s=(5e6, 5e7), jitter=0.3, crash=0.3, perjurers=2),
}
MIXES["old"] = dataclasses.replace(MIXES["storm"], perjurers=3, old=True)
"""Old runs: each has the weather of one of `OLD_WEATHERS`."""
MIXES["usurpers"] = dataclasses.replace(MIXES["calm"], usurpers=2)
MIXES["colluders"] = dataclasses.replace(MIXES["calm"], colluders=3)
MIXES["crowd"] = dataclasses.replace(MIXES["liars"], crash=0.1, perjurers=0, crowd=8)
"""Young and old runs, open and by invite, that a crowd joins."""
LEAST_CROWD, CROWD_S = 3, 30.0
"""Fewest identities of a crowd, and the time by which such worlds are longer: they need many versions."""
MIXES["quiet"] = dataclasses.replace(MIXES["calm"], quiet=True)
MOST_AWAKE, LAST_JOIN_S = 3, 10.0
"""Most that are awake in a quiet hour, and time by which all are here: who begins with nothing beside liars
alone has nobody else's word."""
OLD_WEATHERS = "churn", "datacentre", "partition", "storm"
CROSSING_S = 0.02
MONTH_S = 30 * 86_400.0
DRAWN = tuple(sorted(name for name, mix in MIXES.items() if not (mix.strangers or mix.lies)))
"""Mixes of seeds for which none is named."""


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One machine."""

    peer: str
    step_time_s: float
    bandwidth_bytes_s: float
    write_s: float
    checkpoint_every_s: float
    clock_offset_s: float
    """Monotonic clocks of different machines have nothing to do with each other."""
    clock_rate: float = 1.0
    """Local seconds per second."""
    answers_at_once: bool = True
    """Tell whether the learner answers closing calls within an inner step; else at the step's end."""

    def local_s(self, time_s: float) -> float:
        """Time that this machine's clock shows at a virtual time."""
        return self.clock_offset_s + time_s * self.clock_rate

    def virtual_s(self, local_s: float) -> float:
        """Virtual time at which this machine's clock shows `local_s`."""
        return (local_s - self.clock_offset_s) / self.clock_rate


@dataclass(frozen=True, slots=True)
class WorldPlan:
    """Everything that a seed fixes in advance."""

    seed: int
    mix_name: str
    mix: Mix
    config: CoreConfig
    nodes: tuple[NodeSpec, ...]
    joins_s: tuple[float, ...]
    """Start times of `nodes`; the first is the one with genesis."""
    faults_from_s: float
    faults_until_s: float
    settle_s: float
    """After the faults, liveness must hold within so much virtual time."""
    faults: bool = True
    hidden: tuple[str, ...] = ()
    """Nodes that nobody can dial: they open links to others themselves, and have none to each other."""
    crowd: CrowdKind | None = None
    riders: int = 0
    """Identities of one process that join beside `nodes`."""
    seated_riders: tuple[str, ...] = ()
    """Nodes that are the crowd, in place of such."""
    usurpers: tuple[tuple[str, UsurperKind], ...] = ()
    """Nodes that sign versions without an office, and of which kind."""
    colluders: tuple[str, ...] = ()
    """Nodes that leave out all others' work."""
    sleeps_s: float = math.inf
    """Time at which all of `wakes_s` go."""
    wakes_s: tuple[tuple[str, float], ...] = ()
    """Nodes that sleep, and until when each does."""
    crowd_from_s: float = 10.0
    papers: PaperKind | None = None
    """None: every node has a founding seat. Else few have one, and the others get theirs by papers."""
    unseated: str = ""
    """Node whose seat the owner ends at `unseated_s`; empty: nobody's."""
    unseated_s: float = math.inf

    @property
    def calm_from_s(self) -> float:
        """Time from which every node has found the others and nothing goes wrong; infinite in most mixes."""
        return max(self.joins_s) + 10.0 if self.mix.calm else math.inf


def random_stream(seed: int, purpose: str) -> random.Random:
    """An independent random stream; the same in every process."""
    return random.Random(f"{seed}/{purpose}")


def payload_bytes(rng: random.Random, fragments: int, budget_bytes: float) -> tuple[int, ...]:
    """Sizes of contributions and updates, between a kilobyte and what the slowest uplink can carry."""
    shares = [10 ** rng.uniform(-2, 0) for _ in range(fragments)]
    return tuple(max(1000, int(budget_bytes * share / sum(shares))) for share in shares)


def draw_config(rng: random.Random, nodes: int, budget_bytes: float) -> CoreConfig:
    """A run's protocol numbers, anywhere in their legal ranges. `budget_bytes`: of all updates of a round."""
    fragments = rng.randint(1, 6)
    inner_steps = rng.randint(4, 40)
    log_versions = rng.randint(4, 16)
    return CoreConfig(
        run=RUN,
        inner_steps=inner_steps,
        delay_steps=rng.randint(1, max(1, inner_steps // 3)),
        quorum=rng.randint(1, min(3, nodes)),
        grace_fraction=rng.uniform(0.0, 0.9),
        grace_cap_s=rng.choice([0.0, 0.5, 2.0]),
        group_size=64,
        term_versions=rng.randint(2, 12),
        log_versions=log_versions,
        max_base_age_versions=rng.randint(1, log_versions),
        tokens_per_step=rng.choice([1, 64, 512]),
        update_codec="sim",
        contribution_codec="sim",
        genesis_versions=tuple(genesis_version(f) for f in range(fragments)),
        max_payload_bytes=payload_bytes(rng, fragments, budget_bytes),
        timing=Timing(),
    )


def draw_groups(seed: int, config: CoreConfig, nodes: int) -> CoreConfig:
    """Three seeds of five have groups so small that there are several, on one level or more; some from the
    first version on."""
    rng = random_stream(seed, "groups")
    if rng.random() < 0.4:
        return config
    size = rng.randint(2, 4)
    groups = -(-nodes // size) if nodes > size and rng.random() < 0.3 else 1
    versions = tuple(genesis_version(f, groups) for f in range(config.fragments))
    return replace(config, group_size=size, genesis_versions=versions)


def draw_hidden(seed: int, peers: list[str]) -> tuple[str, ...]:
    """Draw who is hidden: half of the nodes in one seed of five, on average; never every node.

    Only where they are one group: members of a group in which nobody can be dialled have no links, and wait
    until groups rotate.
    """
    rng = random_stream(seed, "hidden 5")
    if len(peers) < 2 or rng.random() >= 0.2:
        return ()
    exposed = rng.choice(peers)
    return tuple(peer for peer in peers if rng.random() < 0.5 and peer != exposed)


def draw_usurpers(seed: int, mix: Mix, specs: tuple[NodeSpec, ...]) -> tuple[tuple[str, UsurperKind], ...]:
    """Choose usurpers: the last ones, a third of all at most, of kinds in turn."""
    kinds, last = [*UsurperKind], specs[len(specs) - min(mix.usurpers, len(specs) // 3) :]
    return tuple((spec.peer, kinds[(seed + place) % len(kinds)]) for place, spec in enumerate(last))


def draw_joins(rng: random.Random, mix: Mix, count: int) -> tuple[float, ...]:
    """Draw when each node starts. Beside usurpers all come soon: of two that are here each copies any state
    of the other."""
    others = [rng.uniform(0.0, 4.0) if rng.random() < 0.8 else rng.uniform(5, 25) for _ in range(count - 1)]
    return 0.0, *(min(join_s, 4.0) if mix.usurpers else join_s for join_s in others)


def draw_colluders(seed: int, mix: Mix, specs: tuple[NodeSpec, ...]) -> tuple[str, ...]:
    """Draw who colludes: two at least, the last ones."""
    count = random_stream(seed, "colluders").randint(2, mix.colluders) if mix.colluders else 0
    return tuple(spec.peer for spec in specs[len(specs) - count :])


SURE = "n0"
"""Node that has a seat in every world, and that is there for good where few have one."""


def draw_quiet(plan: WorldPlan) -> WorldPlan:
    """Draw who is awake in a quiet hour, and who of these lies: nobody, or some of them. The others come back
    one by one, or together."""
    rng = random_stream(plan.seed, "quiet hour")
    peers = [spec.peer for spec in plan.nodes]
    awake = peers[len(peers) - rng.randint(2, MOST_AWAKE) :]
    liars = rng.choice([0, rng.randint(1, len(awake) - 1)])
    sleeps_s = rng.uniform(20.0, 30.0)
    wakes_s, gap_s = sleeps_s + rng.uniform(20.0, 30.0), rng.choice([0.0, 4.0])
    asleep = [peer for peer in peers if peer not in awake]
    wakes = tuple((peer, wakes_s + gap_s * place) for place, peer in enumerate(asleep))
    return dataclasses.replace(
        plan,
        faults=False,
        joins_s=tuple(min(at_s, LAST_JOIN_S) for at_s in plan.joins_s),
        crowd=CrowdKind.FORGES if liars else None,
        seated_riders=tuple(awake[len(awake) - liars :]),
        crowd_from_s=sleeps_s + 5.0,
        sleeps_s=sleeps_s,
        wakes_s=wakes,
        faults_until_s=wakes[-1][1] + 10.0,
    )


PAPERS_SHARE, UNSEATED_SHARE = 1 / 3, 0.4
"""Shares of the worlds with papers among the ordinary ones, and of those of them in which a seat ends."""


def draw_papers(plan: WorldPlan) -> WorldPlan:
    """Draw whether seats come by papers in this world, by which, and whose seat ends."""
    rng = random_stream(plan.seed, "papers")
    if rng.random() >= PAPERS_SHARE:
        return plan
    founders = tuple(f"n{index}" for index in range(rng.choice([1, 3])))
    others = [spec.peer for spec in plan.nodes if spec.peer != SURE]
    ends = bool(others) and rng.random() < UNSEATED_SHARE
    slowest_round_s = max(spec.step_time_s for spec in plan.nodes) * plan.config.inner_steps
    return dataclasses.replace(
        plan,
        # Whose paper just missed a term's first version has its seat with the next term's.
        settle_s=plan.settle_s + 2 * plan.config.term_versions * slowest_round_s,
        config=replace(plan.config, owner=OWNER, seats=founders),
        hidden=tuple(peer for peer in plan.hidden if peer != SURE),
        papers=rng.choice([*PaperKind]),
        unseated=rng.choice(others) if ends else "",
        unseated_s=rng.uniform(plan.faults_from_s, plan.faults_until_s),
    )


def draw_thin(seed: int, mix_name: str) -> float:
    """Draw how many times more bytes there are than the links carry, in two of five seeds on wide-area links.

    A contribution then takes several sync intervals, and the thinnest uplinks carry no office.
    """
    rng = random_stream(seed, "thin links")
    return rng.uniform(4.0, 40.0) if mix_name == "wan" and rng.random() < 0.4 else 1.0


def genesis_version(fragment: int, groups: int = 1) -> SignedVersion:
    """Version 0 of a fragment."""
    header = VersionHeader(
        run=RUN,
        group=WHOLE_RUN,
        fragment=fragment,
        number=0,
        parent=hashlib.sha256(RUN.encode()).digest(),
        term=0,
        syncer=RUN,
        tokens=0,
        state_digest=genesis_state(fragment).digest,
        update_digest=bytes(32),
        update_bytes=0,
        codec="sim",
        contributors=(),
        groups=groups,
        norm=1.0,
        reach=FIRST_REACH,
    )
    return SignedVersion(header, b"")


def stated_lengths(plan: WorldPlan, substance: Substance) -> WorldPlan:
    """Let version 0 state its own lengths, where fragments have any: limits of lengths follow from them."""
    versions = []
    for fragment, version in enumerate(plan.config.genesis_versions):
        length, header = substance.first_length(fragment), version.header
        if length is not None:
            header = replace(header, norm=length, reach=length * FIRST_REACH)
        versions.append(SignedVersion(header, version.signature))
    return dataclasses.replace(plan, config=replace(plan.config, genesis_versions=tuple(versions)))


def draw_spec(rng: random.Random, peer: str, mix: Mix, base_step_s: float, spread: float) -> NodeSpec:
    """A machine of this mix."""
    return NodeSpec(
        peer=peer,
        step_time_s=base_step_s * rng.uniform(1.0, spread),
        bandwidth_bytes_s=rng.uniform(*mix.bandwidth_bytes_s),
        write_s=rng.uniform(0.001, 0.03),
        checkpoint_every_s=rng.uniform(1.0, 15.0),
        clock_offset_s=rng.uniform(0.0, MONTH_S),
        clock_rate=rng.uniform(0.99, 1.01),
        answers_at_once=peer[-1] not in "36",
    )


def one_withholds(seed: int) -> bool:
    """Tell whether one of the liars of that world withholds in place of lying (`sim_liars.Withholder`)."""
    return seed % 4 == 2


def draw_weather(seed: int, name: str) -> Mix:
    """Draw the weather of an old run, and how many lie in it, nobody in a quarter of them. Where some do, no
    honest member goes, or loses its vote, for ever: for long only old ones vote, and liars are to be fewer
    than a third of these."""
    mix = MIXES[name]
    if mix.crowd:
        return dataclasses.replace(mix, old=random_stream(seed, "crowd's run").random() < 0.5)
    if not mix.old:
        return mix
    rng = random_stream(seed, "old run")
    weather, liars = MIXES[rng.choice(OLD_WEATHERS)], rng.randint(0, mix.perjurers)
    if liars:
        weather = dataclasses.replace(weather, leave=0.0, replace=0.0, full_disk=0.0)
    return dataclasses.replace(weather, perjurers=liars, old=True)


def draw_plan(seed: int, mix_name: str | None = None, nodes: int | None = None) -> WorldPlan:
    """The plan of a seed. Mix and number of nodes are drawn too unless they are given."""
    rng = random_stream(seed, "plan")
    drawn_mix = rng.choice(DRAWN)
    name = mix_name or drawn_mix
    mix = draw_weather(seed, name)
    drawn_nodes = rng.randint(1, 8)
    count = nodes or max(drawn_nodes, mix.least_nodes)
    round_s = rng.uniform(1.0, 5.0)
    # A syncer uploads every update to all others: at most a third of the slowest uplink.
    budget_bytes = mix.bandwidth_bytes_s[0] * round_s / 3 / (count + MAX_JOINS)
    config = draw_config(rng, count, min(budget_bytes, 1e6))
    # Accusations need most of all seats: where somebody lies, nobody has one who may never come.
    coming = MAX_JOINS if (mix.join or mix.replace) and not mix.perjurers else 0
    config = replace(config, seats=tuple(f"n{i}" for i in range(count + coming)))
    audits = random_stream(seed, "audits").random() < 0.5
    config = replace(config, audited=audits or mix.crowd > 0)
    # A liar that hides its updates withholds them, too.
    lies = mix.colluders or mix.usurpers
    withholds = bool(lies or (mix.perjurers and (mix.old or one_withholds(seed))))
    # Of two groups' syncers one that withholds is no minority. Tests have liars in groups.
    if not (mix.crowd or mix.quiet or lies) and not (mix.perjurers and (mix.old or config.audited)):
        config = draw_groups(seed, config, count)
    if not mix.strangers:  # in half of the worlds an owner lets members in
        config = replace(config, admits=random_stream(seed, "admission").random() < 0.5)
    if mix.perjurers and not withholds:
        # Candidates cross each other's path often: else nobody could vote twice. But who makes a term's last
        # version knows first that it is over: it would follow itself for ever, and leave out for ever.
        config = replace(config, timing=replace(config.timing, stagger_s=CROSSING_S))
    if withholds:  # it is here and merged by nobody: no quorum may need it
        config = replace(config, quorum=min(config.quorum, max(1, count - count // 3)))
    thin = draw_thin(seed, name)
    if thin > 1.0:
        sizes = tuple(int(size * thin) for size in config.max_payload_bytes)
        config = replace(config, max_payload_bytes=sizes)
    spread = rng.choice([1.0, 1.3, 2.0, 5.0])
    base_step_s = round_s / config.inner_steps
    specs = tuple(draw_spec(rng, f"n{i}", mix, base_step_s, spread) for i in range(count))
    joins = draw_joins(rng, mix, count)
    slowest_round_s = max(spec.step_time_s for spec in specs) * config.inner_steps
    if thin > 1.0:  # there and back
        slowest_round_s += 2 * max(config.max_payload_bytes) / mix.bandwidth_bytes_s[0]
    # Where only liars can be dialled, there is no swarm without them.
    one_group = count + MAX_JOINS <= config.group_size and not mix.lies
    crowd = random_stream(seed, "crowd")
    plan = WorldPlan(
        seed=seed,
        mix_name=name,
        mix=mix,
        config=config,
        nodes=specs,
        joins_s=joins,
        faults_from_s=8.0,
        faults_until_s=rng.uniform(35.0, 60.0) + CROWD_S * (mix.crowd > 0),
        # Whom a syncer leaves out waits for another's term, and the hash may draw that one many times.
        settle_s=(60.0 + 10 * slowest_round_s) * (2.0 if withholds else 1.0),
        hidden=draw_hidden(seed, [spec.peer for spec in specs]) if one_group and not mix.crowd else (),
        usurpers=draw_usurpers(seed, mix, specs),
        colluders=draw_colluders(seed, mix, specs),
        crowd=list(CrowdKind)[seed % len(CrowdKind)] if mix.crowd else None,
        riders=crowd.randint(LEAST_CROWD, mix.crowd) if mix.crowd else 0,
    )
    if mix.quiet:
        return draw_quiet(plan)
    ordinary = name in DRAWN and not mix.crowd
    # Calm worlds of so many nodes are what worlds made by hand begin with: there all have seats.
    return draw_papers(plan) if ordinary and not (mix.calm and nodes) else plan
