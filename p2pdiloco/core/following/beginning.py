"""Beginning of a node with nothing in one fragment: which versions it takes, by whose word.

Whoever can be heard may be new itself, or lie, and a forged chain is easily the heaviest. So a newcomer
follows heads that most of those stand on (`core.following.stances`) whose word counts
(`core.members.guidance`). What comes is taken for the time being: the beginning is over when our head is one
of those. Until then they are followed even where they are lighter.

A node that started without a vouch, and hears of one in the same life, looks again: if what most of the
vouched members stand on is no version of ours, it takes that.

Rules: docs/protocol/trust.md, section 5.
"""

from __future__ import annotations

import math
from collections import Counter
from typing import Annotated

from msgspec import Meta, Struct

from p2pdiloco.core.api.reasons import Basis
from p2pdiloco.core.api.types import Count, Head
from p2pdiloco.core.chain.chain import Chain
from p2pdiloco.core.following.stances import Stances
from p2pdiloco.core.members.derived import Derived
from p2pdiloco.core.shared import Shared
from p2pdiloco.util import BoundedDict

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
    """Beginning in one fragment."""

    def __init__(self, shared: Shared, index: int, chain: Chain) -> None:
        self._shared = shared
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
        return confirmed

    def _can_be(self, basis: Basis, head: Head) -> bool:
        """Tell whether that head can be after what the owner vouched for."""
        if basis is not Basis.VOUCHED:
            return True
        vouch = self._guidance.vouches[self._index]
        return head.number > vouch.number or (head.number, head.digest) == (vouch.number, vouch.digest)
