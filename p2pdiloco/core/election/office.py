"""Office of one group's syncer: who holds it, for how long, and how it is filled again.

A certificate (a majority's signed votes) puts a peer in office for one term (ARCHITECTURE.md, "Election").
The term ends when the chain has grown by `term_versions`. The holder then stops by itself, and a member that
holds that version sees that the office is open, so an orderly hand-over races with nothing. Earlier, the
office is open for a member as soon as *this member* no longer counts on the holder: silent, unreachable,
left, or slow.

An open office is filled by the first-ranked live candidate of the next term; each later rank waits
`stagger_s` longer. A voter gives one vote per term, durable before it is sent; never to a candidate whose
chain is lighter than its own, and not while it counts on a holder.

- VACANT: no known member holds the office, or the holder's term is over
- FOLLOWING: a peer holds it
- CANDIDATE: we asked for votes
- HOLDING: we hold it
"""

from __future__ import annotations

from collections.abc import Callable

from p2pdiloco.core.api.effects import Effect, Send
from p2pdiloco.core.api.messages import Elected, OfficeQuery, VoteGranted, VoteRefused, VoteRequest
from p2pdiloco.core.api.reasons import MessageFault, Suspicion, VoteRefusal
from p2pdiloco.core.api.types import WHOLE_RUN, Certificate, Vote
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.election.candidates import Candidates
from p2pdiloco.core.election.electorate import Electorate
from p2pdiloco.core.election.office_table import (
    OFFICE_TABLE,
    OfficeSignal,
    OfficeState,
)
from p2pdiloco.core.election.trust import Trust
from p2pdiloco.core.election.voting import (
    Binding,
    Candidacy,
    Voter,
    why_not_certified,
    why_not_for,
)
from p2pdiloco.core.machine import Machine

MAX_TERM_LEAP = 1000
"""Limit of how far one peer's word moves our idea of the newest term: terms are numbers that end."""


