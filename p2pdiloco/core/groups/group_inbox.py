"""Inbox of a syncer above the leaves: partial merges, one for each group below.

Rules: docs/protocol/groups.md, section 4.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pdiloco.core.api.partials import MAX_PARTIALS, MergedPartial, PartialHeader, SignedOffer, SignedPartial
from p2pdiloco.core.api.plausible import plausible_work
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import MAX_CONTRIBUTORS, MergeLimits
from p2pdiloco.core.chain import scale
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.contributions.label import signed_by_learners, signed_by_syncer
from p2pdiloco.core.election.electorate import Electorate
from p2pdiloco.core.rounds.inbox import Held, Inbox


class GroupInbox(Inbox):
    """Inbox of a group of groups: partial merges, one per group below."""

    def __init__(self, context: FragmentContext, electorate: Electorate) -> None:
        super().__init__(context)
        self._electorate = electorate

    def judge(
        self, signed: SignedOffer, sender: str, holding: bool, open_: bool, now: float
    ) -> Verdict | None:
        assert isinstance(signed, SignedPartial)  # contributions go to the leaf group's round
        header = signed.header
        if header.syncer != sender:
            return Verdict.FALSE_SYNCER
        # Cheap reasons first: a label may be megabytes long.
        if not holding:
            return Verdict.NOT_SYNCER
        if self._electorate.child_of(sender, now) != header.group:
            return Verdict.NOT_HEARD_OF
        if sender != self._shared.me and not self._shared.signed_by(
            sender, "partial", header, signed.signature
        ):
            return Verdict.BAD_SIGNATURE
        # Sizes of partials are the environment's to check: the core does not know them.
        learners = {part.learner for part in header.parts}
        if len(learners) != len(header.parts):
            return Verdict.REPEATED_LEARNER
        if any(part.stamp <= part.after for part in header.parts):
            return Verdict.FALSE_STAMP
        config = self._shared.config
        usual = config.tokens_per_step, config.inner_steps
        done = ((part.tokens, part.inner_steps) for part in header.parts)
        if not all(plausible_work(*work, *usual) for work in done):
            return Verdict.IMPLAUSIBLE_TOKENS
        if not self._electorate.all_below(header.group, learners):
            return Verdict.OTHER_GROUP
        if not self._can_be_made(header):
            return Verdict.FALSE_PARTIALS
        if sender != self._shared.me and not self._signed_inside(header):
            return Verdict.BAD_SIGNATURE
        reason = self._why_not_base(header.number, header.digest)
        if reason is not None:
            return reason
        for part in header.parts:
            mark = self._chain.watermark(part.learner)
            if mark != part.after:
                return Verdict.OVERLAP if mark > part.after else Verdict.BEHIND
            if not scale.follows(part.stamp, mark):
                return Verdict.FALSE_STAMP
            if not scale.rightly_stated(self._chain, part):
                return Verdict.IMPLAUSIBLE_WEIGHT
        limits = scale.limits_after(self._chain, config)
        if not all(each.near(limits) for each in (header.limits, *_limits(header.below))):
            return Verdict.IMPLAUSIBLE_WEIGHT
        return self._judge_place(header, open_)

    def fits(self, held: Held) -> bool:
        """See `Inbox.fits`. Its trust weights must follow from the chain, too: where another chain took the
        place of ours, everybody would refuse a version with those of the old one."""
        return super().fits(held) and all(scale.rightly_stated(self._chain, part) for part in held.parts)

    def _can_be_made(self, header: PartialHeader) -> bool:
        """Tell whether it can be the merge of the partials that it names, in the order in which a version
        names its contributors: signatures cover that."""
        learners = [part.learner for part in header.parts]
        plan = scale.plan_of(self._chain.header, self._shared.config)
        said = len(_limits(header.below)) == len(header.below)
        return said and learners == sorted(learners) and header.tree(plan) is not None

    def _signed_inside(self, header: PartialHeader) -> bool:
        """Tell whether those whose work is in it say so themselves. Who puts it into a version answers for
        that."""
        shared, plan = self._shared, scale.plan_of(self._chain.header, self._shared.config)
        tree = header.tree(plan) or {}
        below = [part for group, part in tree.items() if group != header.group]
        by_syncers = all(signed_by_syncer(shared, self._fragment, part, header.limits) for part in below)
        return by_syncers and signed_by_learners(shared, self._fragment, header.parts)

    def _judge_place(self, header: PartialHeader, open_: bool) -> Verdict | None:
        # At most one for each group below, and no two of these have a learner in common.
        others = [other for child, other in self._held.items() if child != header.group]
        parts = sum(len(other.parts) for other in others) + len(header.parts)
        partials = sum(len(other.partials) for other in others) + 1 + len(header.below)
        if parts > MAX_CONTRIBUTORS or partials > MAX_PARTIALS:
            return Verdict.FULL  # a header that names more could be read by nobody
        held = self._held.get(header.group)
        if held is None:
            return None
        if held.header == header:
            return Verdict.ALREADY_HELD if held.ticket is not None else Verdict.IN_TRANSFER
        return None if open_ else Verdict.CLOSING  # the group merged again: more of its members are in

    def add(self, signed: SignedOffer, transfer: int, in_time: bool, now: float) -> Held:
        header = signed.header
        assert isinstance(header, PartialHeader)
        replaced = self._held.get(header.group)
        if replaced is not None:
            self.drop(replaced)
        starts = in_time and header.due and header.number == self._chain.head.number
        begins = False  # whoever sends partials makes them when it is called
        held = Held(header.group, header.syncer, signed, header.parts, transfer, starts, begins, now)
        self._held[header.group] = held
        return held


def _limits(partials: Iterable[MergedPartial]) -> list[MergeLimits]:
    """List the limits that these say."""
    return [entry.limits for entry in partials if entry.limits is not None]
