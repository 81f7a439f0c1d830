"""Election of a group's syncer: who holds the office, when this member stands for it, and whose claim is
believed.

Rules: docs/protocol/election.md.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto

from p2pdiloco.core.api.events import Effect, Send
from p2pdiloco.core.api.messages import Elected, OfficeQuery, VoteGranted, VoteRefused, VoteRequest
from p2pdiloco.core.api.reasons import MessageFault, Suspicion, VoteRefusal
from p2pdiloco.core.api.types import WHOLE_RUN, Certificate, Vote
from p2pdiloco.core.candidates import Candidates, Trust
from p2pdiloco.core.context import Electorate, FragmentContext
from p2pdiloco.core.distrust import backoff_s
from p2pdiloco.core.voting import Binding, Candidacy, Terms, VoteJudge, Voter, why_not_certified, why_not_for
from p2pdiloco.util import BoundedDict, Machine, direct_members


@direct_members
class OfficeState(Enum):
    """States of this member towards the office.

    - VACANT: no known member holds the office, or the holder's term is over
    - FOLLOWING: a peer holds it
    - CANDIDATE: we asked for votes
    - HOLDING: we hold it
    """

    VACANT = auto()
    FOLLOWING = auto()
    CANDIDATE = auto()
    HOLDING = auto()


@direct_members
class OfficeSignal(Enum):
    """Causes for a member's state to change."""

    STAND = auto()
    LOSE = auto()
    WIN = auto()
    FOLLOW = auto()
    OPEN = auto()


V, F, C, H = OfficeState.VACANT, OfficeState.FOLLOWING, OfficeState.CANDIDATE, OfficeState.HOLDING
OFFICE_TABLE = {
    (V, OfficeSignal.STAND): C,
    (V, OfficeSignal.FOLLOW): F,
    (F, OfficeSignal.FOLLOW): F,
    (F, OfficeSignal.OPEN): V,
    (C, OfficeSignal.LOSE): V,
    (C, OfficeSignal.WIN): H,
    (C, OfficeSignal.FOLLOW): F,
    (H, OfficeSignal.OPEN): V,
    (H, OfficeSignal.FOLLOW): F,
}


