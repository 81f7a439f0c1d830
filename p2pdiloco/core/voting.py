"""Votes in one group: our own, our candidacy for others' votes, and what a certificate proves.

Rules: docs/protocol/election.md, sections 4, 5 and 7.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container

from msgspec.structs import replace

from p2pdiloco.core.api.events import Effect, Persist, Undone, VoteRecord
from p2pdiloco.core.api.messages import VoteRefused, VoteRequest
from p2pdiloco.core.api.papers import TwoVotes
from p2pdiloco.core.api.reasons import MessageFault, VersionFault, VoteRefusal
from p2pdiloco.core.api.types import MAX_VOTES, WHOLE_RUN, Certificate, Head, Vote, VoteBody
from p2pdiloco.core.api.versions import VersionHeader
from p2pdiloco.core.candidates import Candidates
from p2pdiloco.core.chain import MOST_TERMS, plan_of
from p2pdiloco.core.context import Electorate, FragmentContext, Tenure
from p2pdiloco.core.distrust import OF_OFFICE
from p2pdiloco.util import BoundedDict

MAX_UNSAVED = 2
"""Limit of votes that wait for the disk at one time; on a slow one, votes for ever new terms would only queue
up."""


class Voter:
    """Voter of one group: one vote per (group, fragment, term), durable before it is sent."""

    def __init__(self, context: FragmentContext, group: str) -> None:
        self._context = context
        self._shared = context.shared
        self._group = group
        self.unsaved_votes = 0
        """Number of votes on their way to the disk."""

    @property
    def term(self) -> int:
        """The term of our newest vote."""
        vote, _ = self._context.ballots.last(self._group)
        return vote.term if vote else self._context.ballots.floor(self._group)

    def gave(self, candidate: str, term: int) -> bool:
        """Tell whether this is our vote, and durable."""
        vote, durable = self._context.ballots.last(self._group)
        return vote is not None and (vote.term, vote.candidate, durable) == (term, candidate, True)

    def why_not(self, candidate: str, term: int) -> VoteRefusal | None:
        """Say why we cannot vote for that candidate in that term; None if we can."""
        vote, _ = self._context.ballots.last(self._group)
        if term < self.term or (term == self.term and (vote is None or vote.candidate != candidate)):
            return VoteRefusal.VOTE_GIVEN
        return VoteRefusal.SAVING if self.unsaved_votes >= MAX_UNSAVED else None

    def sign(self, candidate: str, term: int, base: Head) -> Vote:
        """Make the vote itself, to go on from that head; it must be durable before it leaves us."""
        shared, run, index = self._shared, self._shared.config.run, self._context.index
        body = VoteBody(run, self._group, index, term, candidate, shared.me, base.number, base.digest)
        return Vote(body, shared.sign("vote", body))

    def give(
        self,
        candidate: str,
        term: int,
        then: tuple[Effect, ...],
        done: Callable[[float], None],
        failed: Callable[[float, str], None],
    ) -> None:
        """Choose that candidate from now on. `then` happens once the vote is durable, and `done` hears of
        it."""
        record = VoteRecord(self._context.index, term, candidate, self._group)
        self._context.ballots.give(record, durable=False)
        self._save(record, then, done, failed)

    def _save(
        self,
        record: VoteRecord,
        then: tuple[Effect, ...] = (),
        done: Callable[[float], None] = lambda now: None,
        failed: Callable[[float, str], None] = lambda now, why: None,
    ) -> None:
        self.unsaved_votes += 1

        def heard(answer: Undone | None, now: float) -> None:
            if answer is None:
                self._saved(record, done, now)
            else:
                self._not_saved(failed, now, answer.reason)

        self._shared.out.ask(Persist(record, then), heard)

    def _save_again(self) -> None:
        """Save our newest vote here once more, so that no older one is written after it."""
        vote, _ = self._context.ballots.last(self._group)
        if vote is not None and self.unsaved_votes < MAX_UNSAVED:
            self._save(vote)

    def _saved(self, record: VoteRecord, done: Callable[[float], None], now: float) -> None:
        self.unsaved_votes -= 1
        if self._context.ballots.last(self._group)[0] == record:
            self._context.ballots.give(record, durable=True)
        self._shared.vote_disk.saved(now)
        done(now)

    def _not_saved(self, failed: Callable[[float, str], None], now: float, why: str) -> None:
        self.unsaved_votes -= 1
        self._shared.vote_disk.failed(self._save_again, why, now)
        failed(now, why)


class Candidacy:
    """Candidacy of ours in one term: asks for votes and counts them."""

    def __init__(
        self,
        context: FragmentContext,
        group: str,
        electorate: Electorate,
        term: int,
        reason: str,
    ) -> None:
        self._context = context
        self._shared = context.shared
        self._group = group
        self._electorate = electorate
        self.term = term
        self._head = context.chain.head
        self.base = self._head.number, self._head.digest
        self._reason = reason
        self.votes: dict[str, Vote] = {}
        self._refused: set[str] = set()
        self._again: set[str] = set()
        """Voters that could not judge our candidacy yet."""
        self.again_s: float | None = None
        """Time at which they are asked again."""

    def request(self) -> VoteRequest:
        """Make the question to the voters."""
        return VoteRequest(self._group, self._context.index, self.term, self._head, self._reason)

    def undecided(self, now: float) -> set[str]:
        """List those that have not judged our candidacy."""
        return {*self._electorate.asked(now)} - self.votes.keys() - self._refused

    def silent(self, now: float) -> set[str]:
        """List those that have not answered."""
        return self.undecided(now) - self._again

    def count(self, vote: Vote, now: float) -> bool:
        """Take one vote in. Tell whether a majority is reached."""
        if self._electorate.count([vote.body.voter], now):
            self.votes[vote.body.voter] = vote
        return self.won(now)

    def won(self, now: float) -> bool:
        """Tell whether it is a majority of those who have a vote now, our own durable vote among them."""
        most = 2 * self._electorate.count(self.votes, now) > self._electorate.size(now)
        return most and self._shared.me in self.votes

    def refused(self, voter: str, now: float) -> bool:
        """Note that this voter says no. Tell whether a majority is impossible now."""
        self._refused.add(voter)
        size = self._electorate.size(now)
        return 2 * (size - self._electorate.count(self._refused, now)) <= size

    def later(self, voter: str, now: float) -> None:
        """Note that this voter is to be asked again."""
        self._again.add(voter)
        if self.again_s is None:
            self.again_s = now + self._shared.timing.retry_s

    def ask_again(self, now: float) -> None:
        """Ask those that could not judge once more, if it is time."""
        if self.again_s is None or now < self.again_s:
            return
        request = self.request()
        for peer in sorted(self._again):
            self._shared.out.send(peer, request)
        self._again, self.again_s = set(), None

    def certificate(self) -> Certificate:
        """Make the proof of our election."""
        votes = tuple(vote for _, vote in sorted(self.votes.items()))
        me = self._shared.me
        return Certificate(self._group, self._context.index, self.term, me, votes)


class VoteJudge:
    """Judge of others' candidacies in one group: whether a candidate gets this member's vote.

    It gives no vote itself, and tells a candidate that gets none why.

    Rules: docs/protocol/election.md, section 4.
    """

    def __init__(
        self,
        context: FragmentContext,
        group: str,
        office: Tenure,
        electorate: Electorate,
        voter: Voter,
        terms: Terms,
        candidates: Candidates,
    ) -> None:
        self._shared = context.shared
        self._fragment = context.index
        self._chain = context.chain
        self._false_states = context.false_states
        self._group = group
        self._office = office
        self._electorate = electorate
        self._voter = voter
        self._terms = terms
        self._candidates = candidates

    def grants(self, candidate: str, request: VoteRequest, now: float) -> bool:
        """Tell whether that candidate is to get our vote; one that is not is told why."""
        shared = self._shared
        self._terms.said(request.term - 1)
        refusal = self._why_no_vote(candidate, request, now)
        if refusal is not None and not refusal.soft:
            # Its own vote of that term is gone: standing in it ourselves would only cross its path again.
            self._terms.said(request.term)
        words = f"given: {request.reason}" if refusal is None else str(refusal)
        shared.out.record("vote", self._fragment, words, candidate=candidate, term=request.term)
        if refusal is not None:
            head = self._chain.head if shared.confirmed else None
            known = max(self._office.term, self._voter.term)
            refused = VoteRefused(self._group, self._fragment, request.term, known, head, refusal)
            shared.out.send(candidate, refused)
        return refusal is None

    def _why_no_vote(self, candidate: str, request: VoteRequest, now: float) -> VoteRefusal | None:
        shared = self._shared
        progress = shared.view.progress(candidate)
        if not shared.votes:
            return VoteRefusal.NO_DISK if shared.confirmed else VoteRefusal.CATCHING_UP
        if self._group != WHOLE_RUN and (progress is None or not self._electorate.admits(candidate, now)):
            return VoteRefusal.NOT_HEARD_OF
        if progress is None or not progress.confirmed:
            return VoteRefusal.NOT_CONFIRMED
        if not self._electorate.decides(candidate, now):
            return VoteRefusal.NO_VOTER
        if shared.distrust.has(candidate, now, *OF_OFFICE):
            return VoteRefusal.DISTRUSTED
        if request.term > self._terms.newest + 1:
            return VoteRefusal.FAR_AHEAD
        if request.term <= self._office.term:
            return VoteRefusal.CERTIFIED
        given = self._voter.why_not(candidate, request.term)
        if given is not None:
            return given
        # A version with a false state weighs nothing, whoever stands on it.
        if request.head.weight < self._chain.head.weight or request.head.digest in self._false_states:
            return VoteRefusal.LIGHTER
        certificate = self._office.certificate
        if certificate is not None and certificate.syncer != candidate:  # else it laid that office down
            refusal = self._why_not_over(candidate, request.head, certificate, now)
            if refusal is not None:
                return refusal
        last = self._candidates.comes_last(candidate, certificate, now)
        waits = last and self._office.open_s(now) < shared.timing.settle_s
        return VoteRefusal.OUT_OF_TURN if waits else None

    def _why_not_over(
        self, candidate: str, head: Head, certificate: Certificate, now: float
    ) -> VoteRefusal | None:
        """Say why the holder is still in office, by our own chain, and by what the holder says of its own.

        What a candidate says of versions that we do not have proves nothing: it is asked again in a moment,
        as the holder's word, or the version itself, will be here if it is true."""
        end = certificate.base[0] + self._shared.config.term_versions

        def over(number: int) -> bool:
            gives_way = self._candidates.why_give_way(certificate, now, number, candidate)
            return number >= end or bool(gives_way)

        said = self._shared.view.head(certificate.syncer, self._fragment)
        known = max(self._chain.head.number, said.number if said else 0)
        if over(known) or self._office.why_open(now, candidate):
            return None
        return VoteRefusal.NOT_PROVEN if over(max(known, head.number)) else VoteRefusal.COUNTED_ON


