"""Round of a syncer in one group: what it collects, when it closes, and for whom it waits.

Rules: docs/protocol/rounds.md, sections 2, 3 and 4; docs/protocol/groups.md, section 5.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import Enum, auto

from p2pdiloco.core.api.events import AnswerTransfer
from p2pdiloco.core.api.messages import Closing, Pass
from p2pdiloco.core.api.reasons import Verdict
from p2pdiloco.core.api.types import Head, Ticket
from p2pdiloco.core.api.versions import SignedOffer
from p2pdiloco.core.base import (
    RHYTHM_SHARE,
    WAITED_INTERVALS,
    WAITED_SHARE,
    Shared,
    answer_bound_s,
    grace_window_s,
    patience_s,
)
from p2pdiloco.core.chain import Chain
from p2pdiloco.core.context import Electorate, FragmentContext
from p2pdiloco.core.distrust import Cause, Distrust
from p2pdiloco.core.election import Office
from p2pdiloco.core.inbox import Admission, Held, Inbox, Unusable
from p2pdiloco.core.publisher import Hierarchy, Job, Merger
from p2pdiloco.util import BoundedDict, Machine, MovingAverage, direct_members


@direct_members
class RoundState(Enum):
    """States of a round.

    - IDLE: nothing usable in the inbox
    - COLLECTING: offers are in or on their way, quorum is not
    - CLOSING: quorum is complete, or the group above called: the grace window runs
    - MERGING: the tensors thread has the inputs
    - PUBLISHING: the version is being made durable, or the partial is with the syncer above
    """

    IDLE = auto()
    COLLECTING = auto()
    CLOSING = auto()
    MERGING = auto()
    PUBLISHING = auto()


@direct_members
class RoundSignal(Enum):
    """Causes for a round's state to change."""

    CONTRIBUTION = auto()
    QUORUM = auto()
    CALLED = auto()
    CLOSE = auto()
    EMPTY = auto()
    MERGED = auto()
    FAILED = auto()
    PUBLISHED = auto()
    ABANDON = auto()


_R, _S = RoundState, RoundSignal
MAKING = (_R.CLOSING, _R.MERGING, _R.PUBLISHING)
"""States in which a version is in the making."""
ROUND_TABLE = {
    (_R.IDLE, _S.CONTRIBUTION): _R.COLLECTING,
    (_R.IDLE, _S.CALLED): _R.CLOSING,
    (_R.COLLECTING, _S.CONTRIBUTION): _R.COLLECTING,
    (_R.COLLECTING, _S.QUORUM): _R.CLOSING,
    (_R.COLLECTING, _S.CALLED): _R.CLOSING,
    (_R.CLOSING, _S.CONTRIBUTION): _R.CLOSING,
    (_R.CLOSING, _S.CLOSE): _R.MERGING,
    (_R.CLOSING, _S.EMPTY): _R.IDLE,
    (_R.MERGING, _S.CONTRIBUTION): _R.MERGING,
    (_R.MERGING, _S.MERGED): _R.PUBLISHING,
    (_R.MERGING, _S.FAILED): _R.IDLE,
    (_R.PUBLISHING, _S.CONTRIBUTION): _R.PUBLISHING,
    (_R.PUBLISHING, _S.PUBLISHED): _R.IDLE,
    (_R.PUBLISHING, _S.FAILED): _R.IDLE,
    (_R.IDLE, _S.ABANDON): _R.IDLE,
    (_R.COLLECTING, _S.ABANDON): _R.IDLE,
    (_R.CLOSING, _S.ABANDON): _R.IDLE,
    (_R.MERGING, _S.ABANDON): _R.IDLE,
}


