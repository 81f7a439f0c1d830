"""Support of versions of one fragment: how many of those who decide stand on them.

An update shows how a state was made, and a state does not. So a full member copies one only if more than a
third of those who decide stand on it (`core.following.stances`): a liar alone, or a few, show theirs to
nobody. And whoever has more than a third against it, and fewer with it, yields, though its chain be the
heavier one: else a few who were cut off, and the others, would stay apart. More than a half would be too many
to ask for: those who lie say nothing.

Rules: docs/protocol/trust.md, section 4.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2pdiloco.core.api.types import Head
from p2pdiloco.core.chain.watermarks import FOUNDING_VERSIONS
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.following.stances import Stances
from p2pdiloco.core.members.derived import Derived
from p2pdiloco.util import BoundedDict

MAX_SUPPORTED = 32
FEWEST = 3
"""Members who decide, this node included, from which on support is asked for: of two each has a half."""
AGAINST_S = 30.0
"""Time for which it counts that a member would not follow us."""


class Support:
    """Support of heads that are not, or not yet, in our chain."""

    def __init__(self, context: FragmentContext) -> None:
        self._context, self._shared = context, context.shared
        self._derived = Derived()
        self._stances = Stances()
        """Stances of those who count."""
        self._supported: BoundedDict[Head, None] = BoundedDict(MAX_SUPPORTED)
        """Heads that have, or had, enough."""
        self._against: dict[str, float] = {}
        """Times at which members last said that our head counts for nobody there."""

    @property
    def needed(self) -> bool:
        """True: the run is old enough. At its beginning votes come so fast that two sides of a split soon
        differ about who decides, and each would refuse the other. Who was killed while it began with nothing
        has some fragments, and of the others nothing: by the first the run is old."""
        number = self._context.chain.head.number
        return (number or self._shared.newest_number) > FOUNDING_VERSIONS

    def named(self, peer: str, head: Head, now: float) -> None:
        """Take in the head of a confirmed member. Who does not count supports nothing."""
        if any(peer in of for of in self.counted(now)) and self._stances.named(peer, head):
            self._look(head, now)

    def gone(self, peer: str) -> None:
        """Forget a member that left the view."""
        self._stances.gone(peer)
        self._against.pop(peer, None)

    def has(self, head: Head, now: float) -> bool:
        """Tell whether enough of those who decide stand on that head, or did. Who comes back hears first who
        else is here: the one that it hears first may be a liar."""
        if not self.needed or self._look(head, now):
            return True
        return self._has_heard(now) and len(self.counted(now)[0]) < FEWEST

    def against(self, peer: str, standing_here: Sequence[str], now: float) -> list[str]:
        """Take in that our chain counts for nothing with that member. List those with whom it is so, if they
        are more than a third of those who decide, and more of them than stand on our chain."""
        counted = self.counted(now)
        if any(peer in of for of in counted):
            self._against[peer] = now
        lately = [p for p, at_s in self._against.items() if now - at_s < AGAINST_S and p not in standing_here]
        enough = any(_outnumber({*lately}, standing_here, of) for of in counted)
        return lately if enough and self.needed else []

    def counted(self, now: float) -> tuple[list[str], list[str]]:
        """List who decides, and who votes by the chain of any fragment: of two sides that went apart here,
        each may have voters of its own only."""
        voters, standing = self._shared.voters(now), self._context.standing
        deciding = standing.deciding("voters", voters)
        return deciding, self._derived.of("voting", self._voting, voters, standing.marks)

    def _voting(self, peers: list[str], _marks: object) -> list[str]:
        return [peer for peer in peers if self._shared.has_vote(peer)]

    def _look(self, head: Head, now: float) -> bool:
        if head in self._supported:
            return True
        on = self._stances.on(head)
        counted = [of for of in self.counted(now) if 3 * len(on) > len(of) >= FEWEST]
        third = any(3 * len(on & {*of}) > len(of) for of in counted)
        enough = third and self._has_heard(now)
        if enough:
            self._supported[head] = None
        return enough

    def _has_heard(self, now: float) -> bool:
        return self._shared.confirmed or self._shared.guidance.heard_enough(now)


def _outnumber(against: set[str], ours: Sequence[str], of: list[str]) -> bool:
    voices = len(against.intersection(of))
    return 3 * voices > len(of) >= FEWEST and voices > len({*of}.intersection(ours))
