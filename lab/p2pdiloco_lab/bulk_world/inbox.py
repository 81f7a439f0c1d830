"""A syncer's decisions on contributions that peers push, as short as they can be said."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from p2pdiloco.core.api import effects as ef
from p2pdiloco.core.api import events as ev
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import (
    NEVER,
    WHOLE_RUN,
    ContributionHeader,
    SignedContribution,
    Stamp,
)
from p2pdiloco.hashing import content_digest
from p2pdiloco_lab.bulk_world.ledger import INNER_STEPS, RUN

if TYPE_CHECKING:
    from p2pdiloco_lab.bulk_world.member import BulkMember

MOST = 6
"""Contributions of a fragment that wait to be merged."""


class PushInbox:
    """Contributions by their learner's stamp: on their way, here, or merged."""

    def __init__(self, member: BulkMember) -> None:
        self._member = member
        self._coming: dict[int, ContributionHeader] = {}
        """Transfer -> what is coming."""
        self._here: dict[int, ContributionHeader] = {}
        """Ticket -> what is here."""
        self._known: Counter[tuple[int, str, Stamp]] = Counter()
        """Arrivals of each that ever came: (fragment, learner, stamp)."""

    def label(self, fragment: int, stamp: Stamp, payload: bytearray) -> SignedContribution:
        """Label a contribution of the member's own learner."""
        head = self._member.head(fragment)
        header = ContributionHeader(
            run=RUN,
            group=WHOLE_RUN,
            fragment=fragment,
            learner=self._member.name,
            stamp=stamp,
            after=NEVER,
            base_number=head.number,
            base_digest=head.digest,
            tokens=INNER_STEPS,
            inner_steps=INNER_STEPS,
            payload_digest=content_digest(payload),
            payload_bytes=len(payload),
            codec=self._member.world.plan.codec,
            due=True,
        )
        return SignedContribution(header, b"")

    def post(self, event: ev.Offered | ev.PayloadReceived | ev.PayloadBroken) -> None:
        """An event of the receiving half of pushes."""
        pushes_in = self._member.transfers.pushes_in
        if isinstance(event, ev.Offered):
            assert isinstance(event.signed, SignedContribution)
            label = event.signed.header
            refusal = self._why_not(label)
            if refusal is not None:
                pushes_in.decided(ef.AnswerTransfer(event.transfer, label.fragment, refusal))
            else:
                self._coming[event.transfer] = label
                pushes_in.decided(ef.AcceptTransfer(event.transfer, label.fragment, label.payload_bytes))
        elif isinstance(event, ev.PayloadBroken):
            label = self._coming.pop(event.transfer)
            self._member.world.rules.broken_off(self._member, label, event.verdict)
        else:
            label = self._coming.pop(event.transfer)
            self._here[event.ticket] = label
            self._known[label.fragment, label.learner, label.stamp] += 1
            payload = self._member.tickets.payload(event.ticket)
            self._member.world.rules.contribution_delivered(self._member, label, payload)
            pushes_in.decided(ef.AnswerTransfer(event.transfer, label.fragment, Verdict.IN_ROUND))

    def _why_not(self, label: ContributionHeader) -> Verdict | None:
        key = (label.fragment, label.learner, label.stamp)
        if self._known[key]:
            return Verdict.ALREADY_HELD
        if any((x.fragment, x.learner, x.stamp) == key for x in self._coming.values()):
            return Verdict.IN_TRANSFER
        waiting = [x for x in (*self._coming.values(), *self._here.values()) if x.fragment == label.fragment]
        return Verdict.FULL if len(waiting) >= MOST else None

    def count(self, label: ContributionHeader) -> int:
        """Count how often it came here."""
        return self._known[label.fragment, label.learner, label.stamp]

    def take(self, fragment: int) -> list[int]:
        """Tickets of what is here of a fragment: it is merged now."""
        taken = [ticket for ticket, label in self._here.items() if label.fragment == fragment]
        for ticket in taken:
            del self._here[ticket]
        return taken

    @property
    def empty(self) -> bool:
        """Tell whether nothing is coming, and nothing waits to be merged."""
        return not self._coming and not self._here