class Binding:
    """Watch on whether the holder's certificate still binds anyone, looked at once a heartbeat."""

    def __init__(self, context: FragmentContext, electorate: Electorate) -> None:
        self._context = context
        self._electorate = electorate
        self._look_s = -1e18
        self._lost_since_s = math.inf

    def with_late(self, certificate: Certificate | None, vote: Vote, now: float) -> Certificate | None:
        """Add a vote that came after the majority to our certificate. Who counts more voters than we do asks
        for it again, and accepts it then. Else a member that tells some of us that it votes, and others that
        it does not, keeps the ones out of the others' rounds."""
        voter = vote.body.voter
        if certificate is None or len(certificate.votes) >= MAX_VOTES:
            return certificate
        if not self._electorate.count([voter], now):
            return certificate
        known = {voter: vote} | {each.body.voter: each for each in certificate.votes}
        return replace(certificate, votes=tuple(each for _, each in sorted(known.items())))

    def lost(self, certificate: Certificate, patience_s: float, now: float) -> bool:
        """Tell whether it has bound no member for so long."""
        if now < self._look_s:
            return False
        self._look_s = now + self._context.shared.timing.heartbeat_s
        bound = binds(self._context, certificate, self._electorate, now)
        self._lost_since_s = math.inf if bound else min(self._lost_since_s, now)
        return now - self._lost_since_s >= patience_s


