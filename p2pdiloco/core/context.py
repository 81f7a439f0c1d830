"""Context of one fragment: what its parts on one node share.

`FragmentContext` has the chain, the `Spare` copy, our votes (`Ballots`), what was found false (`FalseStates`,
`Repairs`), what seats attested (`SeenAttestations`) and the posts in groups, whose members an `Electorate`
knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Protocol

from p2pdiloco.core.api.events import MILESTONES, UpdateApplied, VoteRecord
from p2pdiloco.core.api.evidence import Accusation, FalseState, short_of
from p2pdiloco.core.api.papers import SignedWork, TwoAttestations, excludes
from p2pdiloco.core.api.reasons import Suspicion, VersionFault
from p2pdiloco.core.api.types import Certificate, Contributor, Reach
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader, parse_group
from p2pdiloco.core.base import Shared
from p2pdiloco.core.chain import WITHIN_VERSIONS, Chain, plan_of
from p2pdiloco.core.roster import Roster
from p2pdiloco.errors import invariant
from p2pdiloco.util import BoundedDict


class Tenure(Protocol):
    """Questions that the parts of a fragment ask of a group's office (`Office`)."""

    certificate: Certificate | None
    """Newest one that we hold."""

    @property
    def term(self) -> int:
        """Highest term of which we hold a certificate."""

    @property
    def syncer(self) -> str | None:
        """Peer in office, counted on or not."""

    @property
    def holding(self) -> bool:
        """True: this node is the syncer."""

    def takes(self, now: float) -> bool:
        """Tell whether to send to the syncer."""

    def open_s(self, now: float) -> float:
        """Compute for how long nobody was in office, as far as we know."""

    def why_open(self, now: float, candidate: str = "") -> str:
        """Say why nobody can be counted on in it, or is to leave it to that candidate; empty if one can."""

    def suspect(self, why: Suspicion, **details: float) -> None:
        """Stop counting on the syncer."""


class OwnPost(Protocol):
    """Questions that the parts of a fragment ask of a post of theirs (`GroupPost`)."""

    name: str
    """Name of the group."""
    electorate: Electorate

    @property
    def office(self) -> Tenure:
        """Office of the group, as this node sees it."""


class FragmentContext:
    """Chain, spare copy, votes and present posts of one fragment.

    Args:
        posts: our leaf group's first, then one more per level while we hold the office below it; taken and
            given up by `Posts`.
        needs_syncer: question of a node that leaves: whether something of ours is not merged yet.
    """

    def __init__(
        self,
        shared: Shared,
        index: int,
        chain: Chain,
        votes: Iterable[VoteRecord],
        posts: Sequence[OwnPost],
        needs_syncer: Callable[[], bool],
    ) -> None:
        self.shared = shared
        self.index = index
        self.chain = chain
        self.roster = Roster(shared.papers, chain)
        shared.keep(self.roster)
        self.spare = Spare()
        self.repairs = Repairs(shared, chain)
        self.false_states = FalseStates(shared, chain)
        self.attested = SeenAttestations(shared, index, chain)
        self.ballots = Ballots(vote for vote in votes if vote.group != MILESTONES)
        self.posts = posts
        self.moved_s = -math.inf
        """Time at which the newest version was made, or became ours."""
        self.needs_syncer = needs_syncer

    @property
    def leaf(self) -> OwnPost:
        """Post in the group in which our learner takes part."""
        return self.posts[0]

    @property
    def grouped(self) -> bool:
        """True: the next version is made by more than one group."""
        return self.chain.header.groups > 1

    def voted(self, of: Certificate) -> tuple[int, int]:
        """Count the parts of a certificate's group that voted, and all that have a seat of the head's table.
        A part of a leaf group is a seat; of another group, a group just below it."""
        plan = plan_of(self.chain.header, self.shared.config)
        level, index = plan.place(of.group) or (0, 0)
        parts: dict[str, object] = {}
        for seat in self.chain.marks.seats:
            leaf = plan.leaf_of(seat)
            if plan.above(leaf, level) == (level, index):
                parts[seat] = plan.above(leaf, level - 1) if level else seat
        voters = parts.keys() & (vote.body.voter for vote in of.votes)
        return len({parts[seat] for seat in voters}), len({*parts.values()})

    def moved(self, now: float) -> None:
        """Note that the newest version was made, or became ours."""
        self.moved_s = now


class Fitness(IntEnum):
    """Ability of a member to carry an office. It leaves offices to those that are fitter."""

    HIDDEN = 0
    """Member that no other can dial."""
    THIN = 1
    """Member whose uplink carries less than an office asks."""
    FIT = 2


LEAVES_TO_OTHERS = {
    Fitness.HIDDEN: "cannot be dialled, and others can",
    Fitness.THIN: "has a thin uplink, and others have none",
}
"""Reasons to leave offices to others, for people."""


