"""Lies of members: proofs that anybody can check, and statements on merges, as one node hears and tells them.

A member that is shown to have lied is excluded for good. Rules: docs/protocol/proofs.md, sections 4 and 5;
docs/protocol/audits.md, section 3.
"""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from p2pdiloco.core.api.events import CastOut, KeepProofs, SayWord
from p2pdiloco.core.api.evidence import Accusation, Evidence, FalseState, Statement, cause_of
from p2pdiloco.core.api.messages import Message, Progress, Proven, Said, Stated
from p2pdiloco.core.api.papers import Word, paper_bytes
from p2pdiloco.core.api.reasons import MessageFault
from p2pdiloco.core.base import Shared
from p2pdiloco.core.chain import WITHIN_VERSIONS
from p2pdiloco.core.distrust import STATEMENTS
from p2pdiloco.core.fragment import Fragment
from p2pdiloco.core.seating import NO_SEAT, stands
from p2pdiloco.util import BoundedDict

MOST_TOLD = 16
"""Proofs and words that a peer is told at one go; and listed peers, beside those to which we talk, that are
told of a new one."""


class Gossip:
    """Gossip of one node: what is found or told is checked, acted upon once, kept, and told to the others.

    A node that accepts a proof tells everybody whom it talks to, so news floods through the swarm and ends,
    as each accepts each culprit once. Heartbeats say by a number whom their sender excludes; one that
    excludes others than we do is told ours, again and again at growing intervals: it may have been away.

    Rules: docs/protocol/proofs.md, sections 4 and 5.
    """

    def __init__(self, shared: Shared, fragments: tuple[Fragment, ...], saved: tuple[Evidence, ...]) -> None:
        self._shared = shared
        self._fragments = fragments
        self._excluded = shared.excluded
        self._told: BoundedDict[str, tuple[float, float, tuple[int, bool]]] = BoundedDict()
        """Time at which each peer is told again, the pause after that, and what its heartbeat said: whom it
        excludes, and whether it is confirmed. Before that it believes nobody."""
        ours = self._excluded.restore(saved)
        if ours is not None:
            shared.out.put(CastOut(ours.words(), cause_of(ours)))
        for proof in self._excluded.proofs:
            subject = proof.subject if isinstance(proof, Accusation) else None
            if isinstance(subject, FalseState) and subject.fragment < len(fragments):
                fragments[subject.fragment].context.false_states.restore(subject)

    # --- what others say -------------------------------------------------------------------------------

    def on_proven(self, sender: str, message: Proven, _now: float) -> None:
        """Take a proof that a peer tells."""
        if self._excluded.worth(message.proof):
            self._excluded.found(message.proof, sender)

    def on_said(self, sender: str, message: Said, now: float) -> bool:
        """Take a seat's word, and pass it on. Tell whether it was news."""
        shared, word = self._shared, message.word
        if len(word.signatures) != 1 or not (shared.awaits(word) and shared.papers.is_news(word)):
            return False
        signed = shared.papers.take([word])
        if signed:
            self._tell(message, sender, now)
        else:
            self._refuse(sender, MessageFault.FALSE_STATEMENT)
        return signed

    def say(self, event: SayWord, now: float) -> bool:
        """Say what our person wants said of a seat, in the words of whoever said the same before."""
        shared = self._shared
        seats = [fragment.chain.marks.seat(event.peer) or NO_SEAT for fragment in self._fragments]
        orders = [(seat.word, seat.turn) for seat in seats if stands(seat) != event.seated]
        if not orders:
            return False
        said, kind, (number, turn) = shared.papers.said, (event.seated, event.replaces), max(orders)
        same = [w for (_, peer), w in said.items() if peer == event.peer and (w.seated, w.replaces) == kind]
        alike = Counter(replace(w, signatures=()) for w in same if w.number == number)
        if before := said.get((shared.me, event.peer)):
            turn = max(turn, before.turn)
            ours = alike.pop(replace(before, signatures=()), 0)
            alike = Counter({word: many for word, many in alike.items() if word.turn > turn and many > ours})
            if ours and not alike:
                return False
        new = Word(shared.config.run, event.peer, number, event.seated, event.replaces, turn + 1)
        word = max(alike, key=lambda each: (alike[each], -each.turn), default=new)
        signed = replace(word, signatures=((shared.me, shared.crypto.sign(paper_bytes(word))),))
        return self.on_said(shared.me, Said(signed), now)

    def heard(self, sender: str, message: Progress, now: float) -> None:
        """Tell a member that excludes others than we do whom we exclude, and let it tell us."""
        said = message.proofs
        if said == self._shared.told_mark or sender in self._excluded:
            return
        if self._shared.view.progress(sender) is None:
            return
        state, first_s = (said, message.confirmed), self._shared.timing.suspect_s
        again_s, pause_s, before = self._told.get(sender, (now, first_s, state))
        if state[1] and not before[1]:
            again_s = min(again_s, now + first_s)
            self._told[sender] = again_s, first_s, state
        if now < again_s:
            return
        if state != before:
            pause_s = first_s
        self._told[sender] = now + pause_s, min(2 * pause_s, 16 * first_s), state
        if said:
            self._shared.notices.greet(sender)  # it need not hear us otherwise
        news = [*map(telling, self._excluded.proofs), *map(Said, self._shared.papers.said.values())]
        for each in self._shared.rng.sample(news, min(MOST_TOLD, len(news))):
            self._shared.out.send(sender, each)

    def refuses(self, sender: str, now: float) -> bool:
        """Tell whether nothing that this peer says is to be heard. It is told why, now and then, and that is
        recorded."""
        proof = self._excluded.proof_of(sender)
        if proof is None:
            return False
        first_s = self._shared.timing.suspect_s
        again_s, pause_s, _ = self._told.get(sender, (now, first_s, (0, False)))
        if now >= again_s:
            self._told[sender] = now + pause_s, min(2 * pause_s, 16 * first_s), (0, False)
            self._refuse(sender, MessageFault.EXCLUDED)
            self._shared.out.send(sender, telling(proof))
        return True

    def _refuse(self, peer: str, fault: MessageFault) -> None:
        self._shared.out.record("refusal", None, str(fault), peer=peer)

    # --- what follows ----------------------------------------------------------------------------------

    def settle(self, now: float) -> bool:
        """Look at what was found. Tell whether somebody is excluded now who was not before."""
        new = False
        for proof, giver, certain in self._excluded.take_found():
            if not self._excluded.worth(proof):
                continue
            if certain or self._excluded.holds(proof):
                new = self._accept(proof, giver, now) or new
            elif giver:
                self._refuse(giver, MessageFault.FALSE_PROOF)
        return new

    def _accept(self, proof: Evidence, giver: str, now: float) -> bool:
        shared, culprit = self._shared, proof.culprit()
        known = culprit in self._excluded
        if not self._excluded.add(proof):
            return False
        shared.out.put(KeepProofs(self._excluded.kept))
        if not known:
            shared.out.record("excluded", None, proof.words(), peer=culprit)
        if culprit == shared.me:
            shared.out.put(CastOut(proof.words(), cause_of(proof)))
            return True
        self._tell(telling(proof), giver, now)  # its author, too: it may not know that a copy of it runs
        shared.exclude(culprit, now)
        for fragment in self._fragments:
            fragment.follower.heads.gone(culprit)
            fragment.touch()
        return True

    def _tell(self, news: Message, giver: str, now: float) -> None:
        for peer in audience(self._shared, now):
            if peer != giver:
                self._shared.out.send(peer, news)