HEARSAY = MOST_TERMS // 2
"""Limit of how far above the head's term peers' words move our idea of the newest one: half of what a version
may leap, so that what is left is for elections."""


class Terms:
    """Terms of one group's office: which are used up, as far as this member knows, and which is next.

    Rules: docs/protocol/election.md, section 7.
    """

    def __init__(self, context: FragmentContext, voter: Voter) -> None:
        self._chain = context.chain
        self._voter = voter
        self.newest = voter.term
        """Newest term that we know of."""

    def used(self, term: int) -> None:
        """Note that this term is in use: we voted in it, or hold its proof."""
        self.newest = max(self.newest, term)

    def said(self, term: int) -> None:
        """Note that a peer says that this term is in use."""
        self.used(min(term, self._chain.head.term + HEARSAY))

    def next(self) -> int:
        """Find the first term in which we could stand."""
        return max(self.newest, self._voter.term, self._chain.head.term) + 1


class SeenVotes:
    """Votes that a member has seen in one group: for itself, in the newest term in which it stood, and in
    certificates.

    There is one in a term, so two of one voter are a proof.

    Rules: docs/protocol/proofs.md, section 3.
    """

    def __init__(self, context: FragmentContext, group: str) -> None:
        self._context = context
        self._excluded = context.shared.excluded
        self._group = group
        self._term = 0
        self._for_us: BoundedDict[str, Vote] = BoundedDict(MAX_VOTES)

    def given(self, vote: Vote, known: Certificate | None) -> None:
        """Take in a vote that its voter sent us. `known`: the newest certificate that we hold."""
        term, context = vote.body.term, self._context
        last, _ = context.ballots.last(self._group)
        stood = last is not None and (last.term, last.candidate) == (term, context.shared.me)
        if not stood or why_not_for(context, self._group, vote) is not None:
            return
        if term != self._term:
            self._term = term
            self._for_us.clear()
        self._for_us[vote.body.voter] = vote
        if known is not None:
            self._compare(vote, known.votes, "")

    def certified(self, sender: str, certificate: Certificate, known: Certificate | None) -> None:
        """Compare the votes of a certificate with those that we have: at most one proof comes of it."""
        seen = self._for_us if certificate.term == self._term else {}
        held = {v.body.voter: v for v in known.votes} if known and known.term == certificate.term else {}
        for vote in certificate.votes:
            voter = vote.body.voter
            ours = [v for v in (seen.get(voter), held.get(voter)) if v is not None]
            if voter not in self._excluded and self._compare(vote, tuple(ours), sender):
                return

    def _compare(self, vote: Vote, others: tuple[Vote, ...], giver: str) -> bool:
        """Note a proof, if one of these is another vote of the same voter in the same term."""
        body = vote.body
        for other in others:
            same = (other.body.term, other.body.voter) == (body.term, body.voter)
            if same and other.body.candidate != body.candidate:
                self._excluded.found(TwoVotes(other, vote), giver)
                return True
        return False


