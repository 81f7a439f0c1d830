"""The members of one group as this node sees them: who votes, who may stand, of whom a round expects
something (design 5.5).

While the run fits into one group these are all members. In a leaf group they are the members that the seeded
hash puts there. Higher up they are the peers that hold the offices of the groups below, by their own claim.

A group is new at the beginning of an epoch, and its members have not heard each other yet. So for a while a
majority counts those that are listed but unheard too: else each would be a majority of one.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pdiloco.core.api.reach import Reach
from p2pdiloco.core.shared import Shared
from p2pdiloco.core.uplinks.uplink import MUCH

NOT_DIALABLE = "cannot be dialled, and others can"
THIN = "has a far thinner uplink than others"


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
        """Everyone who would stand now, oneself first: ranked to decide who does. Others that cannot be
        dialled are left out where somebody can, then those whose uplinks are far thinner than another's."""
        shared, view = self._shared, self._shared.view
        willing = self.willing(now)
        dialable = [peer for peer in willing if view.dialable(peer)]
        own = shared.reach is Reach.DIRECT
        found = dialable if dialable or own else willing
        strains = [view.strain(peer) for peer in found]
        if any(strains):
            most = MUCH + min([*strains, shared.strain.value] if own or not dialable else strains)
            found = [peer for peer, strain in zip(found, strains, strict=True) if strain < most]
        if shared.leaving and not willing:
            found = self.live(now)  # they may be leaving, too, and do as we do
        return [shared.me, *found]

    def willing(self, now: float) -> list[str]:
        """Live others that would stand, by their own word: not who is leaving."""
        progress = self._shared.view.progress
        return [peer for peer in self.live(now) if (p := progress(peer)) and p.confirmed and p.stands]

    def passed_over(self, peer: str, now: float) -> str:
        """Why that peer, perhaps oneself, leaves offices to others who would stand; empty if it does not."""
        found = self.better(peer, now)
        return NOT_DIALABLE if NOT_DIALABLE in found.values() else next(iter(found.values()), "")

    def better(self, peer: str, now: float) -> dict[str, str]:
        """To whom that peer, perhaps oneself, leaves offices, and why."""
        shared, view, me = self._shared, self._shared.view, self._shared.me
        own = shared.reach is Reach.DIRECT
        dialable = own if peer == me else view.dialable(peer)
        strain = shared.strain.value if peer == me else view.strain(peer)
        if dialable and strain < MUCH:
            return {}
        others = {p: (view.dialable(p), view.strain(p)) for p in self.willing(now) if p != peer}
        if peer != me and shared.votes and shared.stands and not shared.leaving:
            others[me] = own, shared.strain.value
        found = {}
        for other, (there, theirs) in others.items():
            if there > dialable:
                found[other] = NOT_DIALABLE
            elif there == dialable and strain - theirs >= MUCH:
                found[other] = THIN
        return found

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