class Electorate:
    """Electorate of one group: which members vote, may stand, and are expected in a round.

    This class is that of all members: the one group of a run that fits into one.

    Members are as this node sees them. In a leaf group they are the members that the seeded hash puts there.
    Higher up they are the peers that hold the offices of the groups below, by their certificates
    (docs/protocol/groups.md, section 6).

    A group is new at the beginning of an epoch, and its members have not heard each other yet. So for a while
    a majority counts those that are listed but unheard too: else each would be a majority of one.
    """

    def __init__(self, shared: Shared, fragment: int, roster: Roster) -> None:
        self._shared = shared
        self._fragment = fragment
        self._roster = roster
        self._elsewhere: set[str] = set()

    def voters(self, now: float) -> list[str]:
        """List everyone that counts in a majority and has been heard, oneself included with a vote.
        Sorted."""
        return self._roster.of("voters", self._shared.voters(now))

    def size(self, now: float) -> int:
        """Count the members of which a majority is needed."""
        return len(self.voters(now)) + len(self._unheard(now))

    def count(self, peers: Iterable[str], now: float) -> int:
        """Count those of these that count in a majority."""
        return len({*self.voters(now), *self._unheard(now)}.intersection(peers))

    def _unheard(self, now: float) -> list[str]:
        return []

    def admits(self, peer: str, now: float) -> bool:
        """Tell whether that peer belongs here, for all that we know."""
        return True

    def decides(self, peer: str, now: float) -> bool:
        """Tell whether that peer may stand, and is believed about offices: who votes."""
        return peer in self.voters(now)

    def ready(self, now: float) -> bool:
        """Tell whether enough is known of the others for it to make sense to stand."""
        unheard = len(self._unheard(now))
        return not unheard or len(self.voters(now)) > unheard

    def others(self, now: float) -> list[str]:
        """List everyone that is told of elections and versions, without oneself."""
        return self._shared.view.members(now)

    def asked(self, now: float) -> list[str]:
        """List the peers that a candidate asks for votes: those, too, that have not answered for long."""
        mute = filter(self._shared.view.mute, self._roster.of("asked", self._shared.view.confirmed(now)))
        asked = {*self.voters(now), *(peer for peer in mute if self.admits(peer, now))}
        return sorted(asked - {self._shared.me})

    def candidates(self, now: float) -> list[str]:
        """List everyone that would stand now, oneself first: ranked to decide who does. Only the fittest of
        the others are ranked, if they are as fit as we are."""
        shared = self._shared
        willing = self.willing(now)
        fitness = {peer: self.fitness(peer) for peer in [shared.me, *willing]}
        fittest = max(fitness.values())
        found = [peer for peer in willing if fitness[peer] == fittest]
        if shared.leaving and not willing:
            found = self.live(now)  # they may be leaving, too, and do as we do
        return [shared.me, *found]

    def willing(self, now: float) -> list[str]:
        """List the live others that would stand, by their own word: not those that are leaving."""
        progress, deciding = self._shared.view.progress, set(self.voters(now))
        live = [peer for peer in self.live(now) if peer in deciding]
        return [peer for peer in live if (p := progress(peer)) and p.confirmed and p.stands]

    def fitness(self, peer: str) -> Fitness:
        """Judge that peer, perhaps oneself."""
        shared, view = self._shared, self._shared.view
        own = peer == shared.me
        if not (shared.reach is Reach.DIRECT if own else view.dialable(peer)):
            return Fitness.HIDDEN
        return Fitness.THIN if (shared.uplink.thin if own else view.thin(peer)) else Fitness.FIT

    def fitter(self, peer: str, now: float) -> list[str]:
        """List the members to which that peer, perhaps oneself, leaves offices."""
        shared = self._shared
        fitness = self.fitness(peer)
        if fitness is Fitness.FIT:
            return []
        others = self.willing(now)
        if shared.votes and shared.willing and self.decides(shared.me, now):
            others = [shared.me, *others]
        return [other for other in others if self.fitness(other) > fitness]

    def live(self, now: float) -> list[str]:
        """List the members to count on, without oneself."""
        return self._shared.view.live(now)

    def expected(self, now: float) -> list[str]:
        """List what a round waits for: names of live learners here, of the groups below higher up."""
        return self._shared.expected_learners(now)

    def reachable(self, now: float) -> int:
        """Count those of these of which a quorum may be asked for: nobody on another branch."""
        view, roster = self._shared.view, self._roster
        attending = roster.attending("learners", self.expected(now))
        heads = (view.head(peer, self._fragment) for peer in attending)
        return sum(head is None or roster.knows(head) for head in heads)

    def leave_out(self, voters: set[str]) -> None:
        """Count these, which did not judge our last candidacy, in no majority of a leaf group while no
        updates lead from them to us. (Without those that may be ahead we would make an office of our own.)"""
        self._elsewhere = voters

    def peer_of(self, child: str, now: float) -> str:
        """Find the peer that sends for that child; empty if none is known."""
        return child

    def child_of(self, peer: str, now: float) -> str:
        """Find the child for which that peer sends."""
        return peer

    def all_below(self, child: str, learners: Iterable[str]) -> bool:
        """Tell whether all these learners belong to that group below."""
        return False

    def neighbours(self, now: float) -> frozenset[str]:
        """List the peers to exchange heartbeats with because of this group."""
        return frozenset(self.others(now))


