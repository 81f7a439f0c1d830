"""Fork choice of one fragment: which heads members name, whom to believe, and which head to follow.

`NamedHeads` chooses. `Beginning` does so for a node with nothing. `Support` counts who stands on a version,
by their `Stances`.

Rules: docs/protocol/trust.md, sections 4 and 5.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Annotated

from msgspec import Meta, Struct

from p2pdiloco.core.api.reasons import Basis
from p2pdiloco.core.api.types import Count, Head
from p2pdiloco.core.api.versions import VersionHeader
from p2pdiloco.core.base import Shared
from p2pdiloco.core.chain import Chain
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.members import Derived
from p2pdiloco.core.roster import Roster
from p2pdiloco.util import BoundedDict

YIELD_S = 60.0
"""Time for which a lighter chain may be taken, after we were told to yield to it."""
LONG_AGO_S = -1e18


class NamedHeads:
    """Heads that other members name and that are not in our chain.

    A head is a claim. It counts if the member that names it has a seat (`Roster.known`). What others name is
    unproven, whatever it weighs: it is asked for only where nothing else is to be followed, and taken only if
    a seat has made it. So a stranger moves no parameter.

    The heavier one of two sides may be one of few seats. Then neither side would follow. So a member that
    finds too few on a side says so (`Unbacked`), and there those yield whom more than a third of the seats
    would not follow (`Support`).
    """

    def __init__(self, context: FragmentContext) -> None:
        self._context = context
        self._shared = context.shared
        self._chain = context.chain
        self.beginning = Beginning(self._shared, context.index, context.chain, context.roster)
        """Beginning with nothing, and what is followed until that is over."""
        self.support = Support(context)
        self._named: dict[str, Head] = {}
        self._unsure: set[str] = set()
        """Members whose heads are of a saved state that nobody confirmed yet."""
        self.wanted: dict[str, Head] = {}
        """Heads that are to be followed, by who names them, as of the last look."""
        self.unproven: dict[str, Head] = {}
        """Heavier heads that do not count, where nothing else is to be followed."""
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
        roster = self._context.roster
        return peer in (roster.given if self._shared.confirmed else roster.known)

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
        self.wanted = {peer: head for peer, head in heavier.items() if self.counts(peer, now)}
        self.wanted |= self._yielded(now)
        self.unproven = {} if self.wanted else heavier
        return self.wanted

    def able(self, number: int) -> list[str]:
        """List who can give a version of that number."""
        found = self.wanted or self.unproven
        return [peer for peer, head in found.items() if head.number >= number]

    def proven(self, header: VersionHeader, giver: str, now: float) -> bool:
        """Tell whether a version is to be taken: who gave it counts, or who made it. With nothing
        we take, for the time being, what somebody gives who stands on what is to be followed."""
        self._starts = self.beginning.look(now)  # the owner may have vouched while it was on its way
        if self._starts:
            return self.beginning.supports(giver) or self.beginning.follows(header.head())
        return self.counts(giver, now) or self.counts(header.syncer, now)

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
        self.look(now)

    # --- sides that know each other only one way -----------------------------------------------------------

    def told_unbacked(self, sender: str, standing_here: Sequence[str], now: float) -> bool:
        """Yield, if so many would not follow our chain that it has no support: what was made since then can
        be sent again. Tell whether we do.

        `standing_here`: live members whose head is in our chain, and we.
        """
        against = self.support.against(sender, standing_here, now)
        if not against:
            return False
        backed = [peer for peer in against if self._is_backed(peer, now)]
        self._freely = not backed
        self._yields = dict.fromkeys(backed or against, now + YIELD_S)
        self.look(now)
        return True

    def _is_backed(self, peer: str, now: float) -> bool:
        head = self._shared.view.head(peer, self._context.index)
        return head is not None and self.support.has(head, now)


MAX_BACKED = 256


class Grounds(Struct, frozen=True, forbid_unknown_fields=True):
    """Grounds on which a newcomer took what it has."""

    basis: Basis
    members: Count
    """Members that stood on it."""
    of: Count
    """Members whose word counted."""
    peer: Annotated[str, Meta(max_length=80)] = ""
    """Peer of the join line that stood on it."""

    def words(self) -> str:
        """Say it for people."""
        if self.basis is Basis.VOUCHED:
            return f"started from {self.basis}"
        if self.basis is Basis.JOINED:
            return f"started from what {self.peer} of the join line stands on"
        return f"unvouched: started from what {self.members} of {self.of} members stand on"


class Beginning:
    """Beginning of a node with nothing in one fragment: which versions it takes, by whose word.

    A member that is heard may be new itself, or lie, and a forged chain is easily the heaviest. So a newcomer
    follows heads that most of those stand on (`Stances`) whose word counts (`Guidance`). What comes is taken
    for the time being: the beginning is over when our head is one of those. Until then they are followed even
    where they are lighter.

    A node that started without a vouch, and hears of one in the same life, looks again: if what most of the
    vouched members stand on is no version of ours, it takes that.

    Rules: docs/protocol/trust.md, section 5.
    """

    def __init__(self, shared: Shared, index: int, chain: Chain, roster: Roster) -> None:
        self._shared = shared
        self._roster = roster
        self._guidance = shared.guidance
        self._index = index
        self._chain = chain
        self._stances = Stances()
        self._backed: BoundedDict[Head, None] = BoundedDict(MAX_BACKED)
        """Heads that are or were what is to be followed, on the present basis."""
        self._derived = Derived()
        self._news: object = None
        """Another object whenever a member has named another head."""
        self._basis: Basis | None = None
        self.grounds: Grounds | None = None
        """Grounds on which our head was taken; None: it was not yet, or this node came with a state, or
        started the run."""
        self._found: Grounds | None = None
        """Grounds of what is to be followed."""
        self._settled = False
        self._moved_s = math.inf

    # --- questions -----------------------------------------------------------------------------------

    @property
    def active(self) -> bool:
        """True: nothing of ours has been found to be the run's."""
        return self._guidance.fresh and not self._settled and not self._shared.confirmed

    @property
    def reconsiders(self) -> bool:
        """True: we took something without the owner's word, which there is now."""
        grounds = self.grounds
        vouched = self._index in self._guidance.vouches
        return vouched and not self.active and grounds is not None and grounds.basis is not Basis.VOUCHED

    @property
    def waits(self) -> bool:
        """True: nobody is here on whose word the owner's vouch can be followed."""
        return self.active and self._basis is Basis.VOUCHED and not self._backed

    def follows(self, head: Head) -> bool:
        """Tell whether that head is to be followed, as of the last look."""
        return head in self._backed

    def wants(self, head: Head, now: float) -> bool:
        """Tell whether that head, which is to be followed, is to be fetched. What our chain contains is not,
        nor at first what is lighter: a giver may have moved on. If nobody comes to stand on ours, it is."""
        if head not in self._backed or self._chain.knows(head.number, head.digest):
            return False
        held_s = now - self._moved_s if self.active else math.inf
        return head.weight > self._chain.head.weight or held_s >= self._shared.timing.genesis_wait_s

    def supports(self, peer: str) -> bool:
        """Tell whether that peer stands on something that is to be followed."""
        return any(head in self._backed for head in self._stances.of(peer))

    # --- what happens --------------------------------------------------------------------------------

    def named(self, peer: str, head: Head) -> None:
        """Take in the head of a confirmed member."""
        if not self.active and not self.reconsiders:
            return
        if self._stances.named(peer, head):
            self._news = object()

    def gone(self, peer: str) -> None:
        """Forget a peer that left the view."""
        self._stances.gone(peer)
        self._news = object()

    def moved(self, now: float) -> None:
        """Take in that we hold something that another had."""
        self._moved_s = now
        self._guidance.progressed(now)

    def look(self, now: float) -> bool:
        """Look whom to follow. False: as everybody follows."""
        if not self.active and not self.reconsiders:
            self._stances.clear()
            return False
        confirmed = self._shared.view.confirmed(now)
        basis = self._guidance.basis(self._index, confirmed, now)
        if basis is not self._basis:
            self._basis = basis
            self._backed.clear()
        enough = basis is Basis.JOINED or self._guidance.heard_enough(now)
        late = self._guidance.waited_long(now)
        found = self._derived.of("count", self._count, basis, confirmed, enough, late, self._news)
        if found is not None:
            self._found, heads = found
            for head in heads:
                self._backed[head] = None
        if self._chain.head in self._backed or (self._settled and self._knows_any()):
            self._settle()
            return False
        return self.active or found is not None

    def _settle(self) -> None:
        found = self._found
        if self._settled and found is not None:
            self._shared.out.record("join", self._index, found.words(), basis=found.basis.value)
        self.grounds, self._settled = found, True

    def _knows_any(self) -> bool:
        return any(self._chain.knows(head.number, head.digest) for head in self._backed)

    def _count(
        self, basis: Basis, confirmed: list[str], enough: bool, late: bool, _news: object
    ) -> tuple[Grounds, list[Head]] | None:
        """Find the heads on which most stand; None: that is not known yet. `enough`: everybody has had the
        time to say it; `late`: more agreement than there is will not come."""
        voices = {
            peer: heads
            for peer in self._voices(basis, confirmed)
            if (heads := self._stances.of(peer)) and self._can_be(basis, heads[-1])
        }
        counts = Counter(head for heads in voices.values() for head in set(heads))
        if not counts:
            return None
        most, majority = max(counts.values()), len(voices) // 2 + 1
        if not enough or (most < majority and not late):
            return None
        backed = [head for head, count in counts.items() if count >= min(most, majority)]
        peer = min(voices) if basis is Basis.JOINED else ""
        return Grounds(basis, most, len(voices), peer), backed

    def _voices(self, basis: Basis, confirmed: list[str]) -> list[str]:
        if basis is Basis.VOUCHED:
            return [peer for peer in confirmed if peer in self._guidance.witnesses]
        if basis is Basis.JOINED:
            return [peer for peer in confirmed if peer in self._guidance.anchors]
        return [peer for peer in confirmed if peer in self._roster.known] or confirmed

    def _can_be(self, basis: Basis, head: Head) -> bool:
        """Tell whether that head can be after what the owner vouched for."""
        if basis is not Basis.VOUCHED:
            return True
        vouch = self._guidance.vouches[self._index]
        return head.number > vouch.number or (head.number, head.digest) == (vouch.number, vouch.digest)


