"""Votes in one group: our own, our candidacy for others' votes, and what a certificate proves.

Rules: docs/protocol/election.md, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec.structs import replace

from p2pdiloco.core.api.effects import Effect, VoteRecord
from p2pdiloco.core.api.messages import VoteRequest
from p2pdiloco.core.api.reasons import MessageFault, VoteRefusal
from p2pdiloco.core.api.types import MAX_VOTES, Certificate, Vote, VoteBody
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.election.electorate import Electorate

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

    def sign(self, candidate: str, term: int) -> Vote:
        """Make the vote itself; it must be durable before it leaves us."""
        shared = self._shared
        body = VoteBody(shared.config.run, self._group, self._context.index, term, candidate, shared.me)
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
        self._shared.out.persist(
            record,
            then,
            lambda t: self._saved(record, done, t),
            lambda t, why: self._not_saved(failed, t, why),
        )

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
        self._starts = context.chain.head.number
        self._reason = reason
        self.votes: dict[str, Vote] = {}
        self._asked: set[str] = set()
        """Voters that have not said a word yet."""
        self._refused: set[str] = set()
        self._again: set[str] = set()
        """Voters that could not judge our candidacy yet."""
        self.again_s: float | None = None
        """Time at which they are asked again."""

    def request(self) -> VoteRequest:
        """Make the question to the voters."""
        head = self._context.chain.head
        return VoteRequest(self._group, self._context.index, self.term, head, self._reason)

    def count(self, vote: Vote, now: float) -> bool:
        """Take one vote in. Tell whether a majority is reached."""
        self._asked.discard(vote.body.voter)
        if self._electorate.count([vote.body.voter], now):
            self.votes[vote.body.voter] = vote
        return self.won(now)

    def won(self, now: float) -> bool:
        """Tell whether it is a majority, of those who have a vote now."""
        return 2 * self._electorate.count(self.votes, now) > self._electorate.size(now)

    def asks(self, voters: Iterable[str]) -> None:
        """Note who was asked."""
        self._asked.update(voters)

    @property
    def silent(self) -> frozenset[str]:
        """Voters that were asked and have said nothing."""
        return frozenset(self._asked)

    def refused(self, voter: str, now: float) -> bool:
        """Note that this voter says no. Tell whether a majority is impossible now."""
        self._asked.discard(voter)
        self._refused.add(voter)
        size = self._electorate.size(now)
        return 2 * (size - self._electorate.count(self._refused, now)) <= size

    def later(self, voter: str, now: float) -> None:
        """Note that this voter is to be asked again."""
        self._asked.discard(voter)
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
        return Certificate(self._group, self._context.index, self.term, me, self._starts, votes)


def why_not_for(context: FragmentContext, group: str, vote: Vote) -> MessageFault | None:
    """Say why this is no vote for us in that group; None if it is one."""
    body, shared = vote.body, context.shared
    if (body.run, body.group, body.fragment, body.candidate) != (
        shared.config.run,
        group,
        context.index,
        shared.me,
    ):
        return MessageFault.VOTE_FOR_ANOTHER
    signed = shared.signed_by(body.voter, "vote", body, vote.signature)
    return None if signed else MessageFault.VOTE_SIGNATURE


def binds(certificate: Certificate, electorate: Electorate, now: float) -> bool:
    """Tell whether those who voted are still a majority of today's voters, as we see them."""
    voters = electorate.voters(now)
    gave = {vote.body.voter for vote in certificate.votes}
    unheard = electorate.out_of_earshot(gave, now) + electorate.had_votes(gave, now)
    return 2 * (len(gave.intersection(voters)) + unheard) > len(voters) + unheard


class Binding:
    """Watch on whether the holder's certificate still binds anyone, looked at once a heartbeat."""

    def __init__(self, context: FragmentContext, electorate: Electorate) -> None:
        self._shared = context.shared
        self._electorate = electorate
        self._look_s = -1e18
        self._lost_since_s: float | None = None
        self.term = 0
        """Term of the last certificate that did."""

    def with_late(self, certificate: Certificate | None, vote: Vote, now: float) -> Certificate | None:
        """Add a vote that came after the majority to our certificate. Who counts more voters than we do asks
        for it again, and accepts it then. Else a member that tells some of us that it votes, and others that
        it does not, keeps the ones out of the others' rounds."""
        known = {} if certificate is None else {each.body.voter: each for each in certificate.votes}
        voter = vote.body.voter
        if certificate is None or voter in known or len(known) >= MAX_VOTES:
            return certificate
        if not self._electorate.count([voter], now):
            return certificate
        return replace(certificate, votes=tuple(each for _, each in sorted({**known, voter: vote}.items())))

    def lost(self, certificate: Certificate, patience_s: float, now: float) -> bool:
        """Tell whether it has bound no member for so long."""
        if now < self._look_s:
            return False
        self._look_s = now + self._shared.timing.heartbeat_s
        if binds(certificate, self._electorate, now):
            self._lost_since_s, self.term = None, certificate.term
            return False
        if self._lost_since_s is None:
            self._lost_since_s = now
        if now - self._lost_since_s < patience_s:
            return False
        self._lost_since_s = None
        return True


def why_not_certified(
    context: FragmentContext, electorate: Electorate, certificate: Certificate, now: float
) -> MessageFault | None:
    """Say why a certificate puts no one in office, in the view that we have ourselves; None if it does.

    Who is not confirmed yet cannot count a majority: for it the syncer must have worked, and have signed one
    of the votes.
    """
    shared = context.shared
    named = {vote.body.voter for vote in certificate.votes}  # counted first: signatures take time
    if certificate.syncer in shared.excluded:
        return MessageFault.EXCLUDED
    if not named:
        return MessageFault.CERTIFICATE_EMPTY
    if len(named) < len(certificate.votes):
        return MessageFault.CERTIFICATE_REPEATS
    if shared.confirmed:
        unheard = electorate.out_of_earshot(named, now) + electorate.had_votes(named, now)
        if 2 * (electorate.count(named, now) + unheard) <= electorate.size(now) + unheard:
            return MessageFault.CERTIFICATE_MINORITY
    elif certificate.syncer not in named or not shared.trusts(certificate.syncer):
        return MessageFault.CERTIFICATE_MINORITY
    # Those that count first: whoever only names them has not signed, and strangers' votes may be many.
    for vote in sorted(certificate.votes, key=lambda vote: not shared.has_worked(vote.body.voter)):
        body = vote.body
        expected = VoteBody(
            shared.config.run,
            certificate.group,
            context.index,
            certificate.term,
            certificate.syncer,
            body.voter,
        )
        if body != expected or not shared.signed_by(body.voter, "vote", body, vote.signature):
            return MessageFault.CERTIFICATE_SIGNATURE
    return None