class Round:
    """Rounds of one group while this node is its syncer: collecting, closing, and handing over to be merged.

    The syncer keeps an inbox of at most one offer per child: contributions of learners in a leaf group,
    partial merges of groups higher up (docs/protocol/rounds.md, section 2; docs/protocol/groups.md, section
    5). A round starts when K offers are in or, of learners, on their way, and at least one of them arrived
    for this round. (There need never be more than there are live children.) What arrived too late for a round
    waits for company in the next, so that slow links delay no other and still take part every time. At quorum
    the syncer calls the others ("closing"): each sends what it has, or passes; a group that is called closes
    its own round. The round closes when all live children have answered, or when the grace window ends. If no
    majority of the learners is in by then, it waits on for payloads that are on their way.

    What is in is then merged: by the syncer of the topmost group into the next version
    (`Publisher`), by all others into a partial for the group above (`Delegate`).
    """

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
        self._attendance.came(child, now)
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
            self._attendance.passes(child, now)
            self.poll(now)

    def own_pass(self, now: float) -> None:
        """Take in that our own learner has nothing to send this time."""
        self._calls.answered(self._shared.me, now)
        if self.state is RoundState.CLOSING:
            self._attendance.passes(self._shared.me, now)
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
        if not self._has_seat([*ready, *coming]):
            entering = frozenset() if self._context.grouped else self._context.roster.entering
            if any(part.learner in entering for held in ready for part in held.parts):
                self._office.lay_down("those who are to have a seat wait for a term to begin")
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

    def _has_seat(self, held: Iterable[Held]) -> bool:
        """Tell whether a seat's work is among these: without any there is no merge."""
        seats, begins = self._chain.marks.seats, self._office.term > self._chain.header.term
        if begins and not self._context.grouped:
            seats = seats | self._context.roster.entering
        return any(part.learner in seats for each in held for part in each.parts)

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
        grace_s = max(0.0, self._shared.gather_until_s - now)
        self._call("we leave, nobody else stands", grace_s, now, everybody=True)
        self.poll(now)
        return True

    def _pass_to(self, peer: str, call: Closing, now: float) -> None:
        self._hierarchy.pass_up(peer, Pass(call.group, call.fragment, call.term, call.number), now)

    def _call(self, reason: str, grace_s: float, now: float, everybody: bool = False) -> None:
        shared, number = self._shared, self._chain.head.number + 1
        self._attendance.begin(everybody)
        missing = self._attendance.missing(now, called=True)
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
        short = self._window.short(len(held), now) or not self._has_seat(held)
        called, silent = self._window.take_caller(), self._attendance.missing(now, called=True)
        self._attendance.begin()
        if not held or short:
            self._machine.go(RoundSignal.EMPTY)
            self.inbox.none_begins()
            if called is not None:
                peer, call = called
                self._pass_to(peer, call, now)
            elif held:
                self._collect(now)  # they wait for company
            return
        self._machine.go(RoundSignal.CLOSE)
        self._attendance.closed_without(silent, now)
        self._term = self._office.term
        self._hand_over(held, len(missing), now)

    def _hand_over(self, held: tuple[Held, ...], missing: int, now: float) -> None:
        self._merging = held
        if not held or (not self._level and not self._has_seat(held)):
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


