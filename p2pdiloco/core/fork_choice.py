"""Fork choice of one fragment: which heads are followed, and of which versions a state is copied.

`ForkChoice` chooses, by the `Stances` of those whose word counts.

Rules: docs/protocol/belief.md, sections 3 to 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Annotated

from msgspec import Meta, Struct

from p2pdiloco.core.api.reasons import Basis
from p2pdiloco.core.api.types import Count, Head
from p2pdiloco.core.base import earliest
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.members import Derived
from p2pdiloco.util import BoundedDict

TRUSTED_PLACES = 6
"""Seats that a chain ever had up to which each is trusted: friends know each other."""
FEWEST = 3
"""Voices, this node included, of which one alone is no support."""


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


class ForkChoice:
    """Choice of one fragment between our chain and the heads that members name.

    An update shows how a state was made, and a state does not. So the updates of any heavier head are
    followed, one by one, and a state is copied only of a head that has *support*: at least half of the
    voices stand on it, or more than half where this node is a newcomer, which has nothing of the run. Voices
    are the seats that are here, and ourselves; of a newcomer those that `Guidance` names.

    1. The head that has support is the run's; of two halves the heavier one.
    2. A lighter one than ours is followed only once ours has had none for a while (`settle_s`): those
       who stand on it may be on their way here.
    3. Where no head has support for long (`resume_alone_s`), the one is followed on which most stand, then
       the heaviest.

    Those that hear each other count the same voices and choose the same side, without a word about it.
    """

    def __init__(self, context: FragmentContext) -> None:
        self._context, self._shared = context, context.shared
        self._chain, self._guidance = context.chain, context.shared.guidance
        self._derived = Derived()
        self._stances = Stances()
        self._named: dict[str, Head] = {}
        """Heads that are not in our chain, by the member that names them."""
        self._unsure: set[str] = set()
        """Members whose heads are of a saved state that nobody confirmed yet."""
        self._news = object()
        """Another object whenever a member has named another head, or left."""
        self._lighter: set[Head] = set()
        """Heads that have support, and are followed though they are lighter than ours, as that has none."""
        self.wanted: dict[str, Head] = {}
        """Heads that are to be followed, by who names them, as of the last look."""
        self._supported: BoundedDict[Head, int] = BoundedDict()
        """Heads that have, or had, support, and of how many. A copy may take longer than its version is the
        head."""
        self._chosen: set[Head] = set()
        """Heads that were chosen without support, since ours had none."""
        self._few = True
        """True: so few voices were here at the last look that each was half of them."""
        self._looked_s = -math.inf
        self._since_s = math.inf
        """Time since which our head has no support, and others name another."""
        self.apart = False
        """True: that was so for a while (`settle_s`), as of the last look."""
        self._refused: BoundedDict[bytes, None] = BoundedDict()
        """Digests of versions whose states were worse than ours."""
        self._compared: BoundedDict[bytes, None] = BoundedDict()
        """Digests of siblings of our head that were fetched: each is looked at once."""
        self._basis: Basis | None = None
        self.begins = False
        """True: nothing of ours has been found to be the run's, as of the last look."""
        self.grounds: Grounds | None = None
        """Grounds on which our head was taken; None: it was not yet, or this node came with a state, or
        started the run."""
        self.verified = False
        """True: the head of a confirmed member that counts is, or was, our head, one of its ancestors, or
        lighter; a newcomer's head has support."""

    # --- questions -----------------------------------------------------------------------------------

    def holders(self, digest: bytes) -> list[str]:
        """List the members whose head is that version, which is not ours."""
        return sorted(peer for peer, head in self._named.items() if head.digest == digest)

    def able(self, target: Head) -> list[str]:
        """List who can give that head, or what leads there."""
        above = target.number > self._chain.head.number
        return [p for p, h in self.wanted.items() if h == target or (above and h.number >= target.number)]

    def may_follow(self, giver: str, version: Head, now: float) -> bool:
        """Tell whether a version that this peer gave may be taken, if it is sound. A newcomer takes, for the
        time being, what somebody gives who stands on what has support."""
        self.look(now)  # the owner may have vouched while it was on its way
        heads = [version, *self._stances.of(giver)]
        return not self.begins or any(head in self._supported or head in self._chosen for head in heads)

    def may_copy(self, version: Head, giver: str, now: float) -> bool:
        """Tell whether the state of that version may be copied."""
        if self._is_refused(version):
            return False
        followed = self.may_follow(giver, version, now)
        return followed if self.begins else version in self._supported or version in self._chosen

    def may_replace(self, version: Head, now: float) -> bool:
        """Tell whether that version may take the place of ours, as far as weights go."""
        self.look(now)
        other = version.digest != self._chain.head.digest
        return self._is_heavier(version) or (other and (self.begins or self.apart))

    def deadline(self) -> float | None:
        """Time at which our head will have had no support for a while, or for long; None: it has."""
        timing = self._shared.timing
        due_s = (self._since_s + wait_s for wait_s in (timing.settle_s, timing.resume_alone_s))
        return earliest(at_s for at_s in due_s if self._looked_s < at_s < math.inf)

    @property
    def waits(self) -> bool:
        """True: nobody is here on whose word the owner's vouch can be followed."""
        return self.begins and self._basis is Basis.VOUCHED and not self._supported

    def counts(self, peer: str) -> bool:
        """Tell whether that peer is believed to have what it names, until it fails to give it."""
        if peer in self._shared.excluded:
            return False
        roster = self._context.roster
        return peer in (roster.given if self._shared.confirmed else roster.known)

    def voices(self, now: float) -> Sequence[str]:
        """List those whose word counts now, this node too."""
        confirmed, given = self._shared.view.confirmed(now), self._context.roster.given
        if self.begins:
            return self._guided(confirmed)
        return self._derived.of("seats", self._seats, confirmed, given, self._shared.confirmed)

    def _seats(self, confirmed: list[str], given: AbstractSet[str], with_me: bool) -> list[str]:
        here = [*confirmed, self._shared.me] if with_me else confirmed
        found = [peer for peer in here if peer in given]
        return found or [peer for peer in here if peer in self._context.roster.known]

    def _guided(self, confirmed: list[str]) -> list[str]:
        """List those of these whose word a newcomer goes by, with what they said so far."""
        if self._basis is Basis.MOST:
            found = [peer for peer in confirmed if peer in self._context.roster.known] or confirmed
        else:
            vouched = self._basis is Basis.VOUCHED
            named = self._guidance.witnesses if vouched else self._guidance.anchors
            found = [peer for peer in confirmed if peer in named]
        return [peer for peer in found if self._may_say(self._stances.of(peer))]

    def _may_say(self, stood_on: Sequence[Head]) -> bool:
        """Tell whether a member has a head, one that can be after what the owner vouched for."""
        if self._basis is not Basis.VOUCHED or not stood_on:
            return bool(stood_on)
        vouch, head = self._guidance.vouches[self._context.index], stood_on[-1]
        return head.number > vouch.number or (head.number, head.digest) == (vouch.number, vouch.digest)

    def _has(self, head: Head) -> bool:
        return self._chain.knows(head.number, head.digest)

    def must_be_tried(self, version: Head) -> bool:
        """Tell whether a state of that version is tried on our own data before it is taken: we have one, too,
        and no more than half of all seats stand on that version. Those that are here may be liars and whom
        they misled. Where there were never more than a few seats, each is trusted."""
        tries = not self.begins and self._chain.head.number and self._chain.marks.places > TRUSTED_PLACES
        return bool(tries) and not self._has_most(version)

    def _is_refused(self, version: Head) -> bool:
        return version.digest in self._refused and not self._has_most(version)

    def _has_most(self, version: Head) -> bool:
        seats = self._chain.marks.seats
        return 2 * len(seats.intersection(self._stances.on(version))) > len(seats)

    def _is_heavier(self, head: Head) -> bool:
        return head.weight > self._chain.head.weight

    def _is_near(self, head: Head) -> bool:
        """Tell whether updates may lead there; or to a sibling of our head, as both may be a proof."""
        ahead = head.number - self._chain.head.number
        if ahead == 0:
            return head.digest not in self._compared
        return 0 < ahead <= self._shared.config.log_versions

    def _is_wanted(self, peer: str, head: Head) -> bool:
        heavier = self._is_heavier(head)
        if heavier and self._is_near(head) and not self.begins and self.counts(peer):
            return True  # it may be some updates away
        return (heavier and head in self._supported) or head in self._chosen or head in self._lighter

    def _has_support(self, standing: int, voices: Sequence[str]) -> bool:
        return 2 * standing > len(voices) or (2 * standing == len(voices) > 0 and not self.begins)

    # --- what happens --------------------------------------------------------------------------------

    def look(self, now: float) -> dict[str, Head]:
        """Choose the heads to follow, as of now."""
        self._looked_s = now
        self._look_whether_new(now)
        named = {
            peer: head
            for peer, head in self._named.items()
            if head.digest not in self._context.false_states
            and (self._is_near(head) or not self._is_refused(head))
            and not self._has(head)
        }
        self._look_at_support(set(named.values()), now)
        self.wanted = {peer: head for peer, head in named.items() if self._is_wanted(peer, head)}
        return self.wanted

    def _look_whether_new(self, now: float) -> None:
        """Look whether we begin with nothing, or took what we have before the owner vouched for something."""
        if not self._guidance.fresh:
            return
        confirmed = self._shared.view.confirmed(now)
        basis = self._guidance.basis(self._context.index, confirmed, now)
        if basis is not self._basis:
            self._basis = basis
            self._supported.clear()
            self._look_whether_apart(True, now)
        if self.grounds is None:
            self.begins = not self._shared.confirmed
        else:
            other = basis is Basis.VOUCHED and self.grounds.basis is not basis
            self.begins = other and bool(self._guided(confirmed))

    def _look_at_support(self, named: set[Head], now: float) -> None:
        """Find which heads have support, ours among them."""
        voices = self.voices(now)
        counted, few = frozenset(voices), len(voices) < FEWEST
        if self._few and not few:
            self._supported.clear()  # those few may have been liars
        self._few = few
        here = self._standing_here(voices)
        ours = self._has_support(here, voices) and self._has_heard(now)
        head = self._chain.head
        if self.begins and (ours or head in self._supported or head in self._chosen):
            self._settle(here, voices)
            return
        on = {head: len(counted.intersection(self._stances.on(head))) for head in named}
        backed = [head for head in named if self._has_support(on[head], voices)]
        if self._has_heard(now):
            for head in backed:
                self._supported[head] = on[head]
        self._look_whether_apart(ours or not (named and voices), now)
        behind = any(map(self._is_heavier, backed))
        self._lighter = {*backed} if self.apart and not behind else set()
        if self.apart and not backed and now >= self._since_s + self._shared.timing.resume_alone_s:
            most = max(named, key=lambda head: (on[head], head.weight))
            heavier = self._is_heavier(most) and (not self.begins or self.grounds is None)
            least = here or (0 if self.begins else 1)  # one voice alone moves no member
            if on[most] > least or (on[most] == here > 0 and heavier):
                self._chosen.add(most)

    def _look_whether_apart(self, together: bool, now: float) -> None:
        if together:
            self._since_s, self.apart = math.inf, False
            self._chosen.clear()
        else:
            self._since_s = min(self._since_s, now)
            self.apart = now >= self._since_s + self._shared.timing.settle_s

    def _standing_here(self, voices: Sequence[str]) -> int:
        return self._derived.of("here", self._count_here, voices, self._chain.head, self._news)

    def _count_here(self, voices: Sequence[str], head: Head, _news: object) -> int:
        """Count who stands on our head: who has it, or went on from it, or has an ancestor that we know."""
        newest = {peer: self._shared.view.head(peer, self._context.index) for peer in voices}
        here = {peer for peer, named in newest.items() if named is not None and self._has(named)}
        ahead = {peer for peer, named in newest.items() if named is not None and self._is_heavier(named)}
        here |= ahead & self._stances.on(head)
        return len(here) + (self._shared.me in voices)

    def _has_heard(self, now: float) -> bool:
        """Tell whether the others had the time to speak: the first that is heard may be a liar."""
        joined = self.begins and self._basis is Basis.JOINED
        return self._shared.confirmed or joined or self._guidance.heard_enough(now)

    def _settle(self, here: int, voices: Sequence[str]) -> None:
        """Note that what we have is the run's."""
        basis = self._basis or Basis.MOST
        peer = min(voices, default="") if basis is Basis.JOINED else ""
        found = Grounds(basis, max(here, self._supported.get(self._chain.head, 0)), len(voices), peer)
        if self.grounds is not None:
            self._shared.out.record("join", self._context.index, found.words(), basis=basis.value)
        self.grounds, self.begins, self.verified = found, False, True
        self._look_whether_apart(True, 0.0)

    def heard(self, peer: str, head: Head, confirmed: bool, saved: bool, now: float) -> bool:
        """Take in which head a member holds. Tell whether that is news.

        `saved`: nobody is confirmed, and it returns with this from its disk, as we do with ours.
        """
        self._unsure.discard(peer)
        if not confirmed and not saved:
            return self._named.pop(peer, None) is not None
        if confirmed:
            self._guidance.hears(now)
        else:
            self._unsure.add(peer)
        self._look_whether_new(now)
        heard = self.begins or self.counts(peer)  # of all others it would be a place for nothing
        news = heard and self._stances.named(peer, head)
        if news:
            self._news = object()
        known = self._chain.knows(head.number, head.digest)
        lighter = known or head.weight < self._chain.head.weight
        if confirmed and lighter and not self.begins and not self.verified and self.counts(peer):
            # Also who comes back with a heavier chain than any here is a full member: the others follow.
            self.verified = True
        if known:
            news = self._named.pop(peer, None) is not None
        else:
            news = news or self._named.get(peer) != head
            self._named[peer] = head
        if self.begins:
            self.look(now)
        return news or self.begins

    def gone(self, peer: str) -> None:
        """Forget a peer that left the view: it can give nothing."""
        self._stances.gone(peer)
        self._news = object()
        self._named.pop(peer, None)
        self._unsure.discard(peer)

    def refuse(self, version: Head) -> None:
        """Take in that the state of that version was worse than ours: what we have stays."""
        self._refused[version.digest] = None
        self.verified = True

    def compared(self, digest: bytes) -> None:
        """Take in that this version was fetched, and compared with ours."""
        self._compared[digest] = None

    def cannot_give(self, peer: str) -> None:
        """Forget what that peer named, until it names it again."""
        self._named.pop(peer, None)

    def moved(self, copied: bool, now: float) -> None:
        """Take in that the chain has another head: what is in it now is news no more. `copied`: its ancestors
        are not known, so others may still stand on those."""
        if copied:
            self._since_s, self.apart = math.inf, False
        for peer in [p for p, h in self._named.items() if self._chain.knows(h.number, h.digest)]:
            sure = peer not in self._unsure and self.counts(peer)
            self.verified = self.verified or (sure and not self.begins)
            del self._named[peer]
        self.look(now)


STOOD_ON = 8
"""Heads of one member that are remembered."""


class Stances:
    """Stances of the members whose heads are noted here.

    A member stands on the last heads that it named: its newest one, and mostly ancestors of that. So members
    some versions apart count together, and a liar that names a true head gives a forged one no voice.

    Rules: docs/protocol/belief.md, sections 3 to 5.
    """

    def __init__(self) -> None:
        self._heads: dict[str, tuple[Head, ...]] = {}

    def named(self, peer: str, head: Head) -> bool:
        """Note the head of a member. Tell whether that is news."""
        heads = self.of(peer)
        if heads and heads[-1] == head:
            return False
        self._heads[peer] = (*heads, head)[-STOOD_ON:]
        return True

    def gone(self, peer: str) -> None:
        """Forget a member."""
        self._heads.pop(peer, None)

    def of(self, peer: str) -> tuple[Head, ...]:
        """List the heads on which that member stands, the newest last."""
        return self._heads.get(peer, ())

    def on(self, head: Head) -> frozenset[str]:
        """List who stands on that head."""
        return frozenset(peer for peer, heads in self._heads.items() if head in heads)
