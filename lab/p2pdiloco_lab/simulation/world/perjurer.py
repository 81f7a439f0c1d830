"""A member whose lies can be proved, or found out by everybody. Its core is honest; what it signs beside that
is not.

Three kinds can be proved: one votes for everybody who asks, one makes two versions of each parent and gives
them to one half of its peers each, one puts a false label into its versions. Where merges can be made again,
there are three more: one makes false merges, one states false states, one accuses an honest syncer of the
first. In old runs one states false states and gives no updates, which nobody can find out.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from msgspec.structs import replace

from p2pdiloco.core.api.effects import CommitVersion, Effect, Persist, UpdateRecord
from p2pdiloco.core.api.evidence import Accusation, FalseVersion, short_of
from p2pdiloco.core.api.messages import Announce, Message, Progress, Stated, VoteGranted, VoteRefused
from p2pdiloco.core.api.types import Head, Vote, VoteBody, signed_bytes
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco_lab.simulation.node.lineage import FragmentLineage, OuterUpdate
from p2pdiloco_lab.simulation.world.crypto import HashCrypto

if TYPE_CHECKING:
    from p2pdiloco_lab.simulation.node.host import Host
    from p2pdiloco_lab.simulation.world.disk import LoggedUpdate
    from p2pdiloco_lab.simulation.world.world import World

MOST_TWINS = 256


class LieTold(Enum):
    """Lies of lies."""

    VOTES = "votes"
    VERSIONS = "versions"
    LABELS = "labels"
    MERGES = "merges"
    STATES = "states"
    HISTORIES = "histories"
    """False states of which it gives no update: they show nothing of how they were made. Only old runs have
    it: in young ones they are copied (`core.following.support`)."""
    ACCUSATIONS = "accusations"


PROVABLE = (LieTold.VOTES, LieTold.VERSIONS, LieTold.LABELS)
FEWEST = 5
"""Number of members from which on some make false merges or states, or accuse falsely. Of fewer, one that
comes late may meet a single voter beside the liar, and nobody can tell which of two lies."""
FALSE_FROM_S = 10.0
"""Time from which a maker of false merges or states makes them: it counts by its work by then."""
ACCUSED_FROM = 4
"""First number of a version that a false accuser accuses: members count by their work by then."""


def lie_of(seed: int, place: int, audited: bool, members: int) -> LieTold:
    """Choose what the liar at this place tells. Every other maker of false merges makes false states."""
    if not audited or members < FEWEST:
        return PROVABLE[(seed + place) % len(PROVABLE)]
    merges = LieTold.STATES if seed % 2 else LieTold.MERGES
    kinds = *PROVABLE, merges, LieTold.ACCUSATIONS
    return kinds[(seed + place) % len(kinds)]


class Perjurer:
    """Liar of one kind; it goes on when it is found out."""

    def __init__(self, world: World, peer: str, kind: LieTold) -> None:
        self.kind = kind
        self._world = world
        self._peer = peer
        self._twins: dict[bytes, tuple[SignedVersion, OuterUpdate, FragmentLineage]] = {}
        """Digest of a version of ours -> the other one of the same parent."""
        self._accuses = kind is LieTold.ACCUSATIONS
        if kind is LieTold.MERGES:
            world.clock.at(FALSE_FROM_S, world.false_syncers.add, peer)
            world.clock.at(FALSE_FROM_S, world.false_groups.add, peer)
        if kind in (LieTold.STATES, LieTold.HISTORIES):
            world.clock.at(FALSE_FROM_S, world.false_states.add, peer)

    def _signed(self, header: VersionHeader) -> SignedVersion:
        return SignedVersion(header, HashCrypto(self._peer).sign(signed_bytes("version", header)))

    def sees(self, host: Host, effect: Effect) -> None:
        """Look at what its own core wants: of a version that it is about to save, another one is made."""
        if self._accuses and isinstance(effect, CommitVersion):
            self._accuse(host, effect.version)
        if self.kind is not LieTold.VERSIONS or not isinstance(effect, Persist):
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
        """Accuse the syncer of that version before everybody, once."""
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
        if self.kind is LieTold.VOTES and isinstance(message, VoteRefused):
            run, group = self._world.plan.config.run, message.group
            body = VoteBody(run, group, message.fragment, message.term, peer, self._peer)
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
        return ours and self.kind is LieTold.HISTORIES and self._world.clock.now >= FALSE_FROM_S

    def gives(self, peer: str, found: LoggedUpdate) -> LoggedUpdate:
        """Change an update that a peer pulls."""
        version, update = found
        header = version.header
        if header.syncer != self._peer:
            return found
        if self.kind is LieTold.LABELS and header.contributors:
            false = replace(header.contributors[0], signature=b"false")
            return self._signed(replace(header, contributors=(false, *header.contributors[1:]))), update
        twin = self._twins.get(header.digest())
        return twin[:2] if twin is not None and self._gets_other(peer) else found

    def gives_state(
        self, peer: str, version: SignedVersion, state: FragmentLineage
    ) -> tuple[SignedVersion, FragmentLineage]:
        """Change a state that a peer pulls."""
        twin = self._twins.get(version.header.digest())
        if twin is None or not self._gets_other(peer):
            return version, state
        return twin[0], twin[2]
