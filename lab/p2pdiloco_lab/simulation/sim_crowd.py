"""A crowd: identities of one process that trains nothing, in the simulator's worlds.

A `Rider` is a node with an honest core and a learner that only pretends: what it sends agrees with everybody,
as all scores here are invented, so it is merged. `Crowd` has all riders of a world. It lets
them do what its kind says once they are many enough, and knows the two rules that only worlds with a crowd
have: `kept` and `counted` (docs/protocol/simulator.md, section 3).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from msgspec.structs import replace

from p2pdiloco.core.api.events import Effect
from p2pdiloco.core.api.evidence import Accusation, FalseVersion, short_of
from p2pdiloco.core.api.messages import Announce, Message, Progress, Stated
from p2pdiloco.core.api.types import (
    MAX_INNER_STEPS,
    MOST_PERIODS,
    ContributionHeader,
    Contributor,
    Head,
    SignedContribution,
    Stamp,
    Watermark,
    signed_bytes,
)
from p2pdiloco.core.api.versions import SignedOffer, SignedVersion, VersionHeader
from p2pdiloco_lab.simulation.lineage import HashCrypto
from p2pdiloco_lab.simulation.seed_plan import CrowdKind, draw_spec, random_stream
from p2pdiloco_lab.simulation.seed_report import Violation
from p2pdiloco_lab.simulation.sim_liars import Liar
from p2pdiloco_lab.simulation.sim_network import GivenState

if TYPE_CHECKING:
    from p2pdiloco_lab.simulation.sim_disk import LoggedUpdate, Store
    from p2pdiloco_lab.simulation.sim_host import Host
    from p2pdiloco_lab.simulation.sim_world import World

OPEN_SHARE = 0.25
"""Share of what honest learners trained that a chain may count beyond it."""
LOOK_EVERY_S = 0.5
ACCUSES_EVERY_S = 2.0
OUT_OF_REACH = 10
"""Versions by which an accused one is behind: nobody audits what is more than eight behind."""
FAR_AHEAD = 1000
"""Versions by which a forged head is ahead: too many for updates, so the state is asked for."""
STRIKES_BEFORE_S = 10.0
"""Time before the end of the faults at which a crowd strikes at the latest, however few of it were merged."""


class Rider:
    """One identity of a crowd. Its core is honest; `Crowd` says what it does beside that, and from when on.
    None of its lies can be proved."""

    def __init__(self, crowd: Crowd, peer: str, place: int) -> None:
        self.kind = crowd.kind
        self.peer = peer
        self._crowd = crowd
        self._place = place

    def works_on(self, fragment: int) -> bool:
        """Tell whether it contributes to that fragment. One that forges a state works in one fragment only:
        each of them in another, as far as there are so many."""
        return self.kind is not CrowdKind.FORGES or fragment == self.own_fragment

    @property
    def own_fragment(self) -> int:
        """Fragment whose state it forges."""
        return self._place % self._crowd.fragments

    def sees(self, host: Host, effect: Effect) -> None:
        """Leave its core alone."""

    def says(self, peer: str, message: Message) -> Message | None:
        """Change what its core says; None: it says nothing."""
        if not self._crowd.struck:
            return message
        if self.kind is CrowdKind.MUTE:
            quiet = isinstance(message, Progress)
            return replace(message, learning=False, stands=False, offices=()) if quiet else None
        forges = self.kind is CrowdKind.FORGES and peer not in self._crowd.riders
        return self._boasts(message) if forges else message

    def _boasts(self, message: Message) -> Message | None:
        """Name the forged heads, whoever of the crowd made them."""
        forged = self._crowd.forged_heads
        if isinstance(message, Progress):
            return replace(message, heads=tuple(sorted({**dict(message.heads), **forged}.items())))
        named = isinstance(message, Announce) and message.fragment in forged
        return None if named else message

    def hides(self, _found: LoggedUpdate) -> bool:
        """Hide no update."""
        return False

    def gives(self, _peer: str, found: LoggedUpdate) -> LoggedUpdate:
        """Give updates as they are."""
        return found

    def gives_state(self, _peer: str, given: GivenState) -> GivenState:
        """Give what one of the crowd forged, if any did; else what it holds."""
        return self._crowd.forged.get(given.version.header.fragment, given)


class Claimer(Liar):
    """Author of labels that claim as much work as a label can."""

    def tell(self, signed: SignedOffer) -> SignedOffer:
        """Put such a label on a contribution."""
        if not isinstance(signed, SignedContribution):
            return signed
        lie = SignedContribution(self._lie(signed.header), b"")
        work = lie.contributor().work(lie.header.run, lie.header.fragment)
        return replace(lie, signature=HashCrypto(work.learner).sign(signed_bytes("work", work)))

    def _lie(self, header: ContributionHeader) -> ContributionHeader:
        steps = min(MOST_PERIODS * self._config.inner_steps, MAX_INNER_STEPS)
        return replace(header, inner_steps=steps, tokens=steps * self._config.tokens_per_step)


class Crowd:
    """All riders of a world, who act as one."""

    def __init__(self, world: World, kind: CrowdKind) -> None:
        plan = world.plan
        self.kind, self.fragments = kind, plan.config.fragments
        peers = plan.seated_riders or tuple(f"c{place}" for place in range(plan.riders))
        self.riders = {peer: Rider(self, peer, place) for place, peer in enumerate(peers)}
        self.struck = False
        """True: they do what their kind says."""
        self._world = world
        self.forged: dict[int, GivenState] = {}
        """States that they give in place of their own, by fragment."""
        self._digests: set[bytes] = set()

    @property
    def forged_states(self) -> frozenset[bytes]:
        """Digests of the states that were forged."""
        return frozenset(each.state.digest for each in self.forged.values())

    @property
    def forged_heads(self) -> dict[int, Head]:
        """Forged heads by fragment."""
        return {fragment: each.version.header.head() for fragment, each in self.forged.items()}

    def join(self) -> None:
        """Let all of them come, within a moment of each other; they pretend to be as fast as the fastest."""
        world, plan = self._world, self._world.plan
        world.clock.at(plan.crowd_from_s, self._look)
        if plan.seated_riders:
            return
        rng = random_stream(plan.seed, "crowd of identities")
        step_s = min(spec.step_time_s for spec in plan.nodes)
        for place, peer in enumerate(self.riders):
            spec = draw_spec(rng, peer, plan.mix, step_s, 1.0)
            world.specs[peer] = spec
            world.clock.at(plan.crowd_from_s + 0.1 * place, world.launch, spec)
            if self.kind is CrowdKind.CLAIMS:
                world.bulk.liars[peer] = Claimer(plan.config, rng)

    # --- when they strike ----------------------------------------------------------------------------

    def _look(self) -> None:
        clock, latest_s = self._world.clock, self._world.plan.faults_until_s - STRIKES_BEFORE_S
        if clock.now < latest_s and not self._many_enough():
            clock.after(LOOK_EVERY_S, self._look)
            return
        if self.kind is CrowdKind.FORGES and not self._forge_all():
            clock.after(LOOK_EVERY_S, self._look)
            return
        self.struck = True
        self._world.trace.decision(clock.now, "-", f"the crowd begins: {self.kind.value}")
        if self.kind is CrowdKind.ACCUSES:
            self._accuse_all()

    def _many_enough(self) -> bool:
        return all(self._mark(rider) is not None for rider in self.riders.values())

    def _mark(self, rider: Rider) -> Watermark | None:
        table = self._best(rider.own_fragment).watermarks
        return next((mark for mark in table if mark.learner == rider.peer), None)

    def _best(self, fragment: int) -> Store:
        honest = [host.stores[fragment] for host in self._honest()]
        return max(honest, key=lambda store: store.version.header.head().weight)

    def _honest(self) -> Iterator[Host]:
        return (host for host in self._world.hosts.values() if host.peer not in self.riders)

    # --- forged states -------------------------------------------------------------------------------

    def _forge_all(self) -> bool:
        """Forge one state for each fragment that has a rider with a mark. Tell whether there is any."""
        for rider in self.riders.values():
            mark = self._mark(rider)
            if rider.own_fragment not in self.forged and mark is not None:
                self.forged[rider.own_fragment] = made = self._forge(rider, mark)
                self._digests.add(made.version.header.digest())
        return bool(self.forged)

    def _forge(self, rider: Rider, mark: Watermark) -> GivenState:
        config, store = self._world.plan.config, self._best(rider.own_fragment)
        before, number = store.version.header, store.version.header.number + FAR_AHEAD
        name = f"{rider.peer}/{number}".encode()
        part = Contributor(
            rider.peer,
            Stamp(mark.stamp.incarnation, mark.stamp.sequence + 1),
            config.usual_tokens,
            config.inner_steps,
            mark.stamp,
            payload_digest=hashlib.sha256(name).digest(),
        )
        crypto = HashCrypto(rider.peer)
        work = part.work(config.run, rider.own_fragment)
        state = store.state.miscomputed()
        header: VersionHeader = replace(
            before,
            number=number,
            parent=hashlib.sha256(b"nobody's/" + name).digest(),
            term=before.term + 1,
            syncer=rider.peer,
            tokens=before.tokens + FAR_AHEAD * config.usual_tokens,
            state_digest=state.digest,
            contributors=(replace(part, signature=crypto.sign(signed_bytes("work", work))),),
            repairs=None,
        )
        signed = SignedVersion(header, crypto.sign(signed_bytes("version", header)))
        return GivenState(signed, state, store.watermarks)

    # --- accusations ---------------------------------------------------------------------------------

    def _accuse_all(self) -> None:
        """Accuse every honest member of a version that is too old to be made again: who cannot find out
        believes most of the seats."""
        self._world.clock.after(ACCUSES_EVERY_S, self._accuse_all)
        for version in self._old_versions().values():
            subject = FalseVersion(short_of(version))
            for host in self._world.up_hosts():
                if host.peer not in self.riders:
                    continue
                signature = HashCrypto(host.peer).sign(signed_bytes("accusation", subject))
                for other in self._world.core_hosts():
                    stated = Stated(Accusation(subject, host.peer, signature))
                    self._world.network.send(host, other.peer, stated)

    def _old_versions(self) -> dict[str, SignedVersion]:
        """Find the newest version of each honest member that is out of everybody's reach."""
        heads = [self._best(fragment).version.header.number for fragment in range(self.fragments)]
        found: dict[str, SignedVersion] = {}
        for version in self._world.watch.headers.values():
            header = version.header
            honest = header.syncer in self._world.specs and header.syncer not in self.riders
            if honest and 0 < header.number <= heads[header.fragment] - OUT_OF_REACH:
                found[header.syncer] = version
        return found

    # --- rules ---------------------------------------------------------------------------------------

    def committed(self, host: Host, header: VersionHeader) -> None:
        """A node makes a version its own.

        Raises:
            Violation: an honest one takes what the crowd forged.
        """
        if host.peer not in self.riders and header.digest() in self._digests:
            where = f"{host.peer} fragment {header.fragment} version {header.number}"
            raise Violation("kept", f"{where}: takes the state that {header.syncer} forged")

    def counted(self) -> float:
        """Tokens that the chains of honest members have counted since the world began, over those that honest
        learners trained in that time; of the fragment that has counted most."""
        world = self._world
        per_step = world.plan.config.tokens_per_step
        steps = sum(host.learner.model.step_at(world.clock.now) for host in self._honest())
        first = [c.version.header.tokens for c in world.past.saved] if world.past else [0] * self.fragments
        most = max(self._best(f).version.header.tokens - first[f] for f in range(self.fragments))
        return most / max(1, steps * per_step)

    def check_tokens(self) -> None:
        """Look at the tokens in the end.

        Raises:
            Violation: there are more than the share of strangers allows.
        """
        counted = self.counted()
        if counted > 1.0 + OPEN_SHARE:
            raise Violation("counted", f"chains count {counted:.2f} times the tokens that were trained")