class Attendance:
    """Children of one group, as its syncer counts them: which are missing, and whether a round may begin."""

    def __init__(self, context: FragmentContext, level: int, electorate: Electorate, inbox: Inbox) -> None:
        self._context = context
        self._shared = context.shared
        self._level = level
        self._electorate = electorate
        self._inbox = inbox
        self._passed: set[str] = set()
        """Children that have nothing to send this time."""
        self._everybody = False
        self._absent = Distrust()

    def begin(self, everybody: bool = False) -> None:
        """Count anew, for another round. `everybody`: it waits for all that say that they learn."""
        self._passed.clear()
        self._everybody = everybody

    def passes(self, child: str, now: float) -> None:
        """Note that a child has nothing to send this time. If nothing of it was merged lately, that does not
        say that it ever will."""
        self._passed.add(child)
        if self._context.roster.attends(child):
            self._absent.forgive(child, Cause.ABSENT, now)

    def came(self, child: str, now: float) -> None:
        """Note that a child has sent something after all."""
        self._passed.discard(child)
        self._absent.forgive(child, Cause.ABSENT, now)

    def closed_without(self, missing: Iterable[str], now: float) -> None:
        """Note whom a round called in vain. No round waits for a learner that is silent time and again. It is
        called all the same, if it was merged lately: slower than the versions, it is due by calls only."""
        for child in () if self._level else missing:
            self._absent.add(child, Cause.ABSENT, now)

    def quorum(self, now: float) -> int:
        """Offers with which a round may begin."""
        return max(1, min(self._shared.config.quorum, self._electorate.reachable(now)))

    def patience_s(self, now: float) -> float:
        """Seconds for which a first offer waits for company: an interval of learners."""
        step_s = self._shared.median_step_s(now)
        return max(self._shared.timing.hold_floor_s, self._shared.config.inner_steps * step_s)

    def missing(self, now: float, called: bool = False) -> list[str]:
        """Children that are waited for, are not in and have not passed. `called`: also those who are called,
        and for whom nobody waits."""
        have = {held.child for held in self._inbox.ready()} | self._passed
        coming = [
            held.child for held in self._inbox.starting()
        ]  # also whose heartbeats its upload keeps back
        wanted = self._inbox.in_turn if called or self._everybody else self._inbox.awaits
        attends = self._context.roster.attends
        expected = [
            child
            for child in self._electorate.expected(now)
            if wanted(child, now)
            and (not self._absent.has(child, now, Cause.ABSENT) or (called and attends(child)))
        ]
        return [child for child in dict.fromkeys([*expected, *coming]) if child not in have]

    def not_before_s(self, now: float) -> float:
        """Compute the time before which no round begins that a child is missing in.

        A learner whose work came too late for a version is due again as soon as it is told. A round of its
        own then, in which the others have a step or two, would move all by a whole outer step for the sake of
        one: it waits until there is more to merge. Only a syncer that leaves cannot wait.
        """
        if self._level or self._shared.leaving:
            return -math.inf
        interval_s = self._shared.config.inner_steps * self._shared.fastest_step_s(now)
        return self._context.moved_s + RHYTHM_SHARE * interval_s

    def too_soon(self, now: float) -> bool:
        """Tell whether a round has to wait for company, or for that time."""
        return now < self.not_before_s(now) and bool(self.missing(now))