MAX_SUPPORTED = 32
FEWEST = 3
"""Members who decide, this node included, from which on support is asked for: of two each has a half."""
AGAINST_S = 30.0
"""Time for which it counts that a member would not follow us."""


class Support:
    """Support of heads that are not, or not yet, in our chain: how many of those who decide stand on them.

    An update shows how a state was made, and a state does not. So a full member copies one only if more than
    a third of the seats that are here stand on it (`Stances`): a liar alone, or a few, show theirs to nobody.
    Seats are one fragment's: somebody with a seat in another one supports nothing in this. And a
    member that has more than a third against it, and fewer with it, yields, though its chain be the heavier
    one: else a few who were cut off, and the others, would stay apart. More than a half would be too many to
    ask for: those who lie say nothing.

    Rules: docs/protocol/trust.md, section 4.
    """

    def __init__(self, context: FragmentContext) -> None:
        self._context, self._shared = context, context.shared
        self._derived = Derived()
        self._stances = Stances()
        """Stances of those who count."""
        self._supported: BoundedDict[Head, None] = BoundedDict(MAX_SUPPORTED)
        """Heads that have, or had, enough."""
        self._against: dict[str, float] = {}
        """Times at which members last said that our head counts for nobody there."""

    def named(self, peer: str, head: Head, now: float) -> None:
        """Take in the head of a confirmed member. Who does not count supports nothing."""
        if peer in self.counted(now) and self._stances.named(peer, head):
            self._look(head, now)

    def gone(self, peer: str) -> None:
        """Forget a member that left the view."""
        self._stances.gone(peer)
        self._against.pop(peer, None)

    def has(self, head: Head, now: float) -> bool:
        """Tell whether enough of those who decide stand on that head, or did. Who comes back hears first who
        else is here: the one that it hears first may be a liar."""
        if self._look(head, now):
            return True
        return self._has_heard(now) and len(self.counted(now)) < FEWEST

    def against(self, peer: str, standing_here: Sequence[str], now: float) -> list[str]:
        """Take in that our chain counts for nothing with that member. List those with whom it is so, if they
        are more than a third of those who decide, and more of them than stand on our chain."""
        counted = self.counted(now)
        if peer in counted:
            self._against[peer] = now
        lately = [p for p, at_s in self._against.items() if now - at_s < AGAINST_S and p not in standing_here]
        fewest = FEWEST if self._shared.me in self._context.roster.given else 1
        return lately if _outnumber({*lately}, standing_here, counted, fewest) else []

    def counted(self, now: float) -> list[str]:
        """List the seats that are here, those too that this chain does not know yet."""
        return self._derived.of("counted", self._among, self._shared.voters(now), self._context.roster.given)

    def _among(self, peers: list[str], seats: AbstractSet[str]) -> list[str]:
        return [peer for peer in peers if peer in seats]

    def _look(self, head: Head, now: float) -> bool:
        if head in self._supported:
            return True
        on, counted = self._stances.on(head), self.counted(now)
        third = 3 * len(on & {*counted}) > len(counted) >= FEWEST
        enough = third and self._has_heard(now)
        if enough:
            self._supported[head] = None
        return enough

    def _has_heard(self, now: float) -> bool:
        return self._shared.confirmed or self._shared.guidance.heard_enough(now)


