"""The inbox of a syncer above the leaves: partial merges, one for each group below."""

from __future__ import annotations

from p2pdiloco.core.api.types import (
    MAX_CONTRIBUTORS,
    PartialHeader,
    SignedPartial,
    plausible_work,
)
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.election.electorate import Electorate
from p2pdiloco.core.rounds.inbox import ROOM, Held, Inbox, Offer


class GroupInbox(Inbox):
    """Of a group of groups: partial merges, one per group below."""

    def __init__(self, context: FragmentContext, electorate: Electorate) -> None:
        super().__init__(context)
        self._electorate = electorate

    def judge(self, signed: Offer, sender: str, holding: bool, open_: bool, now: float) -> tuple[str, bool]:
        if not isinstance(signed, SignedPartial):
            return "not-a-partial", True
        header = signed.header
        if header.syncer != sender:
            return "false-syncer", True
        # Cheap reasons first: a label may be megabytes long.
        if not holding:
            return "not-syncer", False
        if self._electorate.child_of(sender, now) != header.group:
            return "not-heard-of", False
        if sender != self._shared.me and not self._shared.signed_by(
            sender, "partial", header, signed.signature
        ):
            return "bad-signature", True
        # Sizes of partials are the environment's to check: the core does not know them.
        learners = {part.contributor.learner for part in header.parts}
        if len(learners) != len(header.parts):
            return "repeated-learner", True
        if any(part.contributor.stamp <= part.after for part in header.parts):
            return "false-stamp", True
        done = ((part.contributor.tokens, part.contributor.inner_steps) for part in header.parts)
        if not all(plausible_work(*work, self._shared.config.tokens_per_step) for work in done):
            return "implausible-tokens", True
        if not self._electorate.all_below(header.group, learners):
            return "other-group", True
        reason = self._why_not_base(header.number, header.digest)
        if reason:
            return reason, False
        for part in header.parts:
            mark = self._chain.watermark(part.contributor.learner)
            if mark != part.after:
                return ("overlap" if mark > part.after else "behind"), False
        return self._judge_place(header, learners, open_), False

    def _judge_place(self, header: PartialHeader, learners: set[str], open_: bool) -> str:
        for child, other in self._held.items():
            if child != header.group and any(p.contributor.learner in learners for p in other.parts):
                return "overlap"
        others = sum(len(other.parts) for child, other in self._held.items() if child != header.group)
        if others + len(header.parts) > MAX_CONTRIBUTORS:
            return "full"  # a header that names more could be read by nobody
        held = self._held.get(header.group)
        if held is None:
            return "" if len(self._held) < ROOM * self._shared.config.group_size else "full"
        if held.header == header:
            return "already-held" if held.ticket is not None else "in-transfer"
        return "" if open_ else "closing"  # the group merged again: more of its members are in

    def add(self, signed: Offer, transfer: int, in_time: bool, now: float) -> Held:
        header = signed.header
        assert isinstance(header, PartialHeader)
        replaced = self._held.get(header.group)
        if replaced is not None:
            self.drop(replaced)
        starts = in_time and header.due and header.number == self._chain.head.number
        held = Held(header.group, header.syncer, header, header.parts, transfer, starts, now)
        held.begins = False  # whoever sends partials makes them when it is called
        self._held[header.group] = held
        return held
