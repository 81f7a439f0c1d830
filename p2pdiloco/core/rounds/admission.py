"""Admission of offers: answers to their headers, then to their payloads.

Rules: docs/protocol/rounds.md, section 1.
"""

from __future__ import annotations

from p2pdiloco.core.api.effects import AcceptTransfer, AnswerTransfer, Release
from p2pdiloco.core.api.partials import SignedOffer
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import Ticket
from p2pdiloco.core.context import FragmentContext, Tenure
from p2pdiloco.core.rounds.handover import Unusable
from p2pdiloco.core.rounds.inbox import Held, Inbox


class Admission:
    """Door of one group's inbox. `open_`: whether the round takes offers in that begin it."""

    def __init__(self, context: FragmentContext, office: Tenure, inbox: Inbox) -> None:
        self._shared = context.shared
        self._fragment = context.index
        self._office = office
        self._inbox = inbox

    def offered(
        self, transfer: int, sender: str, signed: SignedOffer, open_: bool, now: float
    ) -> Held | None:
        """Judge what a peer wants to stream to us. None: it is refused, and told so."""
        refusal = self._judge(signed, sender, open_, now)
        if refusal is not None:
            self._shared.out.put(AnswerTransfer(transfer, self._fragment, refusal))
            self._count(refusal, sender)
            return None
        held = self._inbox.add(signed, transfer, open_, now)
        self._shared.out.put(AcceptTransfer(transfer, self._fragment, signed.header.payload_bytes))
        return held

    def own(self, signed: SignedOffer, ticket: Ticket, open_: bool, now: float) -> Verdict | None:
        """Take what this node made itself: no stream is needed. Returns why not, or None."""
        refusal = self._judge(signed, self._shared.me, open_, now)
        if refusal is not None:
            return refusal
        held = self._inbox.add(signed, 0, open_, now)
        self._inbox.here(held, ticket, True, now)
        return None

    def received(self, transfer: int, ticket: Ticket, now: float) -> Held | None:
        """Take the sound payload of an accepted transfer. None: it is not wanted any more, and told so."""
        held, out = self._inbox.arriving(transfer), self._shared.out
        if held is not None and self._office.holding and self._inbox.fits(held):
            self._inbox.here(held, ticket, False, now)
            return held
        refusal = Verdict.NOT_SYNCER
        if held is not None and self._office.holding:
            # The chain changed while the payload was under way: it may contain this work already.
            refusal = Verdict.CHAIN_MOVED
            self._inbox.drop(held)
        out.put(AnswerTransfer(transfer, self._fragment, refusal))
        out.put(Release(ticket))
        return None

    def broken(self, transfer: int, verdict: Verdict) -> bool:
        """Forget an accepted transfer that came to nothing: cut, or its payload was not sound. False: it was
        not waited for."""
        held = self._inbox.arriving(transfer)
        if held is None:
            return False
        self._inbox.broken(held)
        self._count(verdict, held.author)
        return True

    def unusable(self, merged: tuple[Held, ...], found: Unusable) -> bool:
        """Refuse those of `merged` in which the merge found a fault; the same are not admitted again, unless
        they were damaged here. False: there are none."""
        faults = dict(found)
        faulty = [(held, faults[held.ticket]) for held in merged if held.ticket in faults]
        for held, verdict in faulty:
            if verdict is Verdict.DAMAGED and not held.own:
                self._inbox.broken(held)  # its learner has it whole
            else:
                self._inbox.unusable(held, verdict)
            self._count(verdict, held.author)
        return bool(faulty)

    def _judge(self, signed: SignedOffer, sender: str, open_: bool, now: float) -> Verdict | None:
        refusal = self._inbox.judge(signed, sender, self._office.holding, open_, now)
        return refusal or self._inbox.fault(signed.header.payload_digest)

    def _count(self, verdict: Verdict, peer: str) -> None:
        if verdict.counted:
            self._shared.out.record("refusal", self._fragment, str(verdict), peer=peer)