class Office:
    """Office of one group's syncer, as one member sees it: who holds it, for how long, and how it is filled
    again.

    A certificate (a majority's signed votes) puts a peer in office for one term (docs/protocol/election.md,
    section 2). The term ends when the chain has grown by `term_versions`. The holder then stops by itself,
    and a member that holds that version sees that the office is open, so an orderly hand-over races with
    nothing. Earlier, the office is open for a member as soon as *this member* no longer counts on the holder:
    silent, unreachable, left, or slow.

    An open office is filled by the first-ranked live candidate of the next term; each later rank waits
    `stagger_s` longer. A voter gives one vote per term, durable before it is sent; never to a candidate whose
    chain is lighter than its own, and not while it counts on a holder.

    """

    def __init__(self, context: FragmentContext, group: str, electorate: Electorate) -> None:
        self._context = context
        self._shared = context.shared
        self._group = group
        self._fragment = context.index
        self._chain = context.chain
        self._electorate = electorate
        self._machine = Machine(OFFICE_TABLE, OfficeState.VACANT)
        self.certificate: Certificate | None = None
        self._voter = Voter(context, group)
        self._terms = Terms(context, self._voter)
        self._candidacy: Candidacy | None = None
        self._gives_up_s = 0.0
        self._candidates = Candidates(context, group, electorate)
        self._turn = Turn(context, self._candidates, self._terms)
        self._judge = VoteJudge(context, group, self, electorate, self._voter, self._terms, self._candidates)
        self._trust = Trust(context, group, electorate, self._candidates)
        self._inquiry = Inquiry(context, group)
        self._binding = Binding(context, electorate)
        self.changed = False
        """True: the holder changed since `take_change`."""

    # --- questions -----------------------------------------------------------------------------------

    @property
    def state(self) -> OfficeState:
        """State of this member towards the office."""
        return self._machine.state

    @property
    def term(self) -> int:
        """Highest term of which we hold a certificate."""
        return self.certificate.term if self.certificate else 0

    @property
    def syncer(self) -> str | None:
        """Peer in office for all that we know (also when we no longer count on it)."""
        if self.certificate is None or self.term_over() or self.certificate.syncer in self._shared.excluded:
            return None
        return self.certificate.syncer

    @property
    def holding(self) -> bool:
        """True: we are the syncer now."""
        return self.state is OfficeState.HOLDING

    def term_over(self) -> bool:
        """Tell whether the certified term has made all its versions, or is of a branch that is not ours."""
        certificate, ours = self.certificate, self._chain.head.number
        if certificate is None:
            return True
        number, digest = certificate.base
        if self._chain.digest_of(number) not in (None, digest):
            return True
        if self.holding and not self._chain.copied <= number <= ours:
            return True  # of which branch that is, a copy does not show
        return ours >= number + self._shared.config.term_versions

    def why_open(self, now: float, candidate: str = "") -> str:
        """Say why no member can be counted on in this office (or is to leave it to that one); empty if one
        can."""
        if self.certificate is None:
            return "no syncer was elected yet"
        if self.term_over():
            return f"term {self.term} is over"
        if self.certificate.syncer == self._shared.me:
            return "" if self.holding else "we laid the office down"
        return self._trust.why_not(self.certificate, now, candidate)

    def takes(self, now: float) -> bool:
        """Tell whether to send to the holder: it is counted on, or by so many others that it stays. Then it
        is to have what it may have lost, or waits for."""
        if self.certificate is None or self.syncer is None:
            return False
        return self._trust.stays(self.certificate) or not self.why_open(now)

    def open_s(self, now: float) -> float:
        """Compute for how long nobody was in office, as far as we know."""
        return self._turn.open_s(now)

    def deadline(self) -> float | None:
        """Find when to look again; None: nothing waits for a time."""
        if self.state is OfficeState.CANDIDATE:
            again_s = self._candidacy.again_s if self._candidacy else None
            return self._gives_up_s if again_s is None else min(self._gives_up_s, again_s)
        return self._turn.due_s

    # --- what happens --------------------------------------------------------------------------------

    def suspect(self, why: Suspicion, **details: float) -> None:
        """Stop counting on the holder, of which this was seen. `details`: for people."""
        if self._trust.suspected is None and not self.holding:
            self._trust.doubt(why)
            if self.syncer is not None and why is Suspicion.NO_VERSION:
                self._candidates.had(self.syncer)
            known = {"syncer": self.syncer, "term": self.term, **details}
            self._shared.out.record("suspicion", self._fragment, str(why), **known)

    def take_change(self) -> bool:
        """Tell whether the holder changed since this was last asked."""
        changed, self.changed = self.changed, False
        return changed

    def trust(self) -> None:
        """Count on the holder again: a new version arrived."""
        self._trust.doubt(None)

    def lay_down(self, reason: str) -> None:
        """Lay the office down: we cannot go on as syncer (term over, disk full, leaving)."""
        if self.holding:
            self._machine.go(OfficeSignal.OPEN)
            self._shared.out.record("office", self._fragment, f"laid down: {reason}", term=self.term)
            self.changed = True

    def failed(self, reason: str, now: float) -> None:
        """Lay the office down: a round of ours came to nothing. Whoever stands next, we pause first."""
        self._turn.failed(now)
        self.lay_down(reason)

    def served(self) -> None:
        """Note that a round of ours was merged."""
        self._turn.served()

    def poll(self, now: float) -> None:
        """Notice an open office, stand when it is our turn, give up a lost candidacy."""
        self._candidates.look()
        if self.holding and self.term_over():
            self.lay_down(f"term {self.term} is over")
        elif self.holding:
            if others := self._candidates.why_give_way(self.certificate, now):
                self.lay_down(f"this node {others}")
            elif not self._shared.votes:
                self.lay_down("our disk takes no votes")  # and would take no version
        self._void_if_outgrown(now)
        self._turn.due_s = None
        if self.state is OfficeState.CANDIDATE:
            if now >= self._gives_up_s:
                if self._candidacy is not None:
                    self._shared.view.asked_in_vain(self._candidacy.silent(now), now)
                    self._electorate.leave_out(self._candidacy.undecided(now))
                self._lose(now, f"no majority in time for term {self._candidate_term}")
            elif self._candidacy is not None and self._candidacy.won(now):
                self._won(self._candidacy, now)  # some have no vote any more: the rest are a majority
            elif self._candidacy is not None:
                self._candidacy.ask_again(now)
            return
        reason = self.why_open(now)
        if not reason:
            self._turn.filled()
            return
        if self.state is OfficeState.FOLLOWING:
            self._machine.go(OfficeSignal.OPEN)
            self.changed = True
        if self._shared.confirmed:  # before, nobody may have been here who could be elected
            self._turn.opened(now)
        if self._voter.unsaved_votes or not self._candidates.may_stand(now):
            return
        rests = not self.term_over() and self._trust.rests(self.certificate, now)
        if self._turn.look(rests or not self._electorate.ready(now), now):
            self._stand(now, reason)

    @property
    def _candidate_term(self) -> int:
        return self._candidacy.term if self._candidacy else 0

    def _void_if_outgrown(self, now: float) -> None:
        """Void a certificate that no new member would accept any more: members came, or voters went.

        Else two sides of a healed split would each keep to their own syncer, and a newcomer to none.
        """
        certificate, shared = self.certificate, self._shared
        if certificate is None or not shared.confirmed:
            return
        # The holder goes first, the others only if it does not: two at once would fork.
        patience_s = 0.0 if self.holding else shared.timing.suspect_s
        if not self._binding.lost(certificate, patience_s, now):
            return
        reason = "its votes are no longer a majority of the members"
        stands_again = self.holding and shared.willing
        if self.holding:
            self.lay_down(reason)
        elif self.state is OfficeState.FOLLOWING:
            self._machine.go(OfficeSignal.OPEN)
            shared.out.record("office", self._fragment, f"void: {reason}", term=certificate.term)
            self.changed = True
        self.certificate = None
        if stands_again:
            self._stand(now, reason)

    def _stand(self, now: float, reason: str) -> None:
        shared, term = self._shared, self._terms.next()
        self._machine.go(OfficeSignal.STAND)
        self._candidacy = Candidacy(self._context, self._group, self._electorate, term, reason)
        self._gives_up_s = now + shared.timing.election_timeout_s
        shared.out.record("election", self._fragment, f"we stand: {reason}", term=term, **self._label())
        request = self._candidacy.request()
        sends = tuple(Send(peer, request) for peer in self._electorate.asked(now))
        own = self._voter.sign(shared.me, term, request.head)
        self._give_vote(shared.me, term, sends, lambda t: self._count(own, t))

    def _give_vote(
        self, candidate: str, term: int, then: tuple[Effect, ...], done: Callable[[float], None]
    ) -> None:
        self._terms.used(term)
        self._voter.give(candidate, term, then, done, lambda t, why: self._vote_lost(candidate, t, why))

    def _vote_lost(self, candidate: str, now: float, why: str) -> None:
        reason = f"vote could not be saved: {why}"
        self._shared.out.record("election", self._fragment, reason, candidate=candidate)
        if self.state is OfficeState.CANDIDATE:
            self._lose(now, "our own vote could not be saved")

    def _label(self) -> dict[str, str]:
        return {} if self._group == WHOLE_RUN else {"group": self._group}

    def retire(self, reason: str) -> None:
        """Give the seat up: neither candidate nor syncer here any more."""
        if self.state is OfficeState.CANDIDATE:
            self._machine.go(OfficeSignal.LOSE)
            self._candidacy = None
        self.lay_down(reason)

    def _lose(self, now: float, reason: str) -> None:
        self._machine.go(OfficeSignal.LOSE)
        self._candidates.lost()
        self._turn.lost(now)
        self._shared.out.record(
            "election", self._fragment, f"not elected: {reason}", term=self._candidate_term
        )
        self._candidacy = None

    # --- messages ------------------------------------------------------------------------------------

    def on_vote_request(self, sender: str, request: VoteRequest, now: float) -> None:
        """Give our vote, or say why not."""
        self._shared.view.answered(sender)
        if not self._judge.grants(sender, request, now):
            return
        if self.state is OfficeState.CANDIDATE:
            self._lose(now, f"{sender[-6:]} stands in a later term")
        granted = Send(sender, VoteGranted(self._voter.sign(sender, request.term, request.head)))
        if self.holding:
            self.lay_down("a majority may elect another")
        self._turn.voted(now + self._shared.timing.election_timeout_s)
        if self.open_s(now) >= self._shared.timing.suspect_s:  # others had our vote before, in vain
            self._candidates.had(sender)
        if self._voter.gave(sender, request.term):
            self._shared.out.put(granted)
        else:
            self._give_vote(sender, request.term, (granted,), lambda _t: None)

    def on_vote(self, sender: str, vote: Vote, now: float) -> MessageFault | None:
        """Count a vote for us. Returns what is wrong with a false one."""
        self._shared.view.answered(sender)
        if vote.body.voter != sender:
            return MessageFault.VOTE_OF_ANOTHER
        of = self._candidacy or (self.certificate if self.holding else None)
        if of is None or (of.term, of.base) != (vote.body.term, vote.body.base):
            return None  # or for going on from a head that we left
        fault = why_not_for(self._context, self._group, vote)
        if fault is None and self.holding:
            self.certificate = self._binding.with_late(self.certificate, vote, now)
        elif fault is None:
            self._count(vote, now)
        return fault

    def _count(self, vote: Vote, now: float) -> None:
        candidacy = self._candidacy
        if candidacy is not None and candidacy.term == vote.body.term and candidacy.count(vote, now):
            self._won(candidacy, now)

    def _won(self, candidacy: Candidacy, now: float) -> None:
        certificate = candidacy.certificate()
        result = f"{len(certificate.votes)} of {self._electorate.size(now)} votes"
        self._machine.go(OfficeSignal.WIN)
        self._taken(certificate, f"we are the syncer with {result}", now)
        for peer in self._electorate.others(now):
            self._shared.out.send(peer, Elected(certificate))

    def _taken(self, certificate: Certificate, reason: str, now: float) -> None:
        before, self.certificate = self.certificate, certificate
        vain = before and before.syncer == certificate.syncer and self._chain.header.term < before.term
        if not (vain and self._trust.suspected is Suspicion.NO_VERSION and self._candidates.may_stand(now)):
            self.trust()  # else it has itself elected again, and has made nothing yet
        self._candidacy = None
        self._turn.filled()
        self.changed = True
        self._candidates.filled(now)
        self._shared.out.record(
            "office",
            self._fragment,
            reason,
            syncer=certificate.syncer,
            term=certificate.term,
            **self._label(),
        )

    def on_refused(self, sender: str, refused: VoteRefused, now: float) -> None:
        """Learn from a voter that said no what it knows."""
        self._shared.view.answered(sender)
        self._terms.said(refused.known_term)
        candidacy = self._candidacy
        if candidacy is None or refused.term != candidacy.term:
            return
        if refused.reason.soft:
            candidacy.later(sender, now)
        elif candidacy.refused(sender, now):
            self._lose(now, f"a majority is impossible: {refused.reason}")
            if refused.reason is VoteRefusal.COUNTED_ON and self.certificate is not None:
                self._trust.overruled(self.certificate, now)

    def on_elected(self, sender: str, certificate: Certificate, now: float) -> MessageFault | None:
        """Accept a certificate that our own view bears out. Returns what is wrong with it."""
        if certificate.term <= self.term:
            return None
        fault = why_not_certified(self._context, self._electorate, certificate, now)
        if fault is not None:
            self._terms.said(certificate.term if self._shared.confirmed else 0)  # used up all the same
            return fault
        was_holding = self.holding
        if certificate.syncer == self._shared.me:
            return None  # of an earlier life of ours: we do not hold that office any more
        self._terms.used(certificate.term if self._shared.confirmed else 0)
        self._machine.go(OfficeSignal.FOLLOW)
        self._taken(certificate, "deposed" if was_holding else "follows", now)
        return None

    def on_query(self, sender: str, query: OfficeQuery) -> None:
        """Give the certificate that we hold, if it is newer."""
        if self.certificate is not None and self.certificate.term > query.above_term:
            self._shared.out.send(sender, Elected(self.certificate))

    def on_claim(self, peer: str, term: int, now: float) -> None:
        """Ask for a certificate that we lack: a heartbeat claims an office; or give ours, if it is newer. Who
        could not be elected is not asked."""
        if not self._shared.confirmed or self._electorate.decides(peer, now):
            self._inquiry.claimed(peer, term, self.certificate, now)