def why_not_for(context: FragmentContext, group: str, vote: Vote) -> MessageFault | None:
    """Say why this is no vote for us in that group; None if it is one."""
    body, shared = vote.body, context.shared
    ours = body.run, body.group, body.fragment, body.candidate
    if ours != (shared.config.run, group, context.index, shared.me):
        return MessageFault.VOTE_FOR_ANOTHER
    signed = shared.signed_by(body.voter, "vote", body, vote.signature)
    return None if signed else MessageFault.VOTE_SIGNATURE


def binds(
    context: FragmentContext, certificate: Certificate, electorate: Electorate, now: float, half: bool = False
) -> bool:
    """Tell whether those who voted are still a majority of those that vote here today, or `half` of them; or
    more than half of all seats of our leaf group, whoever is here. In that group a seat that voted and that
    we do not hear counts as here, if somebody who voted is: that one hears it."""
    shared, named = context.shared, {vote.body.voter for vote in certificate.votes}
    gave, here = electorate.count(named, now), electorate.size(now)
    if certificate.group != context.leaf.name:
        return 2 * gave + half > here
    voted, parts = context.voted(certificate)
    gone = sum(peer in shared.excluded or shared.view.has_left(peer) for peer in named)
    unheard = max(0, voted - gave - gone) if gave else 0
    return 2 * (gave + unheard) + half > here + unheard or 2 * voted > parts


def why_not_certified(
    context: FragmentContext, electorate: Electorate, certificate: Certificate, now: float
) -> MessageFault | None:
    """Say why a certificate puts no one in office, in the view that we have ourselves; None if it does.

    A member that is not confirmed yet cannot count a majority: for it the syncer must have a seat, and have
    signed one of the votes.
    """
    shared = context.shared
    named = {vote.body.voter for vote in certificate.votes}  # counted first: signatures take time
    if certificate.syncer in shared.excluded:
        return MessageFault.EXCLUDED
    if not named:
        return MessageFault.CERTIFICATE_EMPTY
    if len(named) < len(certificate.votes):
        return MessageFault.CERTIFICATE_REPEATS
    enough = shared.has_seat(certificate.syncer)
    if shared.confirmed:
        enough = binds(context, certificate, electorate, now)
    if not enough or certificate.syncer not in named:
        return MessageFault.CERTIFICATE_MINORITY
    of_seats = counting(certificate, {voter for voter in named if shared.has_seat(voter)})
    return None if are_signed(context, of_seats) else MessageFault.CERTIFICATE_SIGNATURE