STOOD_ON = 8
"""Heads of one member that are remembered."""


class Stances:
    """Stances of the members whose heads are noted here.

    A member stands on the last heads that it named: its newest one, and ancestors of that. So members some
    versions apart count together, and a liar that names a true head gives a forged one no voice.

    Rules: docs/protocol/trust.md, sections 4 and 5.
    """

    def __init__(self) -> None:
        self._heads: dict[str, deque[Head]] = {}
        self._on: dict[Head, set[str]] = {}
        """Members that stand on each head."""

    def named(self, peer: str, head: Head) -> bool:
        """Note the head of a member. Tell whether that is news."""
        heads = self._heads.setdefault(peer, deque())
        if heads and heads[-1] == head:
            return False
        heads.append(head)
        self._on.setdefault(head, set()).add(peer)
        if len(heads) > STOOD_ON and (left := heads.popleft()) not in heads:
            self._leaves(peer, left)
        return True

    def gone(self, peer: str) -> None:
        """Forget a member."""
        for head in set(self._heads.pop(peer, ())):
            self._leaves(peer, head)

    def clear(self) -> None:
        """Forget all."""
        self._heads.clear()
        self._on.clear()

    def of(self, peer: str) -> Sequence[Head]:
        """List the heads on which that member stands, the newest last."""
        return self._heads.get(peer, ())

    def on(self, head: Head) -> AbstractSet[str]:
        """List who stands on that head."""
        return self._on.get(head, frozenset())

    def _leaves(self, peer: str, head: Head) -> None:
        on = self._on[head]
        on.discard(peer)
        if not on:
            del self._on[head]


def _outnumber(against: set[str], ours: Sequence[str], of: list[str], fewest: int) -> bool:
    voices = len(against.intersection(of))
    return 3 * voices > len(of) >= fewest and voices > len({*of}.intersection(ours))
