"""Hearing of statements on merges: whoever hears an accusation makes the merge again for itself.

Who cannot, as it came later or the contributions are gone, believes most of those who vote by its own chain:
never before it tried, nor against what it found itself.
A node that began with nothing believes nobody before it is confirmed: its chain may still be a forged one.

Rules: docs/protocol/audits.md, section 3.
"""

from __future__ import annotations

from p2pdiloco.core.api.messages import Stated
from p2pdiloco.core.api.reasons import MessageFault
from p2pdiloco.core.api.statements import Accusation, FalseState, Statement
from p2pdiloco.core.fragment import Fragment
from p2pdiloco.core.proofs.agreement import Agreement
from p2pdiloco.core.proofs.gossip import audience
from p2pdiloco.core.shared import Shared

NEAR = 8
"""Versions by which an accused one may be behind our head, or ahead of it: of others nothing can be had."""


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
        if not self._is_heard(statement, sender, now):
            return
        audits, counts = self._is_to_be_audited(accusation, now), self._counts(statement)
        agreed = counts and self._most_agree(statement, now)
        if not audits and not agreed and (not counts or self._agreement.has(statement)):
            return
        if not shared.excluded.signed(statement):
            shared.out.record("refusal", None, str(MessageFault.FALSE_STATEMENT), peer=sender)
            shared.accusations.ignore(sender, now)  # an honest member passes on what it has checked
            return
        if counts:
            self._agreement.count(statement)
        if audits and shared.accusations.take(accusation, now):
            for peer in audience(shared, now):
                if peer != sender:
                    shared.out.send(peer, Stated(accusation))
            self._fragments[accusation.subject.fragment].auditor.poll(now)
        if agreed and not self._finds_out(accusation):
            shared.excluded.found(statement, sender, certain=True)

    def _fault(self, accusation: Accusation) -> MessageFault | None:
        if not self._shared.config.audited and not isinstance(accusation.subject, FalseState):
            return MessageFault.NO_AUDITS
        known = accusation.subject.fragment < len(self._fragments)
        return None if known else MessageFault.UNKNOWN_FRAGMENT

    def _is_heard(self, statement: Statement, sender: str, now: float) -> bool:
        """Tell whether its author and its sender are listened to, and it is about who counts."""
        shared, author = self._shared, statement.author()
        about = statement.accusation.subject.maker(), statement.culprit()
        return (
            author != shared.me
            and author not in shared.excluded
            and all(map(shared.has_worked, (author, sender)))
            and all(peer == shared.me or shared.has_worked(peer) for peer in about)
            and not shared.accusations.ignores(sender, now)
        )

    def _counts(self, statement: Statement) -> bool:
        """Tell whether its author's word counts: it is news, and we do not know better."""
        settled = self._shared.confirmed or not self._shared.guidance.fresh
        votes = statement.author() in self._voters(statement)
        news = self._shared.excluded.worth(statement)
        return settled and votes and news and not self._knows_better(statement)

    def _voters(self, statement: Statement) -> frozenset[str]:
        """List who votes and has a say in this: not who is accused, nor who is excluded."""
        marks = self._fragments[statement.accusation.subject.fragment].chain.marks
        return marks.voters.difference(self._shared.excluded.peers, (statement.culprit(),))

    def _most_agree(self, statement: Statement, now: float) -> bool:
        here = frozenset(filter(self._shared.has_worked, self._shared.view.confirmed(now)))
        here = here.difference((statement.culprit(),))
        return self._agreement.most(statement, self._voters(statement), here)

    def _knows_better(self, statement: Statement) -> bool:
        """Tell whether we made that merge again ourselves, and found the contrary."""
        subject = statement.accusation.subject
        auditor = self._fragments[subject.fragment].auditor
        if isinstance(statement, Accusation):
            return auditor.found_right(subject)
        ours = self._shared.excluded.proof_of(subject.maker())
        stated = isinstance(ours, Accusation) and (ours.accuser, ours.subject) == (self._shared.me, subject)
        return stated or auditor.found_false(subject)

    def _finds_out(self, accusation: Accusation) -> bool:
        """Tell whether we are about to find out for ourselves: the version is here, and its turn comes."""
        subject = accusation.subject
        fragment = self._fragments[subject.fragment]
        here = fragment.chain.knows(subject.number, subject.version_digest())
        return here and fragment.auditor.finds_out(subject.digest())

    def _is_to_be_audited(self, accusation: Accusation, now: float) -> bool:
        """Tell whether we may find out for ourselves, and do not know yet: also if its maker is excluded for
        another lie, as the version is to be taken back."""
        shared, subject, accuser = self._shared, accusation.subject, accusation.accuser
        fragment = self._fragments[subject.fragment]
        known = isinstance(shared.excluded.proof_of(subject.maker()), Accusation)
        if known or accuser in shared.excluded or accuser == shared.me or not shared.has_worked(accuser):
            return False
        ahead = subject.number - fragment.chain.head.number
        here = ahead > 0 or fragment.chain.knows(subject.number, subject.version_digest())
        news = here and abs(ahead) <= NEAR and not fragment.auditor.found_false(subject)
        return news and shared.accusations.hears(accuser, shared.has_vote(accuser), now)