class Spare:
    """Mark whether the fragment's one spare copy is in use: by a merge, an outer step or a fetched state."""

    def __init__(self) -> None:
        self.busy = False

    def take(self) -> None:
        """Use it, which nobody does just now."""
        invariant(not self.busy, "a fragment's spare copy is used twice at a time")
        self.busy = True

    def free(self) -> None:
        """Note that nobody uses it any more."""
        self.busy = False


MAX_BALLOTS = 32
"""Groups of one fragment in which our last vote is remembered, as many as the votes log keeps."""


class Ballots:
    """Newest votes of ours in every group. They bind also when a seat was given up and is taken again."""

    def __init__(self, votes: Iterable[VoteRecord]) -> None:
        self._given: dict[str, tuple[VoteRecord, bool]] = {}
        self._forgotten = (-1, 0)
        """Newest epoch and highest term of what is not remembered: below, we vote no more."""
        found = sorted(votes, key=lambda v: (_epoch(v.group), v.term))
        if len({vote.group for vote in found}) >= MAX_BALLOTS:
            self._forget(found[0].group, max(vote.term for vote in found))
        for vote in found:
            self.give(vote, durable=True)

    def give(self, vote: VoteRecord, durable: bool) -> None:
        """Remember our vote; `durable` once it is on the disk."""
        self._given.pop(vote.group, None)
        self._given[vote.group] = (vote, durable)
        while len(self._given) > MAX_BALLOTS:
            oldest = next(iter(self._given))
            self._forget(oldest, self._given.pop(oldest)[0].term)

    def _forget(self, group: str, term: int) -> None:
        epoch, highest = self._forgotten
        self._forgotten = (max(epoch, _epoch(group)), max(highest, term))

    def last(self, group: str) -> tuple[VoteRecord | None, bool]:
        """Find (our newest vote in that group, whether it is durable)."""
        return self._given.get(group, (None, False))

    def floor(self, group: str) -> int:
        """Find the highest term in which we may have voted there without remembering for whom."""
        epoch, term = self._forgotten
        return term if group not in self._given and _epoch(group) <= epoch else 0


def _epoch(group: str) -> int:
    parsed = parse_group(group)
    return -1 if parsed is None else parsed[0]


class FalseStates:
    """Versions of one fragment whose headers state another state than their update makes, as this node found.

    A member that stands on a version knows to the bit which state an update makes of it. A syncer could state
    the right update and a false digest, and everybody would copy a state of its choosing. So such a version
    is refused, what comes after it by the same syncer is not copied, and the syncer is accused before all.

    Rules: docs/protocol/audits.md, section 6.
    """

    def __init__(self, shared: Shared, chain: Chain) -> None:
        self._shared, self._chain = shared, chain
        self._found: BoundedDict[bytes, tuple[str, int]] = BoundedDict()
        """Digest of each false version -> its syncer and number."""

    def __contains__(self, digest: object) -> bool:
        """Tell whether the version of that digest has a false state."""
        return digest in self._found

    def builds_on(self, header: VersionHeader) -> bool:
        """Tell whether a version is false, or may be made by the same syncer of a false one."""
        found = self._found.values()
        return any(syncer == header.syncer and number <= header.number for syncer, number in found)

    def restore(self, subject: FalseState) -> None:
        """Take up what this node found before its restart: others may hold that state still."""
        self._found[subject.version_digest()] = subject.maker(), subject.number

    def made_here(self, subject: FalseState) -> bool:
        """Tell whether we made the outer step of that version ourselves, with the state that it states. Who
        copied a state has not its parent in its log; of a version of our own our word says nothing."""
        here = subject.maker() != self._shared.me and self._chain.knows(
            subject.number, subject.version_digest()
        )
        return here and self._chain.logged(subject.number - 1) is not None

    def judge(
        self,
        applied: UpdateApplied,
        version: SignedVersion,
        holders: Callable[[bytes], list[str]],
        now: float,
    ) -> VersionFault | None:
        """Say why a version whose outer step was made here is not taken; None: it is. Accuse the liar.

        `holders` lists the members whose head is a version (`ForkChoice.holders`).
        """
        header = version.header
        if applied.unsound:
            return VersionFault.OUT_OF_SCALE
        if applied.state_digest == header.state_digest and self._chain.is_child(header):
            return None
        if not applied.certain or self._accepted_by_most(header, holders(header.digest()), now):
            return VersionFault.DIGEST_DIFFERS
        self._accuse(version, now)
        return VersionFault.FALSE_STATE

    def _accepted_by_most(self, header: VersionHeader, holders: Iterable[str], now: float) -> bool:
        """Tell whether most seats that are here, and we, stand on that version, its syncer aside: then it is
        we who are wrong. We count without a seat as well: one of two seats may be its syncer's friend."""
        shared = self._shared
        here = self._chain.marks.seats.intersection(shared.view.confirmed(now))
        voters = here.difference((header.syncer,)) | {shared.me}
        return 2 * len(voters.intersection(holders)) > len(voters)

    def _accuse(self, version: SignedVersion, now: float) -> None:
        """Refuse a version from now on, and accuse its syncer, which excludes it here."""
        shared, header, subject = self._shared, version.header, FalseState(short_of(version))
        self._found[header.digest()] = header.syncer, header.number
        for accusation in shared.accusations.of(subject.digest()):
            shared.accusations.settled(accusation)
        shared.excluded.found(Accusation(subject, shared.me, shared.sign("accusation", subject)))