def are_signed(context: FragmentContext, of: Certificate) -> bool:
    """Tell whether all votes of a certificate are signed, and are for its syncer, and for one head."""
    shared = context.shared
    right = shared.config.run, of.group, context.index, of.term, of.syncer, *of.base
    for vote in of.votes:
        body = vote.body
        if (body.run, body.group, body.fragment, body.term, body.candidate, *body.base) != right:
            return False
        if not shared.signed_by(body.voter, "vote", body, vote.signature):
            return False
    return True


def counting(of: Certificate, voters: Container[str]) -> Certificate:
    """Leave out of a certificate the votes of others than these, which prove nothing and may be many."""
    return replace(of, votes=tuple(vote for vote in of.votes if vote.body.voter in voters))


def office_fault(
    context: FragmentContext, header: VersionHeader, giver: str, now: float
) -> VersionFault | None:
    """Say why the maker of a child of our head does not hold the office; None: it does.

    It goes on with its parent's term, or was elected on this branch for a later one: by more than half of the
    seats of its parent's table, whoever is here (a full certificate), or by fewer (a weak one), if no other
    holder is counted on, and they are half of those that are here, or nothing came for long. In a run of
    several groups the seats of each group just below the topmost one count as one, and where a member has no
    place in the topmost one, the holder of the highest group in which it has one says who is here.

    Rules: docs/protocol/election.md, section 5.
    """
    chain, proof, config = context.chain, header.elected, context.shared.config
    parent, of = chain.header, (header.term, header.syncer)
    if of == (parent.term, parent.syncer):
        first = chain.logged(header.number - config.term_versions)
        over = first is not None and (first.header.term, first.header.syncer) == of
        return VersionFault.UNELECTED if proof is not None or over else None
    if proof is None or header.term <= parent.term:  # an old certificate is one of its own term only
        return VersionFault.UNELECTED
    proof = counting(proof, chain.marks.seats | {header.syncer})
    mine = plan_of(parent, config).topmost, context.index, *of
    number, digest = proof.base
    old = not 0 <= chain.head.number - number < config.term_versions
    elsewhere = old or chain.digest_of(number) not in (None, digest)
    if (proof.group, proof.fragment, proof.term, proof.syncer) != mine or elsewhere:
        return VersionFault.UNELECTED
    voted, parts = context.voted(proof)
    post, shared = context.posts[-1], context.shared
    # Where groups have just changed, few seats could be most of their syncers before anybody is known.
    early = parent.groups > 1 and shared.confirmed and post.office.open_s(now) < shared.timing.suspect_s
    full = 2 * voted > parts and not early
    far = not full and header.term > parent.term + MOST_TERMS
    if not voted or far or not are_signed(context, proof):
        return VersionFault.UNELECTED
    return None if _binds_us(context, header, proof, full, giver, now) else VersionFault.OTHER_HOLDER


def _binds_us(
    context: FragmentContext, header: VersionHeader, proof: Certificate, full: bool, giver: str, now: float
) -> bool:
    post = context.posts[-1]
    office, topmost = post.office, post.name == proof.group
    holder, counted_on = office.syncer, office.takes(now)
    said = context.shared.view.head(holder, context.index) if holder else None
    stands = said is not None and (said == header.head() or (full and said.number > header.number))
    if topmost and counted_on:
        number, digest = office.certificate.base if office.certificate else (-1, b"")
        ours = (office.term, holder) == (header.term, header.syncer)
        leads = header.number < number or (header.number == number and header.digest() == digest)
        before = giver == holder and leads and header.term < office.term
        return ours or before or (full and (stands or header.term > office.term))
    vacant_s = min(now - context.moved_s, office.open_s(now))
    if full or (not counted_on and vacant_s > context.shared.timing.resume_alone_s):
        return True  # of several branches with few seats each, none would else be followed
    if topmost:
        return binds(context, proof, post.electorate, now, half=True)
    newcomer = not context.shared.confirmed
    return stands or newcomer or holder in (giver, *(vote.body.voter for vote in proof.votes))
