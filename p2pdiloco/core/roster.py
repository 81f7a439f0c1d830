"""Roster of one fragment as this node sees it: whose word decides, by the chain and by the papers held here.

The seats of the head's table decide: they vote, hold the office, are believed about heads, and make groups.
Papers that this node holds, and that no version carries yet, change that in two ways only, within the limits
that a version has. A seat that the owner has ended decides nothing any more; and whoever may have a seat soon
is believed about heads, though it has no vote. Where no seat of the table is here, those decide to which the
owner gave one; where there never was a seat, else those that are invited.

Work decides nothing: what is merged of whom tunes only for whom rounds wait.

Rules: docs/protocol/seats.md, section 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence

from msgspec.structs import replace

from p2pdiloco.core.api.evidence import Evidence, fingerprint
from p2pdiloco.core.api.papers import (
    MAX_PAPERS,
    RECOVERY_FROM,
    Admission,
    Paper,
    Proof,
    Word,
    is_sound,
    signatures_of,
)
from p2pdiloco.core.api.types import MAX_PEERS, Head, Verify
from p2pdiloco.core.chain import LATELY_VERSIONS, Chain, Marks
from p2pdiloco.core.members import Derived
from p2pdiloco.core.seating import LINK_PLACES, NO_SEAT, Seating, deputies, is_next
from p2pdiloco.util import BoundedDict


class Papers:
    """Papers that this node holds: of every peer the owner's newest word, what seats say of it, and its
    admissions.

    They are sets: whoever holds the same papers counts the same, in whatever order they came.
    """

    def __init__(self, run: str, owners: Sequence[str], verify: Verify) -> None:
        self._run, self._owners, self._verify = run, owners, verify
        self.words: BoundedDict[str, Word] = BoundedDict(MAX_PEERS)
        self.said: dict[tuple[str, str], Word] = {}
        """Newest word of each seat on each peer, by author and peer."""
        self.admissions: BoundedDict[tuple[str, str], Admission] = BoundedDict(MAX_PEERS)
        """Admissions by peer and key of the invite: anybody can admit anybody by an invite of its own, and is
        not to put another's out by that."""
        self.mark = 0
        """Number that says which words of seats are here (`fingerprint`)."""
        self.news: object = None
        """Another object whenever there is another paper."""

    def take(self, papers: Iterable[Paper]) -> bool:
        """Hold these, as far as they are sound and new. Tell whether any is."""
        before = self.news
        for paper in papers:
            if self.is_news(paper) and self.signed(paper):
                self._keep(paper)
        return self.news is not before

    def _keep(self, paper: Paper) -> None:
        if isinstance(paper, Admission):
            self.admissions[paper.peer, paper.grant.key] = paper
        elif isinstance(paper, Word) and paper.turn:
            self._say({**self.said, (paper.signatures[0][0], paper.peer): paper})
        elif isinstance(paper, Word):
            self.words[paper.peer] = paper
        self.news = object()

    def is_news(self, paper: Paper) -> bool:
        """Tell whether a paper would be held, if it is signed."""
        if isinstance(paper, Admission):
            return self.admissions.get((paper.peer, paper.grant.key)) != paper
        if not isinstance(paper, Word) or len(paper.signatures) != 1:
            return False
        author, known = paper.signatures[0][0], self.words.get(paper.peer)
        if paper.turn:
            known = self.said.get((author, paper.peer))
            if known is None and sum(by == author for by, _ in self.said) >= MAX_PAPERS:
                return False
        if known is None or paper.order != known.order:
            return known is None or paper.order > known.order
        return not paper.turn and paper.signatures > known.signatures

    def forget(self, outdated: Callable[[Word], bool]) -> None:
        """Drop the words of seats that can change nothing any more."""
        self._say({key: word for key, word in self.said.items() if not outdated(word)})

    def _say(self, said: dict[tuple[str, str], Word]) -> None:
        self.said = said
        self.mark = fingerprint({word.signatures[0][1].hex() for word in said.values()})

    def joint(self) -> list[Word]:
        """List all words: the owner's, and those of seats, each with all its authors."""
        authors: dict[Word, list[tuple[str, bytes]]] = {}
        for word in self.said.values():
            authors.setdefault(replace(word, signatures=()), []).extend(word.signatures)
        joined = (replace(word, signatures=tuple(sorted(by)[:MAX_PAPERS])) for word, by in authors.items())
        return [*self.words.values(), *joined]

    def signed(self, paper: Paper) -> bool:
        """Tell whether a paper is what it says it is (`is_sound`)."""
        return is_sound(paper, self._run, self._owners, self._verify)


