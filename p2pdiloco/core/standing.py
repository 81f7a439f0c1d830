"""Standing of peers in one fragment: whose word decides, and who takes part, read off the chain.

What a peer says of itself makes it heard, no more. It decides (votes, may hold the office, is believed about
heads) by its mark in the chain: the first of these that anybody is here of, oneself included:

1. learners that vote (`core.chain.Marks`), at a run's beginning who soon will, if few do; while the
   chain has none at all, everybody,
2. learners with a mark,
3. who has worked on another fragment,
4. everybody: left alone as newcomers. There who lets three requests for its vote go unanswered counts in no
   majority until it answers one.

Of the first three, one at least can be dialled, or is the chain's only voter: voters that do not hear each
other elect nobody.

So identities that never worked outvote, block and mislead nobody who did.

Rules: docs/protocol/trust.md, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pdiloco.core.api.types import Reach
from p2pdiloco.core.base import Shared
from p2pdiloco.core.chain import LATELY_VERSIONS, Chain, Marks
from p2pdiloco.core.members import Derived


class Standing:
    """Standing of peers by the chain that this node holds."""

    def __init__(self, shared: Shared, chain: Chain) -> None:
        self._shared = shared
        self._chain = chain
        self._derived = Derived()
        self._believes_all = False
        self._returns = bool(chain.marks.voters)
        """True: this node came with a chain by which others vote, and can wait for them."""

    @property
    def marks(self) -> Marks:
        """Marks of the head."""
        return self._chain.marks

    def has(self, peer: str) -> bool:
        """Tell whether that peer has a mark."""
        return peer in self._chain.marks

    def voters(self) -> frozenset[str]:
        """List the peers that vote."""
        return self._chain.marks.voters

    @property
    def number(self) -> int:
        """Number of the head."""
        return self._chain.head.number

    def may_count(self, peer: str) -> bool:
        """Tell whether that peer has a mark; of a chain in which nobody votes yet nobody needs one."""
        marks = self._chain.marks
        return peer in marks or not marks.voters

    def deciding(self, name: str, peers: list[str]) -> list[str]:
        """List those of these confirmed peers, perhaps with oneself, that decide. The answer for `name` is
        kept while list and chain last."""
        found = self._derived.of(name, self._deciding, peers, self._chain.marks, self._shared.reach)
        if found is not peers:
            return found
        elsewhere = [peer for peer in peers if self._shared.has_worked(peer)]
        return elsewhere if self._meet(elsewhere) else peers

    def answering(self, peers: list[str]) -> list[str]:
        """Leave out of these that decide who never answers, if none of them has ever worked. They are still
        asked."""
        shared = self._shared
        silent = {peer for peer in peers if shared.answers.silent(peer)}
        if not silent or any(map(shared.has_worked, peers)):
            return peers
        return [peer for peer in peers if peer not in silent]

    def _deciding(self, peers: list[str], marks: Marks, _reach: Reach) -> list[str]:
        voters = [peer for peer in peers if peer in marks.deciding]
        if self._meet(voters) or (voters and {*voters} == marks.voters and len(voters) == 1):
            return voters
        marked = [peer for peer in peers if peer in marks]
        if marks.voters and self._meet(marked):
            return marked
        return peers

    def _meet(self, peers: list[str]) -> bool:
        """Tell whether these can decide anything: there are some, and they hear each other. Where none can
        be dialled, members that can be have to decide with them."""
        shared = self._shared
        own = shared.reach in (Reach.DIRECT, Reach.UNKNOWN)
        return any(own if peer == shared.me else shared.view.dialable(peer) for peer in peers)

    def believes(self, peer: str, now: float) -> bool:
        """Tell whether that confirmed peer's word about heads counts: it is trusted, or nobody here has
        worked. Who returns waits for those whom it knows (`strangers_only`)."""
        shared = self._shared
        if self._believes_all or shared.trusts(peer):
            return True
        if self._returns and not shared.confirmed:
            return False
        confirmed = shared.view.confirmed(now)
        return not shared.has_worked(shared.me) and not any(map(shared.has_worked, confirmed))

    def strangers_only(self, peers: list[str]) -> bool:
        """Tell whether others vote by our chain, and none of these peers has ever worked: all whom we knew
        may have gone, and handed the run on."""
        shared = self._shared
        others = any(peer != shared.me and peer not in shared.excluded for peer in self._chain.marks.voters)
        return others and not any(map(shared.has_worked, peers))

    def believe_all(self, believes: bool) -> None:
        """Believe everybody about heads, or no more: after `strangers_only` has been so for long."""
        self._believes_all = believes

    def attending(self, name: str, learners: list[str]) -> list[str]:
        """List those of these live learners that were merged lately; everybody, where none was."""
        return self._derived.of(name, self._attending, learners, self._chain.marks)

    def _attending(self, learners: list[str], _marks: object) -> list[str]:
        lately = [peer for peer in learners if self.attends(peer)]
        return lately or learners

    def none_attends(self, learners: list[str]) -> bool:
        """Tell whether others work by our chain, and of these learners nothing was merged lately: that they
        train, and bring anything, is their own word."""
        return bool(self._chain.marks.voters) and not any(map(self.attends, learners))

    def attends(self, learner: str) -> bool:
        """Tell whether something of that learner was merged lately. Else it is a newcomer (again): no quorum
        counts it, and rounds that called it in vain wait for it no more."""
        marks = self._chain.marks
        return learner in marks and marks.number(learner) >= self._chain.head.number - LATELY_VERSIONS

    def listed(self, peers: Iterable[str], _marks: object = None) -> list[str]:
        """List those of these listed peers that may count once they are heard."""
        return [peer for peer in peers if self.may_count(peer)]