class ClosingCalls:
    """Closing calls of one group's syncer: whose answer is still out, and how long answers take.

    Answers count also when the round went on without them: only so does a window that was too short for any
    learn that it was.
    """

    def __init__(self, shared: Shared, electorate: Electorate, level: int) -> None:
        self._shared = shared
        self._electorate = electorate
        self._level = level
        self._answer_time = shared.answer_time(level)
        self._laggards = Laggards(shared)
        self._out: set[str] = set()
        self._sent_s = 0.0
        self._number = 0

    def called(self, children: Iterable[str], number: int, now: float) -> None:
        """Note that these are asked for what they have, for version `number`."""
        self._out, self._sent_s, self._number = set(children), now, number

    def answered(self, child: str, now: float, number: int | None = None) -> None:
        """Note that a contribution (or a pass, which names the `number`) of that child is here, in time or
        not."""
        if child in self._out and number in (None, self._number):
            self._out.discard(child)
            if not self._out:
                self._add(now)

    def end_last(self, now: float) -> None:
        """End the last call, as the next is about to go out: a live child that has not answered takes at
        least so long."""
        if self._out & set(self._electorate.expected(now)):
            self._add(now)
        self.forget()

    def forget(self) -> None:
        """Forget the call: we are no longer the syncer, and answers go elsewhere."""
        self._out = set()

    def grace_s(self, quorum_s: float, sync_s: float, now: float) -> float:
        """Compute the grace window of a round that reached its quorum now (`grace_window_s`).

        Above the leaves it is as long as may be. Whoever is missing there is a whole group, whose own window
        may have begun later, and no sum of answer times seen so far says how much later.
        """
        shared, config = self._shared, self._shared.config
        step_s = shared.median_step_s(now)
        answer_s = math.inf if self._level else self._answer_time.expected_s
        return grace_window_s(
            config.delay_steps,
            step_s,
            quorum_s,
            sync_s,
            config.grace_fraction,
            config.grace_cap_s,
            min(answer_s, self._bound_s(now)),
        )

    def arrivals_until_s(self, closes_at_s: float, ready: Iterable[Held], now: float) -> float:
        """Compute how long a round whose window ended then waits for payloads that are on their way: some
        sync intervals, and no longer than those whose contributions are in are patient with us."""
        shared, config = self._shared, self._shared.config
        step_s = shared.median_step_s(now)
        until_s = closes_at_s + WAITED_INTERVALS * config.inner_steps * step_s
        for held in ready:
            if not held.own:
                took_s, floor_s = held.ready_s - held.arrived_s, shared.timing.answer_floor_s
                patient_s = patience_s(floor_s, took_s, config.delay_steps, step_s)
                until_s = min(until_s, held.ready_s + WAITED_SHARE * patient_s)
        return until_s

    def outruns(self, chain: Chain, ready: Iterable[Held], now: float) -> bool:
        """Tell whether we would merge while none of the others here has our last version.

        Versions made faster than they travel keep newcomers out, and leave all others in this round, with
        work against an older one, behind. For some sync intervals only. Members that leave are not waited
        for; a syncer that leaves does not wait.
        """
        shared, view = self._shared, self._shared.view
        if shared.leaving:
            return False
        head = chain.head.number
        if any(not held.own and held.based_on >= head for held in ready):
            return False
        stay = [peer for peer in self._electorate.live(now) if (p := view.progress(peer)) and p.stands]
        heads = {peer: view.head(peer, chain.header.fragment) for peer in stay}
        if any(named is not None and named.number >= head for named in heads.values()):
            return False
        if not any([self._laggards.waits_for(peer, named, chain, now) for peer, named in heads.items()]):
            return False
        wait_s = WAITED_INTERVALS * shared.config.inner_steps * shared.median_step_s(now)
        return now < max((held.arrived_s for held in ready), default=self._sent_s) + wait_s

    def _add(self, now: float) -> None:
        self._answer_time.add(min(now - self._sent_s, self._bound_s(now)))

    def _bound_s(self, now: float) -> float:
        """Compute the most that answers may take (`answer_bound_s`). Before any learner has said how
        long its inner steps are it is not nothing: a run's first versions would be made of whoever came
        first."""
        step_s = self._shared.median_step_s(now)
        if step_s <= 0:
            return self._shared.timing.answer_floor_s
        return answer_bound_s(self._shared.config.inner_steps, step_s)