class Roster:
    """Roster of one fragment: peers that decide, and learners for which its rounds wait."""

    def __init__(self, papers: Papers, chain: Chain) -> None:
        self._papers = papers
        self._chain = chain
        self._derived = Derived()

    @property
    def marks(self) -> Marks:
        """Marks of the head."""
        return self._chain.marks

    def has_worked(self, peer: str) -> bool:
        """Tell whether anything of that peer was merged."""
        return peer in self._chain.marks

    @property
    def seats(self) -> frozenset[str]:
        """Peers that decide: those of the head's table, but for whom the owner has ended."""
        return self._ahead[0]

    @property
    def _ahead(self) -> tuple[frozenset[str], frozenset[str]]:
        """List the seats of the table that stand by the words held here, and those that only words give."""
        return self._derived.of("ahead", self._look_ahead, self._chain.marks, self._papers.news)

    def _look_ahead(self, marks: Marks, _news: object) -> tuple[frozenset[str], frozenset[str]]:
        """Let those words count that the next version could carry, and no more: the limits on them hold."""
        ahead = Seating(marks.table, self._chain.head.number + 1)
        for word in self._newer(marks):
            ahead.take(word)
        return marks.seats & ahead.standing, ahead.standing - marks.seats

    def _newer(self, marks: Marks) -> list[Word]:
        """List the words that the table does not know yet: those of seats, which a thief of the owner's key
        cannot outnumber, then the owner's, in the order of their numbers."""
        words = [word for word in self._papers.joint() if _may_follow(word, marks)]
        if any(word.number >= RECOVERY_FROM for word in words):  # a thief's words come before it by number
            words = [word for word in words if word.turn or word.number >= RECOVERY_FROM]
        return sorted(words, key=lambda word: (not word.turn, word.order, word.peer))

    def awaits(self, word: Word) -> bool:
        """Tell whether a word of a seat may change the table: its author is a deputy, or gives its own seat
        up."""
        marks, (author, _) = self._chain.marks, word.signatures[0]
        leaves = author == word.peer and not word.seated and author in marks.seats
        return (leaves or author in self.deputies) and _may_follow(word, marks)

    @property
    def deputies(self) -> frozenset[str]:
        """Seats of which more than half say what the owner may say of seats."""
        return self._derived.of("deputies", lambda marks: deputies(marks.table), self._chain.marks)

    @property
    def entering(self) -> frozenset[str]:
        """Peers to which a version that begins a term gives a seat, and that decide on it where no seat is
        here."""
        return self._derived.of("entering", self._entering, self._chain.marks, self._papers.news)

    def _entering(self, marks: Marks, _news: object) -> frozenset[str]:
        named = self._ahead[1]
        return named if marks.places else named.union(self._invited(marks, marks))

    @property
    def known(self) -> frozenset[str]:
        """Peers that have a seat, or may have one soon: their word about heads counts."""
        return self._derived.of("known", self._known, self._chain.marks, self._papers.news)

    @property
    def given(self) -> frozenset[str]:
        """Peers that have a seat by the table, or by the owner's word; not those whom an invite may seat."""
        return self._derived.of("given", lambda ahead: ahead[0] | ahead[1], self._ahead)

    def _known(self, marks: Marks, _news: object) -> frozenset[str]:
        return self.given.union(self._invited(marks, marks))

    def awaits_word(self, peer: str) -> bool:
        """Tell whether that peer works, and gets a seat by a word only: it never had one, no invite gives it
        one, and the owner has said nothing of it yet."""
        unnamed = peer not in self.known and peer not in self._papers.words
        return unnamed and self.attends(peer) and self._chain.marks.seat(peer) is None

    def _invited(self, marks: Marks, after: Marks) -> list[str]:
        """List those whom invites may seat in the places that are left: whoever has worked by that table, the
        first one first. Of others nobody knows the order, so they are none where they are too many."""
        left, words = max(0, LINK_PLACES - marks.places), self._papers.words
        used = Counter(mark.seat.key for mark in marks.table if mark.seat)
        barred = {peer for peer, word in words.items() if not word.seated}
        barred.update(mark.learner for mark in marks.table if mark.seat)
        invited = sorted(
            {
                peer
                for (peer, key), shown in self._papers.admissions.items()
                if barred.isdisjoint((peer, key)) and used[key] < shown.grant.uses
            }
        )
        worked = sorted((first, peer) for peer in invited if (first := after.first(peer)))
        found = [peer for _, peer in worked]
        return found[:left] if len(invited) > left else [*found, *(p for p in invited if p not in found)]

    def to_carry(self, number: int, after: Marks, proofs: Iterable[Evidence]) -> tuple[Paper, ...]:
        """Choose the papers for version `number` of ours, which begins a term. `after`: its table without
        them. An invite seats whoever has worked, the first one first."""
        seats = Seating(self._chain.marks.table, number)
        worked = [peer for peer in self._invited(self._chain.marks, after) if peer in after]
        shown = self._papers.admissions
        admissions = [shown[key] for peer in worked for key in sorted(shown) if key[0] == peer]
        papers = [*(proof for proof in proofs if isinstance(proof, Proof)), *self._newer(after), *admissions]
        found: list[Paper] = []
        room = MAX_PAPERS
        for paper in papers:
            if room >= signatures_of(paper) and seats.take(paper):
                room -= signatures_of(paper)
                found.append(paper)
        return tuple(found)

    # --- lists of members ------------------------------------------------------------------------------

    def of(self, name: str, peers: list[str]) -> list[str]:
        """List those of these members that decide. The answer for `name` is kept while list and seats
        last."""
        return self._derived.of(name, self._deciding, peers, self._chain.marks, self._papers.news)

    def _deciding(self, peers: list[str], _marks: Marks, _news: object) -> list[str]:
        return _among(peers, self.seats) or _among(peers, self.entering)

    def attending(self, name: str, learners: list[str]) -> list[str]:
        """List those of these live learners that were merged lately; everybody, where nobody's work was."""
        return self._derived.of(name, self._attending, learners, self._chain.marks)

    def _attending(self, learners: list[str], marks: Marks) -> list[str]:
        return [peer for peer in learners if self.attends(peer)] if marks.lately else learners

    def knows(self, head: Head) -> bool:
        """Tell whether that head is our head, or an ancestor of it that we remember."""
        return self._chain.knows(head.number, head.digest)

    def no_way_from(self, head: Head) -> bool:
        """Tell whether no updates lead from that head to ours, nor from ours to that one: it is of another
        branch, or older than our log."""
        return head.number <= self._chain.head.number and not self.knows(head)

    def attends(self, learner: str) -> bool:
        """Tell whether something of that learner was merged lately. Else it is a newcomer (again): no quorum
        counts it, and rounds that called it in vain wait for it no more."""
        marks = self._chain.marks
        return learner in marks and marks.number(learner) >= self._chain.head.number - LATELY_VERSIONS


def _may_follow(word: Word, marks: Marks) -> bool:
    seat = marks.seat(word.peer) or NO_SEAT
    return is_next(word, seat) if word.turn else word.number > seat.word


def _among(peers: list[str], seats: Container[str]) -> list[str]:
    return [peer for peer in peers if peer in seats]
