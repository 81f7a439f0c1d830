"""Round of a syncer in one group: collecting, closing, and handing over to be merged.

The syncer keeps an inbox of at most one offer per child: contributions of learners in a leaf group, partial
merges of groups higher up (docs/protocol/rounds.md, section 2; docs/protocol/groups.md, section 5). A round
starts when K offers are in or, of learners, on their way, and at least one of them arrived for this round.
(There need never be more than there are live children.) What arrived too late for a round waits for company
in the next, so that slow links delay no other and still take part every time. At quorum the syncer calls the
others ("closing"): each sends what it has, or passes; a group that is called closes its own round. The round
closes when all live children have answered, or when the grace window ends. If no majority of the learners is
in by then, it waits on for payloads that are on their way.

What is in is then merged: by the syncer of the topmost group into the next version
(`core.rounds.publishing`), by all others into a partial for the group above (`core.groups.delegate`).
"""

from __future__ import annotations

import math

from p2pdiloco.core.api.effects import AnswerTransfer
from p2pdiloco.core.api.messages import Closing, Pass
from p2pdiloco.core.api.partials import SignedOffer
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import Ticket
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.election.electorate import Electorate
from p2pdiloco.core.election.office import Office
from p2pdiloco.core.rounds.admission import Admission
from p2pdiloco.core.rounds.attendance import Attendance
from p2pdiloco.core.rounds.closing_calls import ClosingCalls
from p2pdiloco.core.rounds.closing_window import ClosingWindow
from p2pdiloco.core.rounds.handover import Job, Merger, Unusable
from p2pdiloco.core.rounds.hierarchy import Hierarchy
from p2pdiloco.core.rounds.inbox import Held, Inbox
from p2pdiloco.core.rounds.round_table import MAKING, ROUND_TABLE, RoundSignal, RoundState
from p2pdiloco.util import Machine, MovingAverage


