"""Electorates of a leaf group, and of a group of groups: their members as this node sees them.

Rules: docs/protocol/groups.md, section 6.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pdiloco.core.api.grouping import children, group_name, leaf_index, leaf_span, level_sizes
from p2pdiloco.core.election.electorate import Electorate
from p2pdiloco.core.members.derived import Derived
from p2pdiloco.core.members.standing import Standing
from p2pdiloco.core.shared import Shared
from p2pdiloco.util import BoundedDict

MEETING_S = 1.0
"""Time for which the members of a new group are waited for before a mere majority elects."""


MAX_ASKED = 8192
"""Peers of which it is remembered whether they belong to a leaf group, twice as many as a view knows."""
BELIEF = 2.0
"""Multiple of `suspect_s` for which groups below whose syncer is unknown count in a majority."""


class LeafElectorate(Electorate):
    """Members of one leaf group."""

    def __init__(
        self,
        shared: Shared,
        fragment: int,
        standing: Standing,
        plan: tuple[int, int],
        index: int,
        since_s: float,
    ) -> None:
        super().__init__(shared, fragment, standing)
        self._epoch, self._groups = plan
        self._index = index
        self._since_s = since_s
        self._mine: BoundedDict[str, bool] = BoundedDict(MAX_ASKED)
        self._derived = Derived()

    def _belongs(self, peer: str) -> bool:
        found = self._mine.get(peer)
        if found is None:
            run = self._shared.config.run
            found = leaf_index(run, self._fragment, self._epoch, self._groups, peer) == self._index
            self._mine[peer] = found
        return found

    def _ours(self, name: str, peers: list[str]) -> list[str]:
        """List those of `peers` that belong here."""
        return self._derived.of(name, self._belonging, peers)

    def _belonging(self, peers: list[str]) -> list[str]:
        return [peer for peer in peers if self._belongs(peer)]

    def mates(self) -> tuple[str, ...]:
        """List everybody who is listed here."""
        shared = self._shared
        leaves = shared.roster.leaves(shared.config.run, self._fragment, self._epoch, self._groups)
        return leaves[self._index]

    def _unheard(self, now: float) -> list[str]:
        """List the members that are listed and not heard of yet; believed in for the first seconds of the
        epoch."""
        if now >= self._since_s + self._shared.timing.suspect_s:
            return []
        shared = self._shared
        known = self._derived.of("known", self._standing.listed, self.mates(), self._standing.marks)
        return [p for p in known if p != shared.me and shared.view.may_come(p, now)]

    def _entitled(self, now: float) -> list[str]:
        return self._standing.deciding("voters", self._ours("voters", self._shared.voters(now)))

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
        return [*super().asked(now), *self._unheard(now)]

    def candidates(self, now: float) -> list[str]:
        return [*super().candidates(now), *self._unheard(now)]

    def live(self, now: float) -> list[str]:
        return self._ours("live", self._shared.view.live(now))

    def expected(self, now: float) -> list[str]:
        return self._ours("learners", self._shared.expected_learners(now))

    def neighbours(self, now: float) -> frozenset[str]:
        return self._derived.of("neighbours", self._around, self.mates(), self.others(now))

    def _around(self, *peers: Iterable[str]) -> frozenset[str]:
        return frozenset().union(*peers) - {self._shared.me}


class UpperElectorate(Electorate):
    """Syncers of the groups below one group. We are one of them: else we have no seat here."""

    def __init__(
        self,
        shared: Shared,
        fragment: int,
        standing: Standing,
        plan: tuple[int, int],
        place: tuple[int, int],
        own_child: str,
        since_s: float,
    ) -> None:
        super().__init__(shared, fragment, standing)
        epoch, groups = self._plan = plan
        self._own_child = own_child
        self._since_s = since_s
        sizes = level_sizes(groups, shared.config.group_size)
        level, index = place
        self._children: dict[str, range] = {
            group_name(epoch, groups, level - 1, child): leaf_span(sizes, level - 1, child)
            for child in children(sizes, level, index)
        }
        """Leaf groups in every group below, by its name."""
        self._holders: dict[str, str] = {}
        self._seen_members: list[str] | None = None
        self._seen_claims = -1

    @property
    def children(self) -> dict[str, range]:
        """Leaf groups in every group below, by its name."""
        return self._children

    def holders(self, now: float) -> dict[str, str]:
        """Find the groups below whose syncer is known: name -> peer. A live claimant goes before a silent
        one; newcomers alone in a group are heard all the same."""
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
                here = {peer: term for peer, term in claims.items() if peer in known}
                ranked = [(p in alive, term, p) for p, term in self._credible(child, here).items()]
                if ranked:
                    self._holders[child] = max(ranked)[2]
        return self._holders

    def _credible(self, child: str, claims: dict[str, int]) -> dict[str, int]:
        """Pick the claims that may be true: of those who belong there, and of newcomers only where nobody
        else is listed."""
        worked = {p: term for p, term in claims.items() if self._counts(p) and self.all_below(child, [p])}
        if worked or not claims or any(map(self._counts, self._listed(child))):
            return worked
        return {p: term for p, term in claims.items() if self.all_below(child, [p])}

    def _counts(self, peer: str) -> bool:
        return self._standing.may_count(peer) or self._shared.has_worked(peer)

    def _peers(self, now: float, among: list[str]) -> list[str]:
        holders = set(self.holders(now).values())
        return [peer for peer in among if peer in holders]

    def _listed(self, child: str) -> Iterable[str]:
        """List who is listed in its leaf groups."""
        shared = self._shared
        leaves = shared.roster.leaves(shared.config.run, self._fragment, *self._plan)
        return (peer for leaf in self._children[child] for peer in leaves[leaf])

    def unknown(self, now: float) -> list[str]:
        known = self.holders(now)
        return [child for child in self._children if child not in known and any(self._listed(child))]

    def _believed(self, now: float) -> list[str]:
        """List the unknown ones in which somebody is that has worked: the others may be names only."""
        if now >= self._since_s + BELIEF * self._shared.timing.suspect_s:
            return []
        worked = self._standing.may_count
        return [child for child in self.unknown(now) if any(map(worked, self._listed(child)))]

    def _entitled(self, now: float) -> list[str]:
        others = self._peers(now, self._shared.view.voters(now))
        peers = sorted([*others, self._shared.me]) if self._shared.votes else others
        return self._standing.deciding("voters", peers)

    def size(self, now: float) -> int:
        return len(self.voters(now)) + len(self._believed(now))

    def count(self, peers: Iterable[str], now: float) -> int:
        """Count these voters. One that is unknown to us may be the syncer of a group whose syncer is unknown
        to us."""
        given, voters = set(peers), set(self.voters(now))
        unknown = given.difference(voters, self.holders(now).values())
        strangers = self._standing.listed(unknown)
        return len(given & voters) + min(len(strangers), len(self._believed(now)))

    def admits(self, peer: str, now: float) -> bool:
        return peer in self.holders(now).values()

    def ready(self, now: float) -> bool:
        voters, unknown = len(self.voters(now)), len(self._believed(now))
        met = now >= self._since_s + MEETING_S and 2 * voters > voters + unknown
        return unknown == 0 or met

    def others(self, now: float) -> list[str]:
        return self._peers(now, self._shared.view.members(now))

    def live(self, now: float) -> list[str]:
        return self._peers(now, self._shared.view.live(now))

    def expected(self, now: float) -> list[str]:
        live = {*self.live(now), self._shared.me}
        known = [child for child, peer in self.holders(now).items() if peer in live]
        return sorted([*known, *self._believed(now)])

    def reachable(self, now: float) -> int:
        return len(self.live(now)) + 1

    def newcomer(self, child: str) -> bool:
        return not self._standing.may_count(self._holders.get(child, self._shared.me))

    def all_below(self, child: str, learners: Iterable[str]) -> bool:
        run, span = self._shared.config.run, self._children.get(child, range(0))
        return all(leaf_index(run, self._fragment, *self._plan, learner) in span for learner in learners)

    def peer_of(self, child: str, now: float) -> str:
        return self.holders(now).get(child, "")

    def child_of(self, peer: str, now: float) -> str:
        return next((child for child, holder in self.holders(now).items() if holder == peer), "")