class Turn:
    """Turn of this member in one group: rank x stagger after the office was seen open, and not in a pause.

    Rules: docs/protocol/election.md, section 3.
    """

    def __init__(self, context: FragmentContext, candidates: Candidates, terms: Terms) -> None:
        self._shared = context.shared
        self._candidates = candidates
        self._terms = terms
        self._open_since_s: float | None = None
        self._vacant_since_s: float | None = None
        """Time at which the office was seen open, whatever candidacies there were since."""
        self._not_before_s = 0.0
        self._voted_until_s = 0.0
        """Time until which it pauses for another that has its vote, beside any other pause."""
        self._failures = 0
        """Rounds of ours in a row that came to nothing."""
        self.due_s: float | None = None
        """Time at which it comes, as the last look had it; None: not worked out."""

    def opened(self, now: float) -> None:
        """Note that the office is open, if that was not known."""
        if self._open_since_s is None:
            self._open_since_s = now
        if self._vacant_since_s is None:
            self._vacant_since_s = now

    def open_s(self, now: float) -> float:
        """Compute for how long the office has been open, as far as we know."""
        return now - self._vacant_since_s if self._vacant_since_s is not None else 0.0

    def filled(self) -> None:
        """Note that the office is filled, which ends a voter's pause. Else who voted would miss its turn in
        terms that are shorter than that, and the first syncer would stay. Other pauses last."""
        self._voted_until_s = 0.0
        self._open_since_s = self._vacant_since_s = None

    def voted(self, until_s: float) -> None:
        """Pause for another that has our vote: until the office is filled, or that time."""
        self._voted_until_s = until_s

    def lost(self, now: float) -> None:
        """Wait for another turn, after a pause of random length: a candidacy was lost."""
        shared = self._shared
        self._not_before_s = now + shared.timing.stagger_s * (1 + 2 * shared.rng.random())
        self._open_since_s = now
        self.due_s = self._not_before_s

    def failed(self, now: float) -> None:
        """Pause after a round of ours that came to nothing, longer every time, up to a bound.

        Where nobody else stands and all merges fail, they would else follow each other as fast as our disk
        takes votes.
        """
        self._failures += 1
        pause_s = backoff_s(self._shared.timing.retry_s, self._failures)
        self._not_before_s = max(self._not_before_s, now + pause_s)

    def served(self) -> None:
        """Note that a round of ours was merged."""
        self._failures = 0

    def look(self, waits: bool, now: float) -> bool:
        """Work out when it comes, and tell whether it has come. `waits`: others are to be heard of first."""
        shared = self._shared
        if waits:
            self._open_since_s = now
            self.due_s = now + shared.timing.retry_s
            return False
        opened_s = self._open_since_s if self._open_since_s is not None else now
        ranked_s = opened_s + self._candidates.wait_s(self._terms.next(), now)
        paused_s = max(self._not_before_s, self._voted_until_s)
        self.due_s = max(paused_s, ranked_s, shared.health.listens_until_s)
        return now >= self.due_s


class Inquiry:
    """Inquiry after the certificate of one group's office.

    A peer that claims to hold the office is asked for the proof. One that claims it for an older term than
    that of our certificate is given this: it may have missed that it is deposed, and wait for our work.

    Rules: docs/protocol/election.md, section 5.
    """

    def __init__(self, context: FragmentContext, group: str) -> None:
        self._shared = context.shared
        self._fragment = context.index
        self._group = group
        self._asked_s: BoundedDict[str, float] = BoundedDict()
        """Times at which claimants were asked: each has its own pause, or one that claims what it has not,
        again and again, would keep us from asking whoever has it."""

    def claimed(self, peer: str, term: int, known: Certificate | None, now: float) -> None:
        """Ask for the certificate of a claim above the term of ours, or give ours, now and then."""
        due_s = self._asked_s.get(peer, -1e18) + self._shared.timing.query_s
        if now < due_s or (known is not None and term == known.term):
            return
        self._asked_s[peer] = now
        if known is not None and term < known.term:
            self._shared.out.send(peer, Elected(known))
        else:
            query = OfficeQuery(self._group, self._fragment, known.term if known else 0)
            self._shared.out.send(peer, query)
