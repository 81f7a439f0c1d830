"""Context of one fragment: what its parts on one node share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from p2pdiloco.core.api.effects import VoteRecord
from p2pdiloco.core.api.grouping import parse_group
from p2pdiloco.core.api.reasons import Suspicion
from p2pdiloco.core.api.types import Certificate
from p2pdiloco.core.audits.false_states import FalseStates
from p2pdiloco.core.audits.repairs import Repairs
from p2pdiloco.core.chain.chain import Chain
from p2pdiloco.core.election.electorate import Electorate
from p2pdiloco.core.members.standing import Standing
from p2pdiloco.core.shared import Shared
from p2pdiloco.errors import invariant

MAX_BALLOTS = 32
"""Groups of one fragment in which our last vote is remembered, as many as the votes log keeps."""


class Tenure(Protocol):
    """Questions that the parts of a fragment ask of a group's office (`core.election.office`)."""

    certificate: Certificate | None

    @property
    def syncer(self) -> str | None:
        """Peer in office, counted on or not."""

    @property
    def holding(self) -> bool:
        """True: this node is the syncer."""

    def takes(self, now: float) -> bool:
        """Tell whether to send to the syncer."""

    def suspect(self, why: Suspicion, **details: float) -> None:
        """Stop counting on the syncer."""


class OwnSeat(Protocol):
    """Questions that the parts of a fragment ask of a seat of theirs (`core.groups.seat`)."""

    name: str
    """Name of the group."""
    electorate: Electorate

    @property
    def office(self) -> Tenure:
        """Office of the group, as this node sees it."""


class Spare:
    """Mark whether the fragment's one spare copy is in use: by a merge, an outer step or a fetched state."""

    def __init__(self) -> None:
        self.busy = False

    def take(self) -> None:
        """Use it, which nobody does just now."""
        invariant(not self.busy, "a fragment's spare copy is used twice at a time")
        self.busy = True

    def free(self) -> None:
        """Note that nobody uses it any more."""
        self.busy = False


class Ballots:
    """Newest votes of ours in every group. They bind also when a seat was given up and is taken again."""

    def __init__(self, votes: Iterable[VoteRecord]) -> None:
        self._given: dict[str, tuple[VoteRecord, bool]] = {}
        self._forgotten = (-1, 0)
        """Newest epoch and highest term of what is not remembered: below, we vote no more."""
        found = sorted(votes, key=lambda v: (_epoch(v.group), v.term))
        if len({vote.group for vote in found}) >= MAX_BALLOTS:
            self._forget(found[0].group, max(vote.term for vote in found))
        for vote in found:
            self.give(vote, durable=True)

    def give(self, vote: VoteRecord, durable: bool) -> None:
        """Remember our vote; `durable` once it is on the disk."""
        self._given.pop(vote.group, None)
        self._given[vote.group] = (vote, durable)
        while len(self._given) > MAX_BALLOTS:
            oldest = next(iter(self._given))
            self._forget(oldest, self._given.pop(oldest)[0].term)

    def _forget(self, group: str, term: int) -> None:
        epoch, highest = self._forgotten
        self._forgotten = (max(epoch, _epoch(group)), max(highest, term))

    def last(self, group: str) -> tuple[VoteRecord | None, bool]:
        """Find (our newest vote in that group, whether it is durable)."""
        return self._given.get(group, (None, False))

    def floor(self, group: str) -> int:
        """Find the highest term in which we may have voted there without remembering for whom."""
        epoch, term = self._forgotten
        return term if group not in self._given and _epoch(group) <= epoch else 0


class FragmentContext:
    """Chain, spare copy, votes and present seats of one fragment.

    Args:
        seats: our leaf group's first, then one more per level while we hold the office below it; taken and
            given up by `core.groups.seats`.
        needs_syncer: question of a node that leaves: whether something of ours is not merged yet.
    """

    def __init__(
        self,
        shared: Shared,
        index: int,
        chain: Chain,
        votes: Iterable[VoteRecord],
        seats: Sequence[OwnSeat],
        needs_syncer: Callable[[], bool],
    ) -> None:
        self.shared = shared
        self.index = index
        self.chain = chain
        self.standing = Standing(shared, chain)
        shared.keep(self.standing)
        self.spare = Spare()
        self.repairs = Repairs(shared, chain)
        self.false_states = FalseStates(shared, chain)
        self.ballots = Ballots(votes)
        self.seats = seats
        self.moved_s = -math.inf
        """Time at which the newest version was made, or became ours."""
        self.needs_syncer = needs_syncer
        self._attempts = 0

    @property
    def leaf(self) -> OwnSeat:
        """Seat in the group in which our learner takes part."""
        return self.seats[0]

    @property
    def grouped(self) -> bool:
        """True: the next version is made by more than one group."""
        return self.chain.header.groups > 1

    def moved(self, now: float) -> None:
        """Note that the newest version was made, or became ours."""
        self.moved_s = now

    def next_attempt(self) -> int:
        """Number the next partial merge, whatever the seat."""
        self._attempts += 1
        return self._attempts


def _epoch(group: str) -> int:
    parsed = parse_group(group)
    return -1 if parsed is None else parsed[0]