class Repairs:
    """Repairs of one fragment. A later version takes a false one back: it adds the true update, and subtracts
    the false.

    Outer steps are linear, so in the end it is as if the true update had come in its time, momentum included;
    and no contribution is merged again. A syncer that found the version false has the true update, and makes
    the repair in its next version of that fragment. No update is longer than others for it, so that a false
    repair does no more harm than a false merge; and nobody needs to know that a version was false in order to
    follow its repair.

    Rules: docs/protocol/audits.md, section 4.
    """

    def __init__(self, shared: Shared, chain: Chain) -> None:
        self._shared, self._chain = shared, chain
        self._remade: BoundedDict[bytes, bool] = BoundedDict()
        """Versions that we found false, and whose true update we have."""

    def remade(self, digest: bytes) -> None:
        """Note that the true update of a false version is here."""
        self._remade[digest] = True

    def has(self, digest: bytes | None) -> bool:
        """Tell whether the true update of that version was here."""
        return digest in self._remade

    def next(self) -> SignedVersion | None:
        """Find a false version that our next one is to repair; None: there is none."""
        oldest = self._chain.head.number + 1 - WITHIN_VERSIONS
        for digest in self._remade:
            version = self._chain.find(digest)
            if version is not None and version.header.number >= oldest and not self._chain.repaired(digest):
                return version
        return None

    def fault(self, header: VersionHeader) -> VersionFault | None:
        """Say what is wrong with the repair that a child of our head states, if it states one."""
        digest, chain = header.repairs, self._chain
        if digest is None:
            return None
        if not self._shared.config.audited or chain.repaired(digest):
            return VersionFault.FALSE_REPAIR
        version = chain.find(digest)
        if version is not None:
            too_old = version.header.number < header.number - WITHIN_VERSIONS
            return VersionFault.FALSE_REPAIR if too_old else None
        # Only whoever has all of them can tell that there is no such version.
        recent = range(max(0, header.number - WITHIN_VERSIONS), header.number)
        has_all = all(chain.logged(number) is not None for number in recent)
        return VersionFault.FALSE_REPAIR if has_all else None


MOST_KEPT = 4
"""Attestations of one seat that are compared with its next."""


class SeenAttestations:
    """Attestations in labels that this node has seen, the newest few of each seat.

    Rules: docs/protocol/proofs.md, section 3.
    """

    def __init__(self, shared: Shared, fragment: int, chain: Chain) -> None:
        self._shared, self._fragment, self._chain = shared, fragment, chain
        self._seen: BoundedDict[str, tuple[SignedWork, ...]] = BoundedDict()

    def seen(self, giver: str, parts: Sequence[Contributor]) -> None:
        """Compare those of these contributions, which a peer gave, with those before."""
        seats, run = self._chain.marks.seats, self._shared.config.run
        for part in parts:
            if part.attestation is None or part.learner not in seats:
                continue
            known = self._seen.get(part.learner, ())
            if any(work.label.attestation == part.attestation for work in known):
                continue
            work = SignedWork(part.work(run, self._fragment), part.signature)
            other = next((w for w in known if excludes(w.label.attestation, part.attestation)), None)
            if other is None:
                self._seen[part.learner] = (*known, work)[-MOST_KEPT:]
            else:
                self._shared.excluded.found(TwoAttestations(other, work), giver)
