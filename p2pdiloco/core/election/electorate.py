"""Electorate of one group: which members vote, may stand, and are expected in a round.

This is the group as this node sees it. While the run fits into one group these are all members. In a leaf
group they are the members that the seeded hash puts there. Higher up they are the peers that hold the offices
of the groups below, by their own claim (docs/protocol/groups.md, section 6).

A group is new at the beginning of an epoch, and its members have not heard each other yet. So for a while a
majority counts those that are listed but unheard too: else each would be a majority of one.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from p2pdiloco.core.api.reach import Reach
from p2pdiloco.core.members.standing import Standing
from p2pdiloco.core.shared import Shared


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
    """Electorate of all members: the one group of a run that fits into one."""

    def __init__(self, shared: Shared, fragment: int, standing: Standing) -> None:
        self._shared = shared
        self._fragment = fragment
        self._standing = standing

    def voters(self, now: float) -> list[str]:
        """List everyone that counts in a majority and has been heard, oneself included with a vote.
        Sorted."""
        return self._standing.answering(self._entitled(now))

    def _entitled(self, now: float) -> list[str]:
        """List everyone that would count, if it answers."""
        return self._standing.deciding("voters", self._shared.voters(now))

    def size(self, now: float) -> int:
        """Count the members of which a majority is needed."""
        return len(self.voters(now))

    def count(self, peers: Iterable[str], now: float) -> int:
        """Count those of these that count in a majority."""
        return len(set(peers).intersection(self.voters(now)))

    def admits(self, peer: str, now: float) -> bool:
        """Tell whether that peer belongs here, for all that we know."""
        return True

    def decides(self, peer: str, now: float) -> bool:
        """Tell whether that peer may stand, and is believed about offices: who votes."""
        return peer in self.voters(now)

    def ready(self, now: float) -> bool:
        """Tell whether enough is known of the others for it to make sense to stand."""
        return True

    def others(self, now: float) -> list[str]:
        """List everyone that is told of elections and versions, without oneself."""
        return self._shared.view.members(now)

    def asked(self, now: float) -> list[str]:
        """List the peers that a candidate asks for votes."""
        return [peer for peer in self._entitled(now) if peer != self._shared.me]

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

    def out_of_earshot(self, peers: Iterable[str], now: float) -> int:
        """Count those of these that vote by the list of members, though we cannot hear them: there is no link
        between two that cannot be dialled. 0 where we can be."""
        shared = self._shared
        if shared.reach in (Reach.DIRECT, Reach.UNKNOWN):
            return 0
        unknown = set(peers).difference(self.voters(now), shared.view.confirmed(now), [shared.me])
        known = [peer for peer in unknown if shared.roster.incarnation(peer) is not None]
        listed = self._standing.listed(known)
        return sum(self.admits(peer, now) for peer in listed)

    def had_votes(self, peers: Iterable[str], now: float) -> int:
        """Count those of these that are members without a vote now. What they gave when they had one
        counts."""
        shared = self._shared
        everybody = len(shared.view.voters(now)) == len(shared.view.confirmed(now))
        if everybody and shared.votes == shared.confirmed:
            return 0  # asked at every heartbeat
        confirmed = {*shared.view.confirmed(now), *([shared.me] if shared.confirmed else [])}
        deciding = self._standing.deciding("with-mute", sorted(confirmed))
        mute = set(deciding).intersection(peers).difference(self.voters(now))
        return sum(self.admits(peer, now) for peer in mute)

    def live(self, now: float) -> list[str]:
        """List the members to count on, without oneself."""
        return self._shared.view.live(now)

    def expected(self, now: float) -> list[str]:
        """List what a round waits for: names of live learners here, of the groups below higher up."""
        return self._shared.expected_learners(now)

    def reachable(self, now: float) -> int:
        """Count those of these of which a quorum may be asked for. Where they are all newcomers to a chain of
        others, nothing is known of any but oneself."""
        if self._standing.none_attends(self.expected(now)):
            return 1
        return len(self._standing.attending("learners", self.expected(now)))

    def newcomer(self, child: str) -> bool:
        """Tell whether nothing of that child was merged lately: all that is known of it is its own word."""
        return not self._standing.attends(child)

    def peer_of(self, child: str, now: float) -> str:
        """Find the peer that sends for that child; empty if none is known."""
        return child

    def child_of(self, peer: str, now: float) -> str:
        """Find the child for which that peer sends."""
        return peer

    def unknown(self, now: float) -> list[str]:
        """List the groups below whose syncer is to be found out."""
        return []

    def all_below(self, child: str, learners: Iterable[str]) -> bool:
        """Tell whether all these learners belong to that group below."""
        return False

    def neighbours(self, now: float) -> frozenset[str]:
        """List the peers to exchange heartbeats with because of this group."""
        return frozenset(self.others(now))