class ClosingWindow:
    """Window of one group's closing round: until when it is open for what the others were called for."""

    def __init__(
        self,
        context: FragmentContext,
        level: int,
        inbox: Inbox,
        attendance: Attendance,
        calls: ClosingCalls,
    ) -> None:
        self._shared = context.shared
        self._fragment = context.index
        self._chain = context.chain
        self._level = level
        self._inbox = inbox
        self._attendance = attendance
        self._calls = calls
        self.until_s = 0.0
        """Time at which it ends."""
        self._waits = False
        """True: it is over, but payloads are on their way."""
        self._needs = 1
        """Quorum when the round began."""
        self._called_by: tuple[str, Closing] | None = None

    @property
    def _own(self) -> bool:
        """True: a round of learners that began by itself, not called from above."""
        return not self._level and self._called_by is None

    def words(self, now: float) -> str:
        """Say for people what keeps it open."""
        left_s = max(0.0, self.until_s - now)
        return "others are on their way" if self._waits else f"grace ends in {left_s:.1f} s"

    def begin(self, needs: int) -> None:
        """Note with which quorum a round begins."""
        self._needs = needs

    def open(self, grace_s: float, now: float) -> None:
        """Open it for that long."""
        self.until_s = now + grace_s
        self._waits = False

    def called(self, sender: str, call: Closing) -> float:
        """Take in that the syncer above closes its own round. Compute how long ours may be open then."""
        self._called_by = (sender, call)
        cap_s = self._shared.config.grace_cap_s
        closes_in_s = call.closes_in_s if 0.0 <= call.closes_in_s <= cap_s else cap_s
        return WAITED_SHARE * closes_in_s

    def shorten(self, until_s: float) -> None:
        """End it at that time, unless it ends before."""
        self.until_s = min(self.until_s, until_s)

    def gather(self) -> None:
        """Keep it open while we listen for who else is there."""
        if self._own:
            self.until_s = max(self.until_s, self._shared.gather_until_s)

    def take_caller(self) -> tuple[str, Closing] | None:
        """Forget by whom the round was called. Returns (peer, its call), or None."""
        caller, self._called_by = self._called_by, None
        return caller

    def over(self, missing: list[str], now: float) -> bool:
        """Tell whether the round is to close without these."""
        return now >= self.until_s and not self._waits_on(missing, now)

    def _waits_on(self, missing: list[str], now: float) -> bool:
        """Tell whether a round whose window is over waits for payloads that are on their way.

        On thin links the syncer would else merge alone time and again, and all that the others send would
        come too late. It waits only while no majority is in, so that a few slow links hold no other up. Nor
        does it wait longer than those that are in are patient with us. Inner steps wait for nothing; streams
        that stand still are cut.
        """
        shared, ready = self._shared, self._inbox.ready()
        arriving = [child for child in missing if self._inbox.has(child)]
        enough = len(ready) > len(missing) and not self.short(len(ready), now)
        if not self._own or shared.leaving or not arriving or enough:
            return False
        until_s = self._calls.arrivals_until_s(self.until_s, ready, now)
        if now < until_s and not self._waits:
            self._waits = True
            reason = f"{len(ready)} in, waits for {len(arriving)} on their way"
            number = self._chain.head.number + 1
            shared.out.record("closing", self._fragment, reason, number=number, grace_s=until_s - now)
        return now < until_s

    def short(self, ready: int, now: float) -> bool:
        """Tell whether what the round was begun for did not come: fewer are in than the quorum."""
        bound = self._own and not self._shared.leaving
        return bound and ready < min(self._needs, self._attendance.quorum(now))


class Laggards:
    """Members for which a syncer that would merge alone lets the next version wait.

    They have not said that they hold our last version, and may not want it. Without a bound one of them would
    slow a lone node as much as it can: so it waits for none that has come no further in three versions, nor
    in more than three for one without a seat.
    """

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._absent = Distrust()
        self._seen: BoundedDict[str, tuple[int, int]] = BoundedDict()
        """Of each member its version and ours, as of the last look."""

    def waits_for(self, peer: str, named: Head | None, chain: Chain, now: float) -> bool:
        """Tell whether the version after the chain's head waits for that peer, which named this head."""
        if named is not None and chain.contradicts(named):
            return False  # on another branch it waits for no version of ours
        ours = chain.head.number
        at, looked = self._seen.get(peer, (-1, ours))
        moved = named is not None and at < named.number <= ours  # below our log: what it copied, perhaps
        if moved and self._shared.has_seat(peer):
            self._absent.forgive(peer, Cause.ABSENT, now)
        elif looked != ours:
            self._absent.add(peer, Cause.ABSENT, now)
        self._seen[peer] = named.number if named and moved else at, ours
        return not self._absent.has(peer, now, Cause.ABSENT)
