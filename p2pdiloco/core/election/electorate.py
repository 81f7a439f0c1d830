"""The members of one group as this node sees them: who votes, who may stand, of whom a round expects
something (design 5.5).

While the run fits into one group these are all members. In a leaf group they are the members that the seeded
hash puts there. Higher up they are the peers that hold the offices of the groups below, by their own claim.

A group is new at the beginning of an epoch, and its members have not heard each other yet. So for a while a
majority counts those that are listed but unheard too: else each would be a majority of one.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from p2pdiloco.core.api.reach import Reach
from p2pdiloco.core.shared import Shared


class Fitness(IntEnum):
    """How well a member carries an office. It leaves offices to those that are fitter."""

    HIDDEN = 0
    """Nobody can dial it."""
    THIN = 1
    """Its uplink carries less than an office asks."""
    FIT = 2


LEAVES_TO_OTHERS = {
    Fitness.HIDDEN: "cannot be dialled, and others can",
    Fitness.THIN: "has a thin uplink, and others have none",
}
"""Why."""


class Electorate:
    """All members: the one group of a run that fits into one."""

    def __init__(self, shared: Shared, fragment: int) -> None:
        self._shared = shared
        self._fragment = fragment

    def voters(self, now: float) -> list[str]:
        """Everyone who counts in a majority and has been heard, oneself included with a vote. Sorted."""
        return self._shared.voters(now)

    def size(self, now: float) -> int:
        """Of how many a majority is needed."""
        return len(self.voters(now))

    def count(self, peers: Iterable[str], now: float) -> int:
        """How many of these count in a majority."""
        return len(set(peers).intersection(self.voters(now)))

    def admits(self, peer: str, now: float) -> bool:
        """Whether that peer may stand, for all that we know."""
        return True

    def ready(self, now: float) -> bool:
        """Whether enough is known of the others for it to make sense to stand."""
        return True

    def others(self, now: float) -> list[str]:
        """Everyone who is told of elections and versions, without oneself."""
        return self._shared.view.members(now)

    def asked(self, now: float) -> list[str]:
        """Whom a candidate asks for votes."""
        return self._shared.view.voters(now)

    def standing(self, now: float) -> list[str]:
        """Everyone who would stand now, oneself first: ranked to decide who does. Only the fittest of the
        others are ranked, if they are as fit as we are."""
        shared = self._shared
        willing = self.willing(now)
        fitness = {peer: self.fitness(peer) for peer in [shared.me, *willing]}
        fittest = max(fitness.values())
        found = [peer for peer in willing if fitness[peer] == fittest]
        if shared.leaving and not willing:
            found = self.live(now)  # they may be leaving, too, and do as we do
        return [shared.me, *found]

    def willing(self, now: float) -> list[str]:
        """Live others that would stand, by their own word: not who is leaving."""
        progress = self._shared.view.progress
        return [peer for peer in self.live(now) if (p := progress(peer)) and p.confirmed and p.stands]

    def fitness(self, peer: str) -> Fitness:
        """Of that peer, perhaps oneself."""
        shared, view = self._shared, self._shared.view
        own = peer == shared.me
        if not (shared.reach is Reach.DIRECT if own else view.dialable(peer)):
            return Fitness.HIDDEN
        return Fitness.THIN if (shared.uplink.thin if own else view.thin(peer)) else Fitness.FIT

    def better(self, peer: str, now: float) -> list[str]:
        """To whom that peer, perhaps oneself, leaves offices."""
        shared = self._shared
        fitness = self.fitness(peer)
        if fitness is Fitness.FIT:
            return []
        others = self.willing(now)
        if shared.votes and shared.stands and not shared.leaving:
            others = [shared.me, *others]
        return [other for other in others if self.fitness(other) > fitness]

    def out_of_earshot(self, peers: Iterable[str], now: float) -> int:
        """How many of these vote by the list of members, though we cannot hear them: there is no link between
        two that cannot be dialled. 0 where we can be."""
        shared = self._shared
        if shared.reach in (Reach.DIRECT, Reach.UNKNOWN):
            return 0
        unknown = set(peers).difference(self.voters(now), shared.view.confirmed(now), [shared.me])
        listed = [peer for peer in unknown if shared.roster.incarnation(peer) is not None]
        return sum(self.admits(peer, now) for peer in listed)

    def had_votes(self, peers: Iterable[str], now: float) -> int:
        """How many of these are members that have no vote now. What they gave when they had one counts."""
        shared = self._shared
        everybody = len(shared.view.voters(now)) == len(shared.view.confirmed(now))
        if everybody and shared.votes == shared.confirmed:
            return 0  # asked at every heartbeat
        confirmed = {*shared.view.confirmed(now), *([shared.me] if shared.confirmed else [])}
        mute = confirmed.intersection(peers).difference(self.voters(now))
        return sum(self.admits(peer, now) for peer in mute)

    def live(self, now: float) -> list[str]:
        """Members to count on, without oneself."""
        return self._shared.view.live(now)

    def expected(self, now: float) -> list[str]:
        """What a round waits for: names of live learners here, of the groups below higher up."""
        return self._shared.expected_learners(now)

    def reachable(self, now: float) -> int:
        """Of how many of these a quorum may be asked for."""
        return len(self.expected(now))

    def peer_of(self, child: str, now: float) -> str:
        """Who sends for that child; empty if nobody is known."""
        return child

    def child_of(self, peer: str, now: float) -> str:
        """For which child that peer sends."""
        return peer

    def unknown(self, now: float) -> list[str]:
        """Groups below whose syncer is to be found out."""
        return []

    def all_below(self, child: str, learners: Iterable[str]) -> bool:
        """Whether all these learners belong to that group below."""
        return False

    def neighbours(self, now: float) -> frozenset[str]:
        """Whom to exchange heartbeats with because of this group."""
        return frozenset(self.others(now))
