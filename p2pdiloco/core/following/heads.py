"""Heads that members name of one fragment: whom to believe, and which of them to follow.

A head is a claim. It counts if who names it has a mark in our chain (`core.members.standing`), or holds an
office by a certificate that we hold. What others name is unproven, whatever it weighs: it is asked for only
where nothing else is to be followed, and taken only if somebody with a mark has made it. So a stranger moves
no parameter.

A side that was cut off may have gone on with newcomers only, of whom the other side's chain has no marks. If
it is the heavier one, neither side would follow. So who finds its versions unproven says so (`Unbacked`), and
there those yield whose marks are all younger than that of the one who says it, or whom more than a third
would not follow (`core.following.support`).

Rules: docs/protocol/trust.md, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2pdiloco.core.api.types import Head
from p2pdiloco.core.api.versions import VersionHeader
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.following.beginning import Beginning
from p2pdiloco.core.following.support import Support

YIELD_S = 60.0
"""Time for which a lighter chain may be taken, after we were told to yield to it."""
LONG_AGO_S = -1e18


class NamedHeads:
    """Heads of other members that are not in our chain."""

    def __init__(self, context: FragmentContext) -> None:
        self._context = context
        self._shared = context.shared
        self._chain = context.chain
        self.beginning = Beginning(self._shared, context.index, context.chain)
        """Beginning with nothing, and what is followed until that is over."""
        self.support = Support(context)
        self._named: dict[str, Head] = {}
        self._unsure: set[str] = set()
        """Members whose heads are of a saved state that nobody confirmed yet."""
        self.wanted: dict[str, Head] = {}
        """Heads that are to be followed, by who names them, as of the last look."""
        self.unproven: dict[str, Head] = {}
        """Heavier heads that do not count, where nothing else is to be followed."""
        self._proved: dict[str, bytes] = {}
        """Peers whose head is of a fork that somebody with a mark has made; for one head of ours."""
        self._yields: dict[str, float] = {}
        """Members to whose lighter chain we yield, and until when."""
        self._freely = False
        """True: we take any state of theirs; else only one that has support."""
        self._starts = False
        """True: we follow as somebody who begins with nothing."""
        self.verified = False
        """True: the head of a confirmed member that counts is, or was, our head, one of its ancestors, or
        lighter."""

    # --- questions -----------------------------------------------------------------------------------

    def holders(self, digest: bytes) -> list[str]:
        """List the members whose head is that version, which is not ours."""
        return sorted(peer for peer, head in self._named.items() if head.digest == digest)

    def counts(self, peer: str, now: float) -> bool:
        """Tell whether that peer is believed."""
        if peer in self._shared.excluded:
            return False
        if peer in self._unsure:
            return self._shared.has_worked(peer)
        if self._context.standing.believes(peer, now):
            return True
        certificates = (seat.office.certificate for seat in self._context.seats)
        return any(c is not None and c.syncer == peer for c in certificates)

    def look(self, now: float) -> dict[str, Head]:
        """Choose the heads to follow, as of now."""
        self._starts = self.beginning.look(now)
        if self._starts:
            wants = self.beginning.wants
            self.wanted = {peer: head for peer, head in self._named.items() if wants(head, now)}
            self.unproven = {}
            return self.wanted
        ours, false = self._chain.head.weight, self._context.false_states
        named = self._named.items()
        heavier = {peer: head for peer, head in named if head.weight > ours and head.digest not in false}
        self.wanted = {
            peer: head
            for peer, head in heavier.items()
            if self.counts(peer, now) or self._proved.get(peer) == self._chain.head.digest
        }
        self.wanted |= self._yielded(now)
        self.unproven = {} if self.wanted else heavier
        return self.wanted

    def able(self, number: int) -> list[str]:
        """List who can give a version of that number."""
        found = self.wanted or self.unproven
        return [peer for peer, head in found.items() if head.number >= number]

    def proven(self, header: VersionHeader, giver: str, now: float) -> bool:
        """Tell whether a version is to be taken: who gave it counts, or who made it has worked. With nothing
        we take, for the time being, what somebody gives who stands on what is to be followed."""
        self._starts = self.beginning.look(now)  # the owner may have vouched while it was on its way
        if self._starts:
            return self.beginning.supports(giver) or self.beginning.follows(header.head())
        return self.counts(giver, now) or self.counts(header.syncer, now)

    def is_of_a_fork(self, peer: str) -> None:
        """Note that somebody with a mark has made the other chain of which that peer has a version."""
        self._proved[peer] = self._chain.head.digest

    def yields_to(self, peer: str, now: float) -> bool:
        """Tell whether we take the chain of that member though it is lighter."""
        return now < self._yields.get(peer, LONG_AGO_S)

    def takes_any(self, peer: str, now: float) -> bool:
        """Tell whether we take the state of that member, whatever it is: of those to whom we could yield none
        has a version with support."""
        return self._freely and self.yields_to(peer, now)

    def may_replace(self, version: Head, giver: str, now: float) -> bool:
        """Tell whether that version may take the place of ours, as far as weights go."""
        if self.yields_to(giver, now) or (self._starts and self.beginning.supports(giver)):
            return version.digest != self._chain.head.digest
        return version.weight > self._chain.head.weight

    def may_copy(self, version: Head, giver: str, now: float) -> bool:
        """Tell whether the state of that version may be copied: more than a third stands on it, or we yield
        to anything. Who begins with nothing has rules of its own."""
        if self._starts or self.takes_any(giver, now):
            return True
        return self.support.has(version, now)

    def _yielded(self, now: float) -> dict[str, Head]:
        """List the heads to which we yield, by who names them."""
        view, index, ours = self._shared.view, self._context.index, self._chain.head.digest
        named = {peer: view.head(peer, index) for peer in self._yields if self.yields_to(peer, now)}
        return {peer: head for peer, head in named.items() if head is not None and head.digest != ours}

    # --- what happens --------------------------------------------------------------------------------

    def heard(self, peer: str, head: Head, confirmed: bool, saved: bool, now: float) -> bool:
        """Take in which head a member holds. Tell whether that is news.

        `saved`: nobody is confirmed, and it returns with this from its disk, as we do with ours.
        """
        self._unsure.discard(peer)
        if not confirmed and not saved:
            return self._named.pop(peer, None) is not None
        if confirmed:
            self._shared.guidance.hears(now)
            self.beginning.named(peer, head)
            self.support.named(peer, head, now)
        if self.beginning.active and self._look_again(now):
            news = self._named.get(peer) != head
            self._named[peer] = head
            return news
        known = self._chain.knows(head.number, head.digest)
        lighter = known or head.weight < self._chain.head.weight
        if confirmed and lighter and not self.verified and self.counts(peer, now):
            # Also who comes back with a heavier chain than any here is a full member: the others follow.
            self.verified = True
        if known:
            return self._named.pop(peer, None) is not None
        if not confirmed:
            self._unsure.add(peer)
        news = self._named.get(peer) != head
        self._named[peer] = head
        return news

    def _look_again(self, now: float) -> bool:
        """Tell whether nothing of ours is found to be the run's yet."""
        self.look(now)
        return self.beginning.active

    def gone(self, peer: str) -> None:
        """Forget a peer that left the view: it can give nothing."""
        self.beginning.gone(peer)
        self.support.gone(peer)
        self._named.pop(peer, None)
        self._unsure.discard(peer)

    def cannot_give(self, peer: str) -> None:
        """Forget what that peer named, until it names it again."""
        self._named.pop(peer, None)

    def moved(self, now: float) -> None:
        """Take in that the chain has another head: what is in it now is news no more."""
        if self.beginning.active:
            self.beginning.moved(now)
            if self._look_again(now):
                return
        for peer in [p for p, h in self._named.items() if self._chain.knows(h.number, h.digest)]:
            self.verified = self.verified or (peer not in self._unsure and self.counts(peer, now))
            del self._named[peer]
        self._yields = {}
        self._proved.clear()
        self.look(now)

    # --- sides that know each other only one way -----------------------------------------------------------

    def told_unbacked(self, sender: str, standing_here: Sequence[str], now: float) -> bool:
        """Yield, if so many would not follow our chain that it has no support, or if the sender's is older
        than all of us: what was made since then can be sent again. Tell whether we do.

        `standing_here`: live members whose head is in our chain, and we.
        """
        against = self.support.against(sender, standing_here, now)
        if not against and not self._is_oldest(sender, standing_here):
            return False
        backed = [peer for peer in against if self._is_backed(peer, now)]
        self._freely = not backed
        self._yields = dict.fromkeys(backed or [sender], now + YIELD_S)
        self.look(now)
        return True

    def _is_backed(self, peer: str, now: float) -> bool:
        """Tell whether the newest head of that member has support."""
        head = self._shared.view.head(peer, self._context.index)
        return head is not None and self.support.has(head, now)

    def _is_oldest(self, sender: str, standing_here: Sequence[str]) -> bool:
        """Tell whether that member has worked for longer than everybody who stands here, and took part here
        lately; in a run that is no longer young only if nobody votes here."""
        marks = self._chain.marks
        oldest = marks.first(sender)
        if oldest is None or not self._context.standing.attends(sender):
            return False
        others = [peer for peer in standing_here if peer != sender]
        if self.support.needed and not marks.voters.isdisjoint(others):
            return False  # those who vote can be known to others: then more than half count
        firsts = (marks.first(peer) for peer in others)
        return not any(first is not None and first <= oldest for first in firsts)
