"""Members that lie or withhold, and strangers that say anything.

`Liar` lies with numbers, within what can be said. Lies of `Perjurer` can be proved, or found out by
everybody. `Withholder` signs nothing that is false, and does less than its office asks. `Stranger` is no
member.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING

from msgspec.structs import replace

from p2pdiloco.core.api.config import CoreConfig
from p2pdiloco.core.api.events import CommitVersion, Effect, Persist, UpdateRecord
from p2pdiloco.core.api.evidence import Accusation, FalseVersion, short_of
from p2pdiloco.core.api.messages import (
    Announce,
    Message,
    Progress,
    Stated,
    VoteGranted,
    VoteRefused,
    VoteRequest,
)
from p2pdiloco.core.api.types import (
    MAX_INNER_STEPS,
    MOST_PERIODS,
    WHOLE_RUN,
    ContributionHeader,
    Head,
    Reach,
    SignedContribution,
    Stamp,
    Vote,
    VoteBody,
    signed_bytes,
)
from p2pdiloco.core.api.versions import SignedOffer, SignedVersion, VersionHeader
from p2pdiloco_lab.simulation.lineage import FragmentLineage, HashCrypto, OuterUpdate
from p2pdiloco_lab.simulation.seed_plan import MAX_JOINS, one_withholds, random_stream
from p2pdiloco_lab.simulation.sim_disk import old_liars

if TYPE_CHECKING:
    from p2pdiloco_lab.simulation.sim_disk import LoggedUpdate
    from p2pdiloco_lab.simulation.sim_host import Host
    from p2pdiloco_lab.simulation.sim_network import GivenState
    from p2pdiloco_lab.simulation.sim_world import World


def lying_members(world: World) -> dict[str, Perjurer | Withholder]:
    """Choose them: the last ones, a third of all at most."""
    plan = world.plan
    peers = [spec.peer for spec in plan.nodes]
    if plan.colluders:
        honest = (peer for peer in peers if peer not in plan.colluders)
        colluder = Withholder(WithheldKind.WORK, honest, FALSE_FROM_S)
        return dict.fromkeys(plan.colluders, colluder)
    lying = peers[len(peers) - min(plan.mix.perjurers, len(peers) // 3) :]
    if plan.mix.old:
        return {peer: Perjurer(world, peer, LieKind.HISTORIES) for peer in old_liars(plan)}
    kind = plan.config.audited, len(peers)
    # Of two groups' syncers one that withholds is no minority: nobody could be elected in its place.
    one_group = len(peers) + MAX_JOINS <= plan.config.group_size
    withheld = list(WithheldKind)[plan.seed // 4 % len(WithheldKind)] if one_group else WithheldKind.WORK
    return {
        peer: Withholder(withheld, peers[:1])
        if one_withholds(plan.seed) and peer == lying[-1]
        else Perjurer(world, peer, lie_of(plan.seed, place, *kind))
        for place, peer in enumerate(lying)
    }


LIES = 0.6
"""Share of labels that lie."""


class Liar:
    """Author of false labels, each rightly signed: its work is honest, its labels are at the ends of what can
    be said.
    """

    def __init__(self, config: CoreConfig, rng: random.Random) -> None:
        self._config = config
        self._rng = rng

    def tell(self, signed: SignedOffer) -> SignedOffer:
        """Put another label on a contribution, or leave it."""
        if not isinstance(signed, SignedContribution) or self._rng.random() > LIES:
            return signed
        lie = SignedContribution(self._lie(signed.header), b"")
        work = lie.contributor().work(lie.header.run, lie.header.fragment)
        return replace(lie, signature=HashCrypto(work.learner).sign(signed_bytes("work", work)))

    def _lie(self, header: ContributionHeader) -> ContributionHeader:
        per_step = self._config.tokens_per_step
        most = min(MOST_PERIODS * self._config.inner_steps, MAX_INNER_STEPS)
        return self._rng.choice(
            [
                replace(header, inner_steps=most, tokens=most * per_step),
                replace(header, inner_steps=most + 1, tokens=1),
                replace(header, tokens=1 << 62),
                replace(header, stamp=Stamp(header.stamp.incarnation, 1 << 62)),
                replace(header, stamp=Stamp(1 << 62, 1)),
            ]
        )


MOST_TWINS = 256


class LieKind(Enum):
    """Kinds of lies."""

    VOTES = "votes"
    VERSIONS = "versions"
    LABELS = "labels"
    MERGES = "merges"
    STATES = "states"
    HISTORIES = "histories"
    """False states of which it gives no update: they show nothing of how they were made. Only old runs have
    it: in young ones they are copied (`core.fork_choice`)."""
    ACCUSATIONS = "accusations"
    OFFICES = "offices"
    """Versions without an office (`sim_usurper`)."""


PROVABLE = (LieKind.VOTES, LieKind.VERSIONS, LieKind.LABELS)
FEWEST = 5
"""Number of members from which on some make false merges or states, or accuse falsely. Of fewer, one that
comes late may meet a single voter beside the liar, and nobody can tell which of two lies."""
FALSE_FROM_S = 10.0
"""Time from which a maker of false merges or states makes them: it counts by its work by then."""
ACCUSED_FROM = 4
"""First number of a version that a false accuser accuses: members count by their work by then."""


def lie_of(seed: int, place: int, audited: bool, members: int) -> LieKind:
    """Choose what the liar at this place tells. Every other maker of false merges makes false states."""
    if not audited or members < FEWEST:
        return PROVABLE[(seed + place) % len(PROVABLE)]
    merges = LieKind.STATES if seed % 2 else LieKind.MERGES
    kinds = *PROVABLE, merges, LieKind.ACCUSATIONS
    return kinds[(seed + place) % len(kinds)]


class Perjurer:
    """Liar of one kind; it goes on when found out. Its core is honest; what it signs beside that is not.

    Three kinds can be proved: one votes for everybody who asks, one makes two versions of each parent and
    gives them to one half of its peers each, one puts a false label into its versions. Where merges can be
    made again, there are three more: one makes false merges, one states false states, one accuses an honest
    syncer of the first. In old runs one states false states and gives no updates, which nobody can find out.
    """

    def __init__(self, world: World, peer: str, kind: LieKind) -> None:
        self.kind = kind
        self._world = world
        self._peer = peer
        self._twins: dict[bytes, tuple[SignedVersion, OuterUpdate, FragmentLineage]] = {}
        """Digest of a version of ours -> the other one of the same parent."""
        self._accuses = kind is LieKind.ACCUSATIONS
        if kind is LieKind.MERGES:
            world.clock.at(FALSE_FROM_S, world.false_syncers.add, peer)
            world.clock.at(FALSE_FROM_S, world.false_groups.add, peer)
        if kind in (LieKind.STATES, LieKind.HISTORIES):
            world.clock.at(FALSE_FROM_S, world.false_states.add, peer)

    def _signed(self, header: VersionHeader) -> SignedVersion:
        return SignedVersion(header, HashCrypto(self._peer).sign(signed_bytes("version", header)))

    def sees(self, host: Host, effect: Effect) -> None:
        """Look at what its own core wants: of a version that it is about to save, another one is made."""
        if self._accuses and isinstance(effect, CommitVersion):
            self._accuse(host, effect.version)
        if self.kind is not LieKind.VERSIONS or not isinstance(effect, Persist):
            return
        if not isinstance(effect.record, UpdateRecord):
            return
        version, update = effect.record.version, host.tickets.update(effect.record.ticket)
        parts = tuple(reversed(update.parts))
        if len(version.header.contributors) < 2 or parts == update.parts:
            return
        fragment = version.header.fragment
        other = OuterUpdate.of(fragment, update.number, parts, update.matter, update.longest_steps)
        state = host.stores[fragment].state.apply(other)
        header = replace(version.header, update_digest=other.digest, state_digest=state.digest)
        if len(self._twins) < MOST_TWINS:
            self._twins[version.header.digest()] = self._signed(header), other, state

    def _accuse(self, host: Host, version: SignedVersion) -> None:
        header = version.header
        if header.number < ACCUSED_FROM or header.syncer in self._world.perjurers:
            return
        self._accuses = False
        subject = FalseVersion(short_of(version))
        signature = HashCrypto(self._peer).sign(signed_bytes("accusation", subject))
        for other in self._world.up_hosts():
            if other is not host:
                stated = Stated(Accusation(subject, self._peer, signature))
                self._world.network.send(host, other.peer, stated)

    def says(self, peer: str, message: Message) -> Message:
        """Change what its core says to that peer."""
        if self.kind is LieKind.VOTES and isinstance(message, VoteRefused):
            run, group = self._world.plan.config.run, message.group
            base = self._world.hosts[peer].stores[message.fragment].version.header.head()
            fragment, term = message.fragment, message.term
            body = VoteBody(run, group, fragment, term, peer, self._peer, base.number, base.digest)
            return VoteGranted(Vote(body, HashCrypto(self._peer).sign(signed_bytes("vote", body))))
        if isinstance(message, Announce):
            return replace(message, head=self._head(peer, message.head))
        if isinstance(message, Progress):
            return replace(message, heads=tuple((f, self._head(peer, head)) for f, head in message.heads))
        return message

    def _gets_other(self, peer: str) -> bool:
        return int(peer[1:]) % 2 == 1

    def _head(self, peer: str, head: Head) -> Head:
        twin = self._twins.get(head.digest)
        return twin[0].header.head() if twin is not None and self._gets_other(peer) else head

    def hides(self, found: LoggedUpdate) -> bool:
        """Tell whether it does as if that update were gone."""
        ours = found[0].header.syncer == self._peer
        return ours and self.kind is LieKind.HISTORIES and self._world.clock.now >= FALSE_FROM_S

    def gives(self, peer: str, found: LoggedUpdate) -> LoggedUpdate:
        """Change an update that a peer pulls."""
        version, update = found
        header = version.header
        if header.syncer != self._peer:
            return found
        if self.kind is LieKind.LABELS and header.contributors:
            false = replace(header.contributors[0], signature=b"false")
            return self._signed(replace(header, contributors=(false, *header.contributors[1:]))), update
        twin = self._twins.get(header.digest())
        return twin[:2] if twin is not None and self._gets_other(peer) else found

    def gives_state(self, peer: str, given: GivenState) -> GivenState:
        """Change a state that a peer pulls."""
        twin = self._twins.get(given.version.header.digest())
        if twin is None or not self._gets_other(peer):
            return given
        return given._replace(version=twin[0], state=twin[2])

    def works_on(self, fragment: int) -> bool:
        """Tell whether it contributes to that fragment."""
        return True


class WithheldKind(Enum):
    """Kinds of withholding."""

    VERSIONS = "versions"
    """Updates and states: it names its heads, and is busy whenever it is asked for them."""
    WORK = "work"
    """Contributions of some learners: it says that it has them, and throws them away."""


class Withholder:
    """Member that withholds, from a moment on or from the start. Nothing that it signs is false, so nothing
    can be proved.

    One kind makes versions and gives them to nobody, the other takes some learners' contributions and leaves
    them out of everything that it makes. Members that so leave out everybody else collude.
    """

    def __init__(self, kind: WithheldKind, victims: Iterable[str] = (), from_s: float = 0.0) -> None:
        self.kind, self.victims, self.from_s = kind, frozenset(victims), from_s
        self.swallowed = 0
        """Contributions that it threw away."""

    def withholds(self, now: float) -> bool:
        """Tell whether it gives no version now."""
        return self.kind is WithheldKind.VERSIONS and now >= self.from_s

    def swallows(self, sender: str, now: float) -> bool:
        """Tell whether it throws away what came from that learner."""
        swallowed = self.kind is WithheldKind.WORK and sender in self.victims and now >= self.from_s
        self.swallowed += swallowed
        return swallowed

    def sees(self, host: Host, effect: Effect) -> None:
        """Leave its core alone."""

    def says(self, peer: str, message: Message) -> Message:
        """Say what its core says."""
        return message

    def hides(self, found: LoggedUpdate) -> bool:
        """Tell whether it does as if that update were gone: it gives none at all, or all."""
        return False

    def gives(self, peer: str, found: LoggedUpdate) -> LoggedUpdate:
        """Give what there is, if it gives any."""
        return found

    def gives_state(self, peer: str, given: GivenState) -> GivenState:
        """Give what there is, if it gives any."""
        return given

    def works_on(self, fragment: int) -> bool:
        """Contribute to all fragments."""
        return True


EVERY_S = 0.5
FAR_AHEAD = 1000
"""Versions by which some of its heads are ahead: those are asked for as states, the others as updates."""
FROM_S = 8.0


class Stranger:
    """Peer whose words are all that there is of it. An endpoint of the network, and no host.

    It tells of heavier heads which it never gives, a vote which it never casts, a learner which answers no
    call, offices and candidacies. It begins once somebody votes by the chain: before, everybody's word counts
    (`core.standing`).
    """

    up = True

    def __init__(self, world: World, number: int) -> None:
        self.peer = f"stranger{number}"
        self._world = world
        self._rng: random.Random = random_stream(world.plan.seed, self.peer)
        world.network.endpoints[self.peer] = self
        world.bulk.boasters.add(self.peer)
        world.clock.at(FROM_S + self._rng.uniform(0.0, EVERY_S), self._boast)

    def receive(self, sender: str, message: Message) -> None:
        """Say nothing."""

    def send_failed(self, peer: str) -> None:
        """Try again with the next heartbeat."""

    def _boast(self) -> None:
        self._world.clock.after(EVERY_S, self._boast)
        hosts = list(self._world.up_hosts())
        for host in hosts:
            heads = tuple(
                (fragment, self._above(store.version.header.head(), fragment))
                for fragment, store in enumerate(host.stores)
            )
            self._world.network.send(self, host.peer, self._progress(heads))
            fragment, head = self._rng.choice(heads)
            term = head.term + self._rng.randint(1, 3)
            self._world.network.send(self, host.peer, VoteRequest(WHOLE_RUN, fragment, term, head, "boasts"))

    def _above(self, head: Head, fragment: int) -> Head:
        number = head.number + (1 if fragment % 2 else FAR_AHEAD)
        digest = hashlib.sha256(f"{self.peer}/{fragment}/{number}".encode()).digest()
        return Head(number, digest, head.tokens + 1_000_000, head.term)

    @staticmethod
    def _progress(heads: tuple[tuple[int, Head], ...]) -> Progress:
        return Progress(
            incarnation=1,
            step_time_s=0.1,
            inner_step=1,
            tokens_total=1,
            tokens_per_s=1.0,
            loss=None,
            learning=True,
            confirmed=True,
            stands=True,
            heads=heads,
            offices=tuple((WHOLE_RUN, fragment, head.term + 1) for fragment, head in heads),
            saved=False,
            reach=Reach.DIRECT,
            thin=False,
            votes=True,
        )
