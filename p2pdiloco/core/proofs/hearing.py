"""Hearing of statements on merges: whoever hears an accusation makes the merge again for itself.

Who cannot, as it came later or the contributions are gone, believes most of those who vote by its own chain:
never against what it found itself.
A node that began with nothing believes nobody before it is confirmed: its chain may still be a forged one.

Rules: docs/protocol/audits.md, section 3.
"""

from __future__ import annotations

from p2pdiloco.core.api.messages import Stated
from p2pdiloco.core.api.reasons import MessageFault
from p2pdiloco.core.api.statements import Accusation, Statement
from p2pdiloco.core.fragment import Fragment
from p2pdiloco.core.proofs.agreement import Agreement
from p2pdiloco.core.proofs.gossip import audience
from p2pdiloco.core.shared import Shared


class Hearing:
    """Hearing of one node."""

    def __init__(self, shared: Shared, fragments: tuple[Fragment, ...]) -> None:
        self._shared, self._fragments = shared, fragments
        self._agreement = Agreement()

    def on_stated(self, sender: str, message: Stated, now: float) -> None:
        """Take in a statement that a peer makes, or passes on."""
        shared, statement = self._shared, message.statement
        accusation = statement.accusation
        fault = self._fault(accusation)
        if fault is not None:
            shared.out.record("refusal", None, str(fault), peer=sender)
            return
        counts, audits = self._counts(statement), self._is_to_be_audited(accusation, now)
        if not self._is_worth_it(statement) or not (counts or audits):
            return
        if not shared.excluded.signed(statement):
            shared.out.record("refusal", None, str(MessageFault.FALSE_STATEMENT), peer=sender)
            return
        if counts and self._agreement.count(statement, self._voters(statement)):
            shared.excluded.found(statement, sender, certain=True)
        elif audits and shared.accusations.take(accusation, now):
            for peer in audience(shared, now):
                if peer != sender:
                    shared.out.send(peer, Stated(accusation))
            self._fragments[accusation.subject.fragment].auditor.poll(now)

    def _fault(self, accusation: Accusation) -> MessageFault | None:
        if not self._shared.config.audited:
            return MessageFault.NO_AUDITS
        known = accusation.subject.fragment < len(self._fragments)
        return None if known else MessageFault.UNKNOWN_FRAGMENT

    def _is_worth_it(self, statement: Statement) -> bool:
        """Tell whether it says something new of somebody who counts, and its author counts."""
        shared, author = self._shared, statement.author()
        ours = author == shared.me
        return (
            not ours
            and author not in shared.excluded
            and shared.has_worked(author)
            and shared.excluded.worth(statement)
        )

    def _voters(self, statement: Statement) -> frozenset[str]:
        """List who votes and has a say in this: not who is accused, nor who is excluded."""
        marks = self._fragments[statement.accusation.subject.fragment].chain.marks
        return marks.voters.difference(self._shared.excluded.peers, (statement.culprit(),))

    def _counts(self, statement: Statement) -> bool:
        """Tell whether its author's word counts, and was not counted yet: we do not know better."""
        settled = self._shared.confirmed or not self._shared.guidance.fresh
        votes = statement.author() in self._voters(statement)
        return settled and votes and not self._agreement.has(statement) and not self._knows_better(statement)

    def _knows_better(self, statement: Statement) -> bool:
        """Tell whether we made that merge again ourselves, and found the contrary."""
        subject = statement.accusation.subject
        if isinstance(statement, Accusation):
            return self._fragments[subject.fragment].auditor.found_right(subject.digest())
        ours = self._shared.excluded.proof_of(subject.maker())
        return isinstance(ours, Accusation) and (ours.accuser, ours.subject) == (self._shared.me, subject)

    def _is_to_be_audited(self, accusation: Accusation, now: float) -> bool:
        """Tell whether we may find out for ourselves, and do not know yet."""
        shared, accuser = self._shared, accusation.accuser
        if accuser in shared.excluded or accuser == shared.me or not shared.has_worked(accuser):
            return False
        return shared.excluded.worth(accusation) and shared.accusations.hears(accuser, now)