class Hearing:
    """Hearing of statements on merges: a node that hears an accusation makes the merge again for itself.

    A node that cannot, as it came later or the contributions are gone, believes most of those who vote by its
    own chain: never before it tried, nor against what it found itself. A node that began with nothing
    believes nobody before it is confirmed: its chain may still be a forged one.

    Rules: docs/protocol/audits.md, section 3.
    """

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
        if not self._is_heard(statement, sender):
            return
        audits, counts = self._is_to_be_audited(accusation, now), self._counts(statement)
        agreed = counts and self._most_agree(statement, now)
        if not audits and not agreed and (not counts or self._agreement.has(statement)):
            return
        if not shared.excluded.signed(statement):
            shared.out.record("refusal", None, str(MessageFault.FALSE_STATEMENT), peer=sender)
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

    def _is_heard(self, statement: Statement, sender: str) -> bool:
        """Tell whether its author and its sender are listened to, and it is about who counts."""
        shared, author = self._shared, statement.author()
        about = statement.accusation.subject.maker(), statement.culprit()
        return (
            author != shared.me
            and author not in shared.excluded
            and all(map(shared.has_seat, (author, sender)))
            and all(peer == shared.me or shared.takes_part(peer) for peer in about)
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
        return marks.seats.difference(self._shared.excluded.peers, (statement.culprit(),))

    def _most_agree(self, statement: Statement, now: float) -> bool:
        here = frozenset(filter(self._shared.has_seat, self._shared.view.confirmed(now)))
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
        if known or accuser in shared.excluded or accuser == shared.me or not shared.has_seat(accuser):
            return False
        ahead = subject.number - fragment.chain.head.number
        here = ahead > 0 or fragment.chain.knows(subject.number, subject.version_digest())
        news = here and abs(ahead) <= WITHIN_VERSIONS and not fragment.auditor.found_false(subject)
        return news and shared.accusations.hears(accuser, now)


FEWEST = 2
"""Least number of members whose word excludes somebody."""


class Agreement:
    """Members that state of somebody that it lied, each under its own signature.

    A node that cannot make the merge again believes what most of those who vote state.

    Only voters by our own chain count: more than half of all of them, but the accused and the excluded,
    more than half of the members that are here, and two at least. Whoever has so many decides all else as
    well. In a run that few vote in yet, they alone exclude nobody.

    Rules: docs/protocol/audits.md, section 3.
    """

    def __init__(self) -> None:
        self._authors: BoundedDict[str, frozenset[str]] = BoundedDict()

    def has(self, statement: Statement) -> bool:
        """Tell whether its author's word on that member is counted."""
        return statement.author() in self._authors.get(statement.culprit(), frozenset())

    def count(self, statement: Statement) -> None:
        """Count the word of a voter."""
        culprit = statement.culprit()
        self._authors[culprit] = self._authors.get(culprit, frozenset()) | {statement.author()}

    def most(self, statement: Statement, voters: frozenset[str], here: frozenset[str]) -> bool:
        """Tell whether with this one most voters agree, and so many that they are most of who is here."""
        authors = (self._authors.get(statement.culprit(), frozenset()) | {statement.author()}) & voters
        return len(authors) >= max(FEWEST, len(voters) // 2 + 1, len(here) // 2 + 1)


def audience(shared: Shared, now: float) -> list[str]:
    """Choose who is told of news: whom we talk to, and of a large run some others. A culprit may have been
    the only one between our group and theirs."""
    near = shared.view.members(now)
    known = {*near, shared.me}
    far = [peer for peer, _ in shared.listing.members if peer not in known]
    return [*near, *shared.rng.sample(far, min(MOST_TOLD, len(far)))]


def telling(proof: Evidence) -> Message:
    """Make the message that tells somebody of evidence."""
    return Stated(proof) if isinstance(proof, STATEMENTS) else Proven(proof)
