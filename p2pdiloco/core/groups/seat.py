"""Seat of this node in one group of a fragment: its members, its office, its rounds."""

from __future__ import annotations

from p2pdiloco.core.api.grouping import group_name, level_sizes
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.election.electorate import Electorate
from p2pdiloco.core.election.office import Office
from p2pdiloco.core.groups.delegate import Delegate
from p2pdiloco.core.groups.electorates import LeafElectorate, UpperElectorate
from p2pdiloco.core.groups.group_inbox import GroupInbox
from p2pdiloco.core.groups.seeking import Seeking
from p2pdiloco.core.proofs.seen_votes import SeenVotes
from p2pdiloco.core.rounds.hierarchy import Hierarchy
from p2pdiloco.core.rounds.inbox import Inbox, LearnerInbox
from p2pdiloco.core.rounds.publishing import Publisher
from p2pdiloco.core.rounds.round import Round
from p2pdiloco.core.rounds.round_table import RoundState
from p2pdiloco.core.timing import earliest


class Seat:
    """Seat in one group: in our leaf group always, in the group above while we hold the office below, and so
    on.

    Args:
        hierarchy: our other seats of that fragment.
        plan: (epoch, number of leaf groups), as the head's header states them.
        place: (level, index) of the group.
        below: name of the group of which we are the syncer; empty for a leaf group.
    """

    def __init__(
        self,
        context: FragmentContext,
        publisher: Publisher,
        hierarchy: Hierarchy,
        plan: tuple[int, int],
        place: tuple[int, int],
        below: str,
        now: float,
    ) -> None:
        shared, standing = context.shared, context.standing
        self.level, self.index = place
        sizes = level_sizes(plan[1], shared.config.group_size)
        self.name = group_name(*plan, *place)
        self.top = self.level == len(sizes) - 1
        self.seeking: Seeking | None = None
        self.electorate: Electorate
        inbox: Inbox
        if below:
            upper = UpperElectorate(shared, context.index, standing, plan, place, below, now)
            self.electorate, inbox = upper, GroupInbox(context, upper)
            self.seeking = Seeking(context, plan, upper)
        elif self.top:
            self.electorate, inbox = Electorate(shared, context.index, standing), LearnerInbox(context)
        else:
            self.electorate = LeafElectorate(shared, context.index, standing, plan, self.index, now)
            inbox = LearnerInbox(context)
        self.office = Office(context, self.name, self.electorate, lambda: self.round.busy, now)
        self.seen = SeenVotes(context, self.name)
        """Votes of others, in which a second one of the same term is found."""
        self.delegate = None if self.top else Delegate(context, self.name, self.level, hierarchy)
        merger = self.delegate or publisher
        self.round = Round(
            context, self.name, self.level, self.office, self.electorate, inbox, merger, hierarchy
        )

    def deadline(self) -> float | None:
        """Find when to look again; None: nothing waits for a time."""
        times = [self.office.deadline(), self.round.deadline()]
        if self.delegate is not None:
            times.append(self.delegate.deadline())
        if self.seeking is not None:
            times.append(self.seeking.due_s)
        return earliest(times)

    def contacts(self, now: float) -> list[str]:
        """List the peers that get our heartbeats because we look for others there; they need not send us
        any."""
        return self.seeking.neighbours(now) if self.seeking is not None else []

    def give_up(self, reason: str, now: float) -> None:
        """Leave the office and drop the round: we do not belong here any more."""
        self.office.retire(reason)
        self.round.abandon(reason, now)

    @property
    def at_work(self) -> bool:
        """True: a round of ours is not at its end yet."""
        return self.round.state not in (RoundState.IDLE, RoundState.COLLECTING)