class Round:
    """Rounds of one group while this node is its syncer."""

    def __init__(
        self,
        context: FragmentContext,
        group: str,
        level: int,
        office: Office,
        electorate: Electorate,
        inbox: Inbox,
        merger: Merger,
        hierarchy: Hierarchy,
    ) -> None:
        self._context = context
        self._shared = context.shared
        self._group = group
        self._level = level
        self._fragment = context.index
        self._chain = context.chain
        self._office = office
        self._electorate = electorate
        self.inbox = inbox
        self._merger = merger
        self._hierarchy = hierarchy
        self._machine = Machine(ROUND_TABLE, RoundState.IDLE)
        self._merging: tuple[Held, ...] = ()
        self._attendance = Attendance(context, level, electorate, inbox)
        self._admission = Admission(context, office, inbox)
        self._calls = ClosingCalls(context.shared, electorate, level)
        self._window = ClosingWindow(context, level, inbox, self._attendance, self._calls)
        self._term = 0
        self._begins_at_s = math.inf
        """Time before which no round begins, though what is in could begin one."""
        self._first_in_s = 0.0
        self._due = False
        """True: it began with what was due."""
        self._asked_all = False
        """True: we leave, and have made our last call."""
        self._quorum_s = MovingAverage()
        self._sync_s = MovingAverage()

    # --- questions -----------------------------------------------------------------------------------

    @property
    def state(self) -> RoundState:
        """State of the round."""
        return self._machine.state

    @property
    def closing(self) -> bool:
        """True: a version is in the making, so it is not the moment to vote ourselves out of office."""
        return self._machine.state in MAKING

    @property
    def busy(self) -> bool:
        """True: `closing`, but not while our partial is with the syncer above, since nothing of that is lost
        with us."""
        return self.closing and (self._merger.makes_version or self.state is not RoundState.PUBLISHING)

    def words(self, now: float) -> str:
        """Say for people what the round waits for."""
        have = len(self.inbox.ready())
        if self.state is RoundState.COLLECTING:
            what = "groups" if self._level else "contributions"
            return f"waiting: {have} of {self._attendance.quorum(now)} {what}"
        if self.state is RoundState.CLOSING:
            expected = len(self._electorate.expected(now))
            what = "groups" if self._level else "learners"
            return f"closing: {have} of {expected} {what}, {self._window.words(now)}"
        if self.state is RoundState.PUBLISHING and not self._merger.makes_version:
            return "waiting: the syncer above has our partial"
        return self.state.name.lower()

    def deadline(self) -> float | None:
        """Find when to look again; None: nothing waits for a time."""
        state = self._machine.state
        if state is RoundState.CLOSING:
            return self._window.until_s
        if state is RoundState.COLLECTING:
            if self._begins_at_s < math.inf:
                return self._begins_at_s
            oldest = min((h.arrived_s for h in self.inbox.ready()), default=None)
            return None if oldest is None else oldest + self._attendance.patience_s(oldest)
        return None

    # --- admission -----------------------------------------------------------------------------------

    def _in_time(self) -> bool:
        return self.state in (RoundState.IDLE, RoundState.COLLECTING)

    def offered(self, transfer: int, sender: str, signed: SignedOffer, now: float) -> bool:
        """Answer a peer that wants to stream something to us. Tell whether it may."""
        held = self._admission.offered(transfer, sender, signed, self._in_time(), now)
        if held is None:
            return False
        if held.begins:
            self._collect(now)
            self.poll(now)
        return True

    def admit_own(self, signed: SignedOffer, ticket: Ticket, now: float) -> Verdict:
        """Take in what we made ourselves: no stream is needed. Call `arrived` if it was not in before."""
        refusal = self._admission.own(signed, ticket, self._in_time(), now)
        if refusal is not None:
            return refusal
        return Verdict.HELD if self.closing else Verdict.IN_ROUND

    def received(self, transfer: int, ticket: Ticket, now: float) -> None:
        """Take in the sound payload of an accepted transfer."""
        held = self._admission.received(transfer, ticket, now)
        if held is None:
            self._rest()
            return
        begins = self._in_time() and held.starts_round and not self._attendance.too_soon(now)
        waits = self.state is not RoundState.CLOSING and not begins
        verdict = Verdict.HELD if waits else Verdict.IN_ROUND
        self._shared.out.put(AnswerTransfer(transfer, self._fragment, verdict))
        self.arrived(held.child, now)

    def broken(self, transfer: int, verdict: Verdict) -> None:
        """Take in that an accepted transfer came to nothing: cut, or its payload was not sound."""
        if self._admission.broken(transfer, verdict):
            self._rest()

    def arrived(self, child: str, now: float) -> None:
        """Go on with one more that is in; after `admit_own`, once its sender knows that it is held."""
        self._collect(now)
        self._attendance.came(child)
        self._calls.answered(child, now)
        self.poll(now)

    def _rest(self) -> None:
        """Go back to idle if nothing is left of what was collected: the next to come is the first."""
        if self.state is RoundState.COLLECTING and not self.inbox.busy():
            self._machine.go(RoundSignal.ABANDON)

    def _collect(self, now: float) -> None:
        if self.state is RoundState.IDLE:
            self._first_in_s = now
            self._attendance.begin()
        self._machine.go(RoundSignal.CONTRIBUTION)

    def on_pass(self, sender: str, message: Pass, now: float) -> None:
        """Take in that a child has nothing to send this time."""
        child = self._electorate.child_of(sender, now)
        self._calls.answered(child, now, message.number)
        if self.state is RoundState.CLOSING and message.number == self._chain.head.number + 1:
            self._attendance.passes(child)
            self.poll(now)

    def own_pass(self, now: float) -> None:
        """Take in that our own learner has nothing to send this time."""
        self._calls.answered(self._shared.me, now)
        if self.state is RoundState.CLOSING:
            self._attendance.passes(self._shared.me)
            self.poll(now)

    # --- rounds --------------------------------------------------------------------------------------

    def poll(self, now: float) -> None:
        """Start closing at quorum, close when everybody is in or the grace window ends."""
        if not self._office.holding:
            return
        if self.state is RoundState.COLLECTING:
            self._try_quorum(now)
        if self.state is RoundState.CLOSING:
            self._window.gather()
        if self.state is RoundState.CLOSING and not (self._merger.makes_version and self._context.spare.busy):
            missing = self._attendance.missing(now)
            alone = self._merger.makes_version and self._calls.outruns(self._chain, self.inbox.ready(), now)
            if not alone and (not missing or self._window.over(missing, now)):
                self._close(now, missing)

    def _try_quorum(self, now: float) -> None:
        deferred, self._begins_at_s = self._begins_at_s < math.inf, math.inf
        ready = self.inbox.ready()
        coming = self.inbox.starting()
        here = len(ready) + len(coming)
        if not here:
            return
        oldest_s = min((held.arrived_s for held in ready), default=now)
        patient = now < oldest_s + self._attendance.patience_s(now)
        if here < self._attendance.quorum(now) and (patient or self._level == 0):
            return  # a group whose learners are all away sends nothing: in the end it is not waited for
        fresh = bool(coming) or any(held.starts_round for held in ready)
        if not fresh and self._attendance.missing(now) and patient and not self._shared.leaving:
            return
        if self._attendance.too_soon(now):
            self._begins_at_s = self._attendance.not_before_s(now)
            return
        self._due = fresh
        self._window.begin(self._attendance.quorum(now))
        if not deferred:
            self._quorum_s.add(now - self._first_in_s)
        self._machine.go(RoundSignal.QUORUM)
        self._calls.end_last(now)
        grace_s = self._calls.grace_s(self._quorum_s.value, self._sync_s.value, now)
        self._call(f"quorum {here}", grace_s, now)

    def on_called(self, sender: str, call: Closing, now: float) -> None:
        """Close our round in good time: the syncer above closes its own."""
        if call.number != self._chain.head.number + 1 or not self._office.holding:
            self._pass_to(sender, call, now)
            return
        if self.state in (RoundState.IDLE, RoundState.COLLECTING):
            self._due = False
            window_s = self._window.called(sender, call)
            self._machine.go(RoundSignal.CALLED)
            self._calls.end_last(now)
            self._call("called from above", window_s, now)
            self.poll(now)
        elif self.state is RoundState.CLOSING:
            self._window.shorten(now + self._window.called(sender, call))
        elif self.state is RoundState.PUBLISHING:
            self._merger.hurry(now)

    def last_call(self, now: float) -> bool:
        """Ask everybody, once, for what there is, if we leave and no other would be syncer after us. Tell
        whether there is anything to wait for."""
        last = self._merger.makes_version and not self._level and self._office.holding
        if not last or self.closing or self._electorate.willing(now):
            return False
        others = [peer for peer in self._electorate.expected(now) if peer != self._shared.me]
        if self._asked_all or not others:
            return self.inbox.busy()
        self._asked_all, self._due = True, False
        self._machine.go(RoundSignal.CALLED)
        self._calls.end_last(now)
        self._call("we leave, nobody else stands", max(0.0, self._shared.gather_until_s - now), now)
        self.poll(now)
        return True

    def _pass_to(self, peer: str, call: Closing, now: float) -> None:
        self._hierarchy.pass_up(peer, Pass(call.group, call.fragment, call.term, call.number), now)

    def _call(self, reason: str, grace_s: float, now: float) -> None:
        """Ask those that are missing for what they have."""
        shared, number = self._shared, self._chain.head.number + 1
        self._attendance.begin()
        missing = self._attendance.missing(now)
        self._window.open(grace_s, now)
        self._calls.called(missing, number, now)
        called = [child for child in missing if not self.inbox.has(child)]
        words = f"{reason}, {len(called)} called"
        shared.out.record("closing", self._fragment, words, number=number, grace_s=grace_s)
        call = Closing(self._group, self._fragment, self._office.term, number, grace_s)
        for child in called:
            peer = self._electorate.peer_of(child, now)
            if peer == shared.me:
                self._hierarchy.call_own(self._level, call, now)
            elif peer:
                shared.out.send(peer, call)

    def _close(self, now: float, missing: list[str]) -> None:
        held = tuple(self.inbox.ready())
        short = self._window.short(len(held), now)
        called = self._window.take_caller()
        self._attendance.begin()
        if not held or short:
            self._machine.go(RoundSignal.EMPTY)
            self.inbox.none_begins()
            if called is not None:
                self._pass_to(*called, now)
            elif held:
                self._collect(now)  # they wait for company
            return
        self._machine.go(RoundSignal.CLOSE)
        self._attendance.closed_without(missing)
        self._term = self._office.term
        self._hand_over(held, len(missing), now)

    def _hand_over(self, held: tuple[Held, ...], missing: int, now: float) -> None:
        self._merging = held
        if not held:
            self._machine.go(RoundSignal.ABANDON)
            self.poll_rest(now)
            return
        # A child whose heartbeat has not been heard yet is alive all the same.
        expected = len({*self._electorate.expected(now), *(h.child for h in held)})
        due = self._due or any(h.starts_round for h in held)
        job = Job(self, self._group, self._term, self._chain.head.number + 1, held, due, now)
        self._merger.begin(job, missing, expected)

    # --- what becomes of it --------------------------------------------------------------------------

    def awaits(self, term: int, number: int) -> bool:
        """Tell whether this merge is still wanted."""
        right = self.state is RoundState.MERGING and term == self._term
        return right and number == self._chain.head.number + 1

    def merge_done(self) -> None:
        """Note that the merge worker is done."""
        self._machine.go(RoundSignal.MERGED)

    def published(self, sync_s: float | None) -> None:
        """Note that what was merged is in the chain, or that the chain went on without it. `poll_rest` starts
        the next."""
        self._machine.go(RoundSignal.PUBLISHED)
        self._office.served()
        if sync_s is not None:
            self._sync_s.add(sync_s)
            for held in self._merging:
                self.inbox.drop(held)
        self._merging = ()
        if self._office.holding:
            self.inbox.drop_overlapping()
        else:
            self._empty_inbox()
        self.inbox.all_late()

    def poll_rest(self, now: float) -> None:
        """Start the next collection with what came too late."""
        if self._office.holding and self.inbox.ready() and self._machine.may(RoundSignal.CONTRIBUTION):
            self._collect(now)
            self.poll(now)

    def failed(self, reason: str, now: float, unusable: Unusable = ()) -> None:
        """Merge what is left without the unusable. Lay the office down, for another member to try, where
        nothing could be merged for reasons of ours, or it could not be kept."""
        if self._admission.unusable(self._merging, unusable):
            ready = self.inbox.ready()  # what was taken back meanwhile is not
            left = tuple(held for held in self._merging if held in ready)
            self._hand_over(left, len(self._merging) - len(left), now)
            return
        self._machine.go(RoundSignal.FAILED)
        self._empty_inbox()
        self._office.failed(reason, now)

    def abandon(self, reason: str, now: float) -> None:
        """Drop the round: we are no longer the syncer, and what is in is sent again elsewhere."""
        if self.state is RoundState.PUBLISHING and self._merger.withdraw(now):
            self._machine.go(RoundSignal.FAILED)
            self._empty_inbox()
        elif self._machine.may(RoundSignal.ABANDON):
            if self.state is not RoundState.IDLE:
                self._shared.out.record("round", self._fragment, f"abandoned: {reason}")
            self._machine.go(RoundSignal.ABANDON)
            self._merger.withdraw(now)
            self._empty_inbox()

    def chain_moved(self, now: float) -> None:
        """Take in a version that is not ours while we hold the office: what it did not merge stays in."""
        self.inbox.none_begins()
        if self._merger.makes_version or self.state is not RoundState.PUBLISHING:
            if not self._machine.may(RoundSignal.ABANDON):
                return
            self._machine.go(RoundSignal.ABANDON)
            self._merging = ()
            self.inbox.drop_overlapping()
        else:
            self.published(None)
        self._window.take_caller()
        self._merger.chain_moved(now)
        self.poll_rest(now)

    def _empty_inbox(self) -> None:
        self._merging = ()
        self._window.take_caller()
        self._calls.forget()
        self.inbox.clear()
