"""Terms of one group's office: which are used up, as far as this member knows, and which is next.

Rules: docs/protocol/election.md, section 10.
"""

from __future__ import annotations

from p2pdiloco.core.api.types import WHOLE_RUN
from p2pdiloco.core.chain.scale import MOST_TERMS
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.election.voting import Voter

HEARSAY = MOST_TERMS // 2
"""Limit of how far above the head's term peers' words move our idea of the newest one: half of what a version
may leap, so that what is left is for elections."""


class Terms:
    """Terms of one group that are in use somewhere."""

    def __init__(self, context: FragmentContext, group: str, voter: Voter) -> None:
        self._chain = context.chain
        self._group = group
        self._voter = voter
        self.newest = voter.term
        """Newest term that we know of."""

    def used(self, term: int) -> None:
        """Note that this term is in use: we voted in it, or hold its proof."""
        self.newest = max(self.newest, term)

    def said(self, term: int) -> None:
        """Note that a peer says that this term is in use."""
        self.used(min(term, self._chain.head.term + HEARSAY))

    def next(self) -> int:
        """Find the first term in which we could stand."""
        floor = 0 if self._group == WHOLE_RUN else self._chain.head.term
        return max(self.newest, self._voter.term, floor) + 1