class Office:
    """Election and tenure of one group's syncer, as one member sees it.

    Args:
        busy: question whether a round of ours is closing right now: then we do not vote us away.
    """

    def __init__(
        self,
        context: FragmentContext,
        group: str,
        electorate: Electorate,
        busy: Callable[[], bool],
        now: float,
    ) -> None:
        self._context = context
        self._shared = context.shared
        self._group = group
        self._fragment = context.index
        self._chain = context.chain
        self._electorate = electorate
        self._busy = busy
        self._machine = Machine(OFFICE_TABLE, OfficeState.VACANT)
        self._since_s = now
        self.certificate: Certificate | None = None
        self._voter = Voter(context, group)
        self._seen_term = self._voter.term
        self._candidacy: Candidacy | None = None
        self._candidates = Candidates(context, group, electorate)
        self._gives_up_s = 0.0
        self._not_before_s = 0.0
        self._open_since_s: float | None = None
        self._trust = Trust(context, group, self._candidates)
        self._asked_s = -1e18
        self._binding = Binding(context, electorate)
        self._stand_due_s: float | None = None
        """Time at which our turn to stand comes, as the last look had it."""
        self.changed = False
        """True: the holder changed since the fragment last looked."""

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
        if self.certificate is None or self.term_over():
            return None
        return self.certificate.syncer

    @property
    def holding(self) -> bool:
        """True: we are the syncer now."""
        return self.state is OfficeState.HOLDING

    def term_over(self) -> bool:
        """Tell whether the certified term has made all its versions."""
        certificate = self.certificate
        if certificate is None:
            return True
        return self._chain.head.number >= certificate.start_number + self._shared.config.term_versions

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
        return self.syncer is not None and (self._trust.outvoted or not self.why_open(now))

    def deadline(self) -> float | None:
        """Find when to look again; None: nothing waits for a time."""
        if self.state is OfficeState.CANDIDATE:
            again_s = self._candidacy.again_s if self._candidacy else None
            return self._gives_up_s if again_s is None else min(self._gives_up_s, again_s)
        return self._stand_due_s

    # --- what happens --------------------------------------------------------------------------------

    def suspect(self, why: Suspicion, **details: float) -> None:
        """Stop counting on the holder: our contribution went unanswered for too long, or it says that it is
        not the syncer. `details`: for people."""
        if self._trust.suspected is None and not self.holding:
            self._trust.suspected = why
            known = {"syncer": self.syncer, "term": self.term, **details}
            self._shared.out.record("suspicion", self._fragment, str(why), **known)

    def trust(self) -> None:
        """Count on the holder again: a new version arrived."""
        self._trust.suspected, self._trust.outvoted = None, False

    def stand_later(self, from_s: float) -> None:
        """Do not stand before that time."""
        self._not_before_s = max(self._not_before_s, from_s)

    def lay_down(self, reason: str) -> None:
        """Lay the office down: we cannot go on as syncer (term over, disk full, leaving)."""
        if self.holding:
            self._machine.go(OfficeSignal.OPEN)
            self._shared.out.record("office", self._fragment, f"laid down: {reason}", term=self.term)
            self.changed = True

    def poll(self, now: float) -> None:
        """Notice an open office, stand when it is our turn, give up a lost candidacy."""
        if self.holding and self.term_over():
            self.lay_down(f"term {self.term} is over")
        elif (
            self.holding
            and not self._busy()
            and (others := self._candidates.why_give_way(self.certificate, now))
        ):
            self.lay_down(f"this node {others}")
        elif self.holding and not self._busy() and not self._shared.votes:
            self.lay_down("our disk takes no votes")  # and would take no version
        self._void_if_outgrown(now)
        self._stand_due_s = None
        if self.state is OfficeState.CANDIDATE:
            if now >= self._gives_up_s:
                self._lose(now, f"no majority in time for term {self._candidate_term}")
            elif self._candidacy is not None and self._candidacy.won(now):
                self._won(self._candidacy, now)  # some have no vote any more: the rest are a majority
            elif self._candidacy is not None:
                self._candidacy.ask_again(now)
            return
        reason = self.why_open(now)
        if not reason:
            self._open_since_s = None
            return
        if self.state is OfficeState.FOLLOWING:
            self._machine.go(OfficeSignal.OPEN)
            self.changed = True
        if self._open_since_s is None:
            self._open_since_s = now
        if self._voter.saving or not self._candidates.may_stand(now):
            return
        if not self._electorate.ready(now) or self._is_held(now):
            self._open_since_s = now
            self._stand_due_s = now + self._shared.timing.retry_s
            return
        listens_until_s = self._shared.health.listens_until_s
        self._stand_due_s = max(self._not_before_s, self._stand_at_s(now), listens_until_s)
        if now >= self._stand_due_s:
            self._stand(now, reason)

    @property
    def _candidate_term(self) -> int:
        return self._candidacy.term if self._candidacy else 0

    def _is_held(self, now: float) -> bool:
        """Ask for the certificate if a seat is new to us only, and its group has a syncer. Tell whether that
        is so."""
        if self._group == WHOLE_RUN or self.certificate is not None:
            return False
        claims = self._shared.claims.of(self._fragment, self._group)
        live = [(term, peer) for peer, term in claims.items() if self._shared.view.alive(peer, now)]
        if not live or now >= self._since_s + self._shared.timing.suspect_s:
            return False
        term, peer = max(live)
        self.on_claim(peer, term, now)
        return True

    def _void_if_outgrown(self, now: float) -> None:
        """Void a certificate that no new member would accept any more: members came, or voters went.

        Else two sides of a healed split would each keep to their own syncer, and a newcomer to none.
        """
        certificate, shared = self.certificate, self._shared
        if certificate is None or not shared.confirmed or self._busy():
            return
        # The holder goes first, between two rounds; the others only if it does not: two at once would fork.
        patience_s = 0.0 if self.holding else shared.timing.suspect_s
        if not self._binding.lost(certificate, patience_s, now):
            self._seen_term = max(self._seen_term, self._binding.term)
            return
        reason = "its votes are no longer a majority of the members"
        stands_again = self.holding and shared.stands and not shared.leaving
        if self.holding:
            self.lay_down(reason)
        elif self.state is OfficeState.FOLLOWING:
            self._machine.go(OfficeSignal.OPEN)
            self._shared.out.record("office", self._fragment, f"void: {reason}", term=certificate.term)
            self.changed = True
        self.certificate = None
        if stands_again:
            self._open_since_s = now
            self._stand(now, reason)

    def _saw(self, term: int) -> None:
        """Note that this term is in use somewhere."""
        self._seen_term = max(self._seen_term, min(term, self._seen_term + MAX_TERM_LEAP))

    def _next_term(self) -> int:
        floor = 0 if self._group == WHOLE_RUN else self._chain.head.term
        return max(self._seen_term, self._voter.term, floor) + 1

    def _stand_at_s(self, now: float) -> float:
        """Compute when our rank's turn comes: rank x stagger after the office was seen open."""
        opened = self._open_since_s if self._open_since_s is not None else now
        return opened + self._candidates.wait_s(self._next_term(), now)

    def _stand(self, now: float, reason: str) -> None:
        shared = self._shared
        term = self._next_term()
        self._machine.go(OfficeSignal.STAND)
        self._candidacy = Candidacy(self._context, self._group, self._electorate, term, reason)
        self._gives_up_s = now + shared.timing.election_timeout_s
        shared.out.record("election", self._fragment, f"we stand: {reason}", term=term, **self._label())
        request = self._candidacy.request()
        sends = tuple(Send(peer, request) for peer in self._electorate.asked(now))
        own = self._voter.sign(shared.me, term)
        self._give_vote(shared.me, term, sends, lambda t: self._count(own, t))

    def _give_vote(
        self, candidate: str, term: int, then: tuple[Effect, ...], done: Callable[[float], None]
    ) -> None:
        self._seen_term = max(self._seen_term, term)
        self._voter.give(candidate, term, then, done, lambda t, why: self._vote_lost(candidate, t, why))

    def _vote_lost(self, candidate: str, now: float, why: str) -> None:
        reason = f"vote could not be saved: {why}"
        self._shared.out.record("election", self._fragment, reason, candidate=candidate)
        if self.state is OfficeState.CANDIDATE:
            self._lose(now, "our own vote could not be saved")

    def _label(self) -> dict[str, str]:
        """Name the group, where there is more than one."""
        return {} if self._group == WHOLE_RUN else {"group": self._group}

    def retire(self, reason: str) -> None:
        """Give the seat up: neither candidate nor syncer here any more."""
        if self.state is OfficeState.CANDIDATE:
            self._machine.go(OfficeSignal.LOSE)
            self._candidacy = None
        self.lay_down(reason)

    def _lose(self, now: float, reason: str) -> None:
        self._machine.go(OfficeSignal.LOSE)
        timing = self._shared.timing
        self._candidates.losses += 1
        self._not_before_s = now + timing.stagger_s * (1 + 2 * self._shared.rng.random())
        self._open_since_s = now
        self._stand_due_s = self._not_before_s
        self._shared.out.record(
            "election", self._fragment, f"not elected: {reason}", term=self._candidate_term
        )
        self._candidacy = None

    # --- messages ------------------------------------------------------------------------------------

    def on_vote_request(self, sender: str, request: VoteRequest, now: float) -> None:
        """Give our vote, or say why not."""
        shared = self._shared
        self._saw(request.term - 1)
        refusal = self._why_no_vote(sender, request, now)
        if refusal is not None and not refusal.soft:
            # Its own vote of that term is gone: standing in it ourselves would only cross its path again.
            self._saw(request.term)
        words = f"given: {request.reason}" if refusal is None else str(refusal)
        shared.out.record("vote", self._fragment, words, candidate=sender, term=request.term)
        if refusal is not None:
            head = self._chain.head if shared.confirmed else None
            known = max(self.term, self._voter.term)
            shared.out.send(
                sender, VoteRefused(self._group, self._fragment, request.term, known, head, refusal)
            )
            return
        if self.state is OfficeState.CANDIDATE:
            self._lose(now, f"{sender[-6:]} stands in a later term")
        granted = Send(sender, VoteGranted(self._voter.sign(sender, request.term)))
        if self.holding:
            self.lay_down("a majority may elect another")
        self._not_before_s = now + shared.timing.election_timeout_s
        if self._voter.gave(sender, request.term):
            shared.out.put(granted)
        else:
            self._give_vote(sender, request.term, (granted,), lambda _t: None)

    def _why_no_vote(self, sender: str, request: VoteRequest, now: float) -> VoteRefusal | None:
        shared = self._shared
        progress = shared.view.progress(sender)
        if not shared.votes:
            return VoteRefusal.NO_DISK if shared.confirmed else VoteRefusal.CATCHING_UP
        if self._group != WHOLE_RUN and (progress is None or not self._electorate.admits(sender, now)):
            return VoteRefusal.NOT_HEARD_OF
        if progress is None or not progress.confirmed:
            return VoteRefusal.NOT_CONFIRMED
        if request.term > max(self._seen_term, self.term) + 1:
            return VoteRefusal.FAR_AHEAD
        if request.term <= self.term:
            return VoteRefusal.CERTIFIED
        given = self._voter.why_not(sender, request.term)
        if given is not None:
            return given
        if request.head.weight < self._chain.head.weight:
            return VoteRefusal.LIGHTER
        certificate = self.certificate
        over = (
            certificate is None
            or certificate.syncer == sender  # it laid that office down
            or request.head.number >= certificate.start_number + shared.config.term_versions
            or bool(self._candidates.why_give_way(certificate, now, request.head.number, sender))
        )
        if not over and not self.why_open(now, sender):
            return VoteRefusal.COUNTED_ON
        if self._busy():
            return VoteRefusal.CLOSING
        return None

    def on_vote(self, sender: str, vote: Vote, now: float) -> MessageFault | None:
        """Count a vote for us. Returns what is wrong with a false one."""
        if vote.body.voter != sender:
            return MessageFault.VOTE_OF_ANOTHER
        if self._candidate_term != vote.body.term:
            return None
        fault = why_not_for(self._context, self._group, vote)
        if fault is None:
            self._count(vote, now)
        return fault

    def _count(self, vote: Vote, now: float) -> None:
        candidacy = self._candidacy
        if candidacy is not None and candidacy.term == vote.body.term and candidacy.count(vote, now):
            self._won(candidacy, now)

    def _won(self, candidacy: Candidacy, now: float) -> None:
        certificate = candidacy.certificate()
        result = f"{len(certificate.votes)} of {self._electorate.size(now)} votes"
        self.certificate = certificate
        self._machine.go(OfficeSignal.WIN)
        self._taken(f"we are the syncer with {result}", now)
        for peer in self._electorate.others(now):
            self._shared.out.send(peer, Elected(certificate))

    def _taken(self, reason: str, now: float) -> None:
        self.trust()
        self._candidacy = None
        self._open_since_s = None
        self.changed = True
        certificate = self.certificate
        if certificate:
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
        self._saw(refused.known_term)
        candidacy = self._candidacy
        if candidacy is None or refused.term != candidacy.term:
            return
        if refused.reason.soft:
            candidacy.later(sender, now)
        elif candidacy.refused(sender, now):
            self._lose(now, f"a majority is impossible: {refused.reason}")
            counted_on = refused.reason is VoteRefusal.COUNTED_ON
            self._trust.outvoted = counted_on and self._trust.suspected is not None
            if refused.head is not None and refused.head.weight > self._chain.head.weight:
                self._not_before_s += self._shared.timing.election_timeout_s  # first catch up

    def on_elected(self, sender: str, certificate: Certificate, now: float) -> MessageFault | None:
        """Accept a certificate that our own view bears out. Returns what is wrong with it."""
        if certificate.term <= self.term:
            return None
        fault = why_not_certified(self._context, self._electorate, certificate, now)
        if fault is not None:
            self._saw(certificate.term if self._shared.confirmed else 0)  # it is used up all the same
            return fault
        was_holding = self.holding
        if certificate.syncer == self._shared.me:
            return None  # of an earlier life of ours: we do not hold that office any more
        self._seen_term = max(self._seen_term, certificate.term if self._shared.confirmed else 0)
        self.certificate = certificate
        self._machine.go(OfficeSignal.FOLLOW)
        self._taken("deposed" if was_holding else "follows", now)
        return None

    def on_query(self, sender: str, query: OfficeQuery) -> None:
        """Give the certificate that we hold, if it is newer."""
        if self.certificate is not None and self.certificate.term > query.above_term:
            self._shared.out.send(sender, Elected(self.certificate))

    def on_claim(self, peer: str, term: int, now: float) -> None:
        """Ask for a certificate that we lack: a heartbeat claims an office."""
        if term > self.term and now - self._asked_s >= self._shared.timing.query_s:
            self._asked_s = now
            self._shared.out.send(peer, OfficeQuery(self._group, self._fragment, self.term))
