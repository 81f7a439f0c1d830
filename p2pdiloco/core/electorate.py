"""The members of one group as this node sees them: who votes, who may stand, of whom a round expects
something (design 5.5).

While the run fits into one group these are all members. In a leaf group they are the members that the seeded
hash puts there. Higher up they are the peers that hold the offices of the groups below, by their own claim.

A group is new at the beginning of an epoch, and its members have not heard each other yet. So for a while a
majority counts those that are listed but unheard too: else each would be a majority of one.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pdiloco.core.derived import Derived
from p2pdiloco.core.grouping import children, group_name, leaf_index, leaf_span, level_sizes
from p2pdiloco.core.reach import Reach
from p2pdiloco.core.shared import Shared
from p2pdiloco.core.uplink import MUCH

NOT_DIALABLE = "cannot be dialled, and others can"
THIN = "has a far thinner uplink than others"
MEETING_S = 1.0
"""So long the members of a new group are waited for before a mere majority elects."""
BELIEF = 2.0
"""Groups below whose syncer is unknown count in a majority for so many times `suspect_s`."""


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
        willing = self._counted(now)
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

    def _counted(self, now: float) -> list[str]:
        """Those of them that offices are left to."""
        shirkers = self._shared.shirkers
        return [peer for peer in self.willing(now) if shirkers.counts(peer, now)]

    def passed_over(self, peer: str, now: float) -> str:
        """Why that peer, perhaps oneself, leaves offices to others who would stand; empty if it does not."""
        found = self.better(peer, now)
        return NOT_DIALABLE if NOT_DIALABLE in found.values() else next(iter(found.values()), "")

    def better(self, peer: str, now: float, shirkers: bool = False) -> dict[str, str]:
        """To whom that peer, perhaps oneself, leaves offices, and why. `shirkers`: those that left offices to
        others before count, too."""
        shared, view, me = self._shared, self._shared.view, self._shared.me
        own = shared.reach is Reach.DIRECT
        dialable = own if peer == me else view.dialable(peer)
        strain = shared.strain.value if peer == me else view.strain(peer)
        if dialable and strain < MUCH:
            return {}
        willing = self.willing(now) if shirkers else self._counted(now)
        others = {other: (view.dialable(other), view.strain(other)) for other in willing if other != peer}
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


class LeafElectorate(Electorate):
    """The members of one leaf group."""

    def __init__(
        self, shared: Shared, fragment: int, plan: tuple[int, int], index: int, since_s: float
    ) -> None:
        super().__init__(shared, fragment)
        self._epoch, self._groups = plan
        self._index = index
        self._since_s = since_s
        self._mine: dict[str, bool] = {}
        self._derived = Derived()

    def _belongs(self, peer: str) -> bool:
        found = self._mine.get(peer)
        if found is None:
            run = self._shared.config.run
            found = leaf_index(run, self._fragment, self._epoch, self._groups, peer) == self._index
            self._mine[peer] = found
        return found

    def _ours(self, name: str, peers: list[str]) -> list[str]:
        """Those of `peers` that belong here."""
        return self._derived.of(name, self._belonging, peers)

    def _belonging(self, peers: list[str]) -> list[str]:
        return [peer for peer in peers if self._belongs(peer)]

    def mates(self) -> tuple[str, ...]:
        """Everybody who is listed here."""
        shared = self._shared
        leaves = shared.roster.leaves(shared.config.run, self._fragment, self._epoch, self._groups)
        return leaves[self._index]

    def _unheard(self, now: float) -> list[str]:
        """Listed and not heard of yet; believed in for the first seconds of the epoch."""
        if now >= self._since_s + self._shared.timing.suspect_s:
            return []
        shared = self._shared
        return [p for p in self.mates() if p != shared.me and shared.view.may_come(p, now)]

    def voters(self, now: float) -> list[str]:
        shared, others = self._shared, self._ours("voters", self._shared.view.voters(now))
        return self._derived.of("all-voters", shared.with_me, others) if shared.votes else others

    def size(self, now: float) -> int:
        return len(self.voters(now)) + len(self._unheard(now))

    def count(self, peers: Iterable[str], now: float) -> int:
        entitled = {*self.voters(now), *self._unheard(now)}
        return len(set(peers) & entitled)

    def admits(self, peer: str, now: float) -> bool:
        return self._belongs(peer)

    def ready(self, now: float) -> bool:
        voters, unheard = len(self.voters(now)), len(self._unheard(now))
        return unheard == 0 or (2 * voters > voters + unheard)

    def others(self, now: float) -> list[str]:
        return self._ours("members", self._shared.view.members(now))

    def asked(self, now: float) -> list[str]:
        return [*self._ours("voters", self._shared.view.voters(now)), *self._unheard(now)]

    def standing(self, now: float) -> list[str]:
        return [*super().standing(now), *self._unheard(now)]

    def live(self, now: float) -> list[str]:
        return self._ours("live", self._shared.view.live(now))

    def expected(self, now: float) -> list[str]:
        shared, others = self._shared, self._ours("learners", self._shared.view.live_learners(now))
        return self._derived.of("all-learners", shared.with_me, others) if shared.learning else others

    def neighbours(self, now: float) -> frozenset[str]:
        return self._derived.of("neighbours", self._around, self.mates(), self.others(now))

    def _around(self, *peers: Iterable[str]) -> frozenset[str]:
        return frozenset().union(*peers) - {self._shared.me}


class UpperElectorate(Electorate):
    """The syncers of the groups below one group. We are one of them: else we have no seat here."""

    def __init__(
        self,
        shared: Shared,
        fragment: int,
        plan: tuple[int, int],
        place: tuple[int, int],
        own_child: str,
        since_s: float,
    ) -> None:
        super().__init__(shared, fragment)
        epoch, groups = self._plan = plan
        self._own_child = own_child
        self._since_s = since_s
        sizes = level_sizes(groups, shared.config.group_size)
        level, index = place
        self._children: dict[str, range] = {
            group_name(epoch, groups, level - 1, child): leaf_span(sizes, level - 1, child)
            for child in children(sizes, level, index)
        }
        """Name of every group below, and the leaf groups that are in it."""
        self._holders: dict[str, str] = {}
        self._seen_members: list[str] | None = None
        self._seen_claims = -1

    @property
    def children(self) -> dict[str, range]:
        """The groups below: name -> leaf groups in it."""
        return self._children

    def holders(self, now: float) -> dict[str, str]:
        """The groups below whose syncer is known: name -> peer. A live claimant goes before a silent one."""
        shared = self._shared
        members = shared.view.members(now)
        if members is not self._seen_members or shared.claims.version != self._seen_claims:
            self._seen_members, self._seen_claims = members, shared.claims.version
            alive, known = set(shared.view.live(now)), set(members)
            self._holders = {}
            for child in self._children:
                if child == self._own_child:
                    self._holders[child] = shared.me
                    continue
                claims = shared.claims.of(self._fragment, child)
                ranked = [(peer in alive, term, peer) for peer, term in claims.items() if peer in known]
                if ranked:
                    self._holders[child] = max(ranked)[2]
        return self._holders

    def _peers(self, now: float, among: list[str]) -> list[str]:
        holders = set(self.holders(now).values())
        return [peer for peer in among if peer in holders]

    def _occupied(self, child: str) -> bool:
        """Whether anybody is listed in one of its leaf groups."""
        shared = self._shared
        leaves = shared.roster.leaves(shared.config.run, self._fragment, *self._plan)
        return any(leaves[leaf] for leaf in self._children[child])

    def unknown(self, now: float) -> list[str]:
        known = self.holders(now)
        return [child for child in self._children if child not in known and self._occupied(child)]

    def _believed(self, now: float) -> list[str]:
        patient = now < self._since_s + BELIEF * self._shared.timing.suspect_s
        return self.unknown(now) if patient else []

    def voters(self, now: float) -> list[str]:
        others = self._peers(now, self._shared.view.voters(now))
        return sorted([*others, self._shared.me]) if self._shared.votes else others

    def size(self, now: float) -> int:
        return len(self.voters(now)) + len(self._believed(now))

    def count(self, peers: Iterable[str], now: float) -> int:
        """Whoever is unknown to us may be the syncer of a group whose syncer is unknown to us."""
        given, voters = set(peers), set(self.voters(now))
        strangers = given.difference(voters, self.holders(now).values())
        return len(given & voters) + min(len(strangers), len(self._believed(now)))

    def admits(self, peer: str, now: float) -> bool:
        return peer in self.holders(now).values()

    def ready(self, now: float) -> bool:
        voters, unknown = len(self.voters(now)), len(self._believed(now))
        met = now >= self._since_s + MEETING_S and 2 * voters > voters + unknown
        return unknown == 0 or met

    def others(self, now: float) -> list[str]:
        return self._peers(now, self._shared.view.members(now))

    def asked(self, now: float) -> list[str]:
        return self._peers(now, self._shared.view.voters(now))

    def live(self, now: float) -> list[str]:
        return self._peers(now, self._shared.view.live(now))

    def expected(self, now: float) -> list[str]:
        live = {*self.live(now), self._shared.me}
        known = [child for child, peer in self.holders(now).items() if peer in live]
        return sorted([*known, *self._believed(now)])

    def reachable(self, now: float) -> int:
        return len(self.live(now)) + 1

    def all_below(self, child: str, learners: Iterable[str]) -> bool:
        run, span = self._shared.config.run, self._children.get(child, range(0))
        return all(leaf_index(run, self._fragment, *self._plan, learner) in span for learner in learners)

    def peer_of(self, child: str, now: float) -> str:
        return self.holders(now).get(child, "")

    def child_of(self, peer: str, now: float) -> str:
        return next((child for child, holder in self.holders(now).items() if holder == peer), "")
