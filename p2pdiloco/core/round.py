"""The syncer's side of one fragment: collecting contributions and making versions (design 5.2).

Theory of operation
-------------------
The syncer keeps an inbox of at most one contribution per learner. A round starts when K contributions
are in (never more than there are live learners) and at least one of them arrived for this round; what
arrived too late for a round waits for company in the next, so that slow links delay nobody and still
take part every time. At quorum the syncer calls the others ("closing"): each sends what it has, or
passes. The round closes when all live learners have answered, or when the grace window ends.

Merging happens elsewhere; its completion is stamped and dropped if the chain or the office moved on.
The new version is durable here before anybody hears of it.

    IDLE        nothing usable in the inbox
    COLLECTING  contributions are in, quorum is not
    CLOSING     quorum is complete, the grace window runs
    MERGING     the merge worker has the inputs
    PUBLISHING  the version is being made durable
"""

from __future__ import annotations

from enum import Enum, auto

from p2pdiloco.core.calls import Calls
from p2pdiloco.core.chain import Chain
from p2pdiloco.core.contributor import Contributor, Pending
from p2pdiloco.core.effects import (
    AcceptTransfer,
    AnswerTransfer,
    CommitVersion,
    DropSpare,
    Effect,
    Merge,
    MergeInput,
    RefuseTransfer,
    Release,
    RequestFragment,
    Send,
    UpdateRecord,
)
from p2pdiloco.core.events import Merged, MergeFailed
from p2pdiloco.core.inbox import Held, Inbox, Spare
from p2pdiloco.core.machine import Machine
from p2pdiloco.core.messages import Announce, Closing, Pass
from p2pdiloco.core.office import Office
from p2pdiloco.core.shared import Shared
from p2pdiloco.core.timing import Ema
from p2pdiloco.core.types import (
    ContributionHeader,
    SignedContribution,
    SignedVersion,
    Ticket,
    VersionHeader,
)
from p2pdiloco.core.types import Contributor as Part


class RoundState(Enum):
    """Where the round is."""

    IDLE = auto()
    COLLECTING = auto()
    CLOSING = auto()
    MERGING = auto()
    PUBLISHING = auto()


class RoundSignal(Enum):
    """What moves it."""

    CONTRIBUTION = auto()
    QUORUM = auto()
    CLOSE = auto()
    MERGED = auto()
    FAILED = auto()
    PUBLISHED = auto()
    ABANDON = auto()


_R, _S = RoundState, RoundSignal
ROUND_TABLE = {
    (_R.IDLE, _S.CONTRIBUTION): _R.COLLECTING,
    (_R.COLLECTING, _S.CONTRIBUTION): _R.COLLECTING,
    (_R.COLLECTING, _S.QUORUM): _R.CLOSING,
    (_R.CLOSING, _S.CONTRIBUTION): _R.CLOSING,
    (_R.CLOSING, _S.CLOSE): _R.MERGING,
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
    """The rounds of one fragment while this node is its syncer."""

    def __init__(
        self,
        shared: Shared,
        group: str,
        fragment: int,
        chain: Chain,
        office: Office,
        own: Contributor,
        spare: Spare,
    ) -> None:
        self._shared = shared
        self._group = group
        self._fragment = fragment
        self._chain = chain
        self._office = office
        self._own = own
        self._machine = Machine(ROUND_TABLE, RoundState.IDLE)
        self._inbox = Inbox(shared, fragment, chain)
        self._merging: list[Held] = []
        self._passed: set[str] = set()
        self._calls = Calls(shared)
        self._term = 0
        self._closes_at_s = 0.0
        self._closing_since_s = 0.0
        self._first_in_s = 0.0
        self._quorum_s = Ema()
        self._sync_s = Ema()
        self._spare = spare

    # --- questions -----------------------------------------------------------------------------------

    @property
    def state(self) -> RoundState:
        """Where the round is."""
        return self._machine.state

    @property
    def closing(self) -> bool:
        """A version is in the making: not the moment to vote ourselves out of office."""
        return self.state in (RoundState.CLOSING, RoundState.MERGING, RoundState.PUBLISHING)

    def words(self, now: float) -> str:
        """For people: what the round waits for."""
        have = len(self._inbox.ready())
        if self.state is RoundState.COLLECTING:
            return f"waiting: {have} of {self._quorum(now)} contributions"
        if self.state is RoundState.CLOSING:
            expected = len(self._shared.expected_learners(now))
            left_s = max(0.0, self._closes_at_s - now)
            return f"closing: {have} of {expected} learners, grace ends in {left_s:.1f} s"
        return self.state.name.lower()

    def deadline(self) -> float | None:
        """When to look again."""
        if self.state is RoundState.CLOSING:
            return self._closes_at_s
        if self.state is RoundState.COLLECTING:
            oldest = min((h.arrived_s for h in self._inbox.ready()), default=None)
            return None if oldest is None else oldest + self._hold_s(oldest)
        return None

    def _quorum(self, now: float) -> int:
        return max(1, min(self._shared.config.quorum, len(self._shared.expected_learners(now))))

    def _hold_s(self, now: float) -> float:
        step_s = self._shared.median_step_s(now)
        return max(self._shared.timing.hold_floor_s, self._shared.config.inner_steps * step_s)

    # --- admission -----------------------------------------------------------------------------------

    def offered(self, transfer: int, sender: str, signed: SignedContribution, now: float) -> str:
        """A peer wants to stream a contribution. Returns the refusal reason, empty if accepted."""
        header = signed.header
        reason, counted = self._inbox.judge(signed, sender, self._office.holding)
        if reason:
            self._shared.out.put(RefuseTransfer(transfer, self._fragment, reason, counted))
            if counted:
                self._shared.out.record("refusal", self._fragment, reason, peer=sender)
            return reason
        self._inbox.add(header, transfer, self._in_time(header), now)
        self._shared.out.put(AcceptTransfer(transfer, self._fragment, header.payload_bytes))
        return ""

    def offer_own(self, pending: Pending, now: float) -> None:
        """Our own contribution needs no stream."""
        me = self._shared.me
        signed = self._own.offer(pending, me, now)
        reason, _ = self._inbox.judge(signed, me, self._office.holding)
        if reason:
            self._own.refused(pending, reason, now)
            return
        held = self._inbox.add(signed.header, 0, self._in_time(signed.header), now)
        held.ticket = pending.ready.ticket
        held.own = True
        self._own.accepted(pending, self.closing, now)
        self._arrived(held, now)

    def _in_time(self, header: ContributionHeader) -> bool:
        in_time = self.state in (RoundState.IDLE, RoundState.COLLECTING)
        return header.due and in_time and header.base_number == self._chain.head.number

    def received(self, transfer: int, ticket: Ticket, now: float) -> None:
        """The payload of an accepted transfer is sound."""
        held = self._inbox.arriving(transfer)
        out = self._shared.out
        if held is None or not self._office.holding:
            out.put(AnswerTransfer(transfer, self._fragment, False, "not-syncer"))
            out.put(Release(ticket))
            return
        if self._chain.watermark(held.header.learner) != held.header.after:
            # The chain changed while the payload was under way: it may contain this work already.
            out.put(AnswerTransfer(transfer, self._fragment, False, "chain-moved"))
            out.put(Release(ticket))
            self._inbox.drop(held)
            return
        held.ticket = ticket
        waits = self.state in (_R.MERGING, _R.PUBLISHING) or not held.starts_round
        out.put(AnswerTransfer(transfer, self._fragment, True, "held" if waits else "in round"))
        self._arrived(held, now)

    def broken(self, transfer: int, reason: str) -> None:
        """An accepted transfer came to nothing: cut, or its payload was not sound."""
        held = self._inbox.arriving(transfer)
        if held is None:
            return
        self._inbox.drop(held)
        if reason != "cut":
            self._shared.out.record("refusal", self._fragment, reason, peer=held.header.learner)

    def _arrived(self, held: Held, now: float) -> None:
        if self.state is RoundState.IDLE:
            self._first_in_s = now
        self._machine.go(RoundSignal.CONTRIBUTION)
        self._passed.discard(held.header.learner)
        self._calls.answered(held.header.learner, now)
        self.poll(now)

    def on_pass(self, sender: str, message: Pass, now: float) -> None:
        """A member has nothing to send this time."""
        self._calls.answered(sender, now, message.number)
        if self.state is RoundState.CLOSING and message.number == self._chain.head.number + 1:
            self._passed.add(sender)
            self.poll(now)

    def own_pass(self, now: float) -> None:
        """Our own learner has nothing to send this time."""
        self._calls.answered(self._shared.me, now)
        if self.state is RoundState.CLOSING:
            self._passed.add(self._shared.me)
            self.poll(now)

    # --- rounds --------------------------------------------------------------------------------------

    def poll(self, now: float) -> None:
        """Start closing at quorum, close when everybody is in or the grace window ends."""
        if not self._office.holding:
            return
        if self.state is RoundState.COLLECTING:
            self._try_quorum(now)
        if self.state is RoundState.CLOSING and not self._spare.busy:
            missing = self._missing(now)
            if not missing or now >= self._closes_at_s:
                self._close(now, missing)

    def _missing(self, now: float) -> list[str]:
        have = {held.header.learner for held in self._inbox.ready()} | self._passed
        return [peer for peer in self._shared.expected_learners(now) if peer not in have]

    def _try_quorum(self, now: float) -> None:
        ready = self._inbox.ready()
        if len(ready) < self._quorum(now):
            return
        number = self._chain.head.number + 1
        fresh = any(held.starts_round for held in ready)
        waits_until_s = min(held.arrived_s for held in ready) + self._hold_s(now)
        if not fresh and self._missing(now) and now < waits_until_s:
            return
        shared = self._shared
        self._quorum_s.add(now - self._first_in_s)
        self._machine.go(RoundSignal.QUORUM)
        self._passed = set()
        missing = self._missing(now)
        self._calls.give_up(now)
        grace = self._calls.grace_s(self._quorum_s.value, self._sync_s.value, now)
        self._closes_at_s = now + grace
        self._calls.called(missing, number, now)
        shared.out.record(
            "closing",
            self._fragment,
            f"quorum {len(ready)}, {len(missing)} called",
            number=number,
            grace_s=grace,
        )
        call = Closing(self._group, self._fragment, self._office.term, number, grace)
        for peer in missing:
            if peer == shared.me:
                shared.out.put(RequestFragment(self._fragment))
            elif not self._inbox.has(peer):
                shared.out.send(peer, call)

    def _close(self, now: float, missing: list[str]) -> None:
        self._machine.go(RoundSignal.CLOSE)
        self._merging = self._inbox.ready()
        self._term = self._office.term
        self._closing_since_s = now
        self._spare.busy = True
        inputs = tuple(MergeInput(part_of(h.header), h.ticket) for h in self._merging if h.ticket is not None)
        number = self._chain.head.number + 1
        # A contributor whose heartbeat has not been heard yet is alive all the same.
        live = {*self._shared.expected_learners(now), *(i.contributor.learner for i in inputs)}
        expected = len(live)
        reason = f"{len(inputs)} of {expected} live learners"
        if missing:
            reason += ", grace is over"
        self._shared.out.record(
            "merge",
            self._fragment,
            reason,
            number=number,
            contributors=len(inputs),
            live=expected,
            tokens=sum(i.contributor.tokens for i in inputs),
        )
        self._shared.out.put(Merge(self._fragment, self._term, number, inputs))

    def merged(self, event: Merged, now: float) -> None:
        """The merge worker is done: sign the version, make it durable, then let it be known."""
        if not self._is_current(event.term, event.number):
            self._spare.busy = False
            self._shared.out.put(DropSpare(self._fragment))
            self._shared.out.put(Release(event.ticket))
            self._shared.out.record("merge", self._fragment, "stale: the world moved on", number=event.number)
            return
        self._machine.go(RoundSignal.MERGED)
        parts = tuple(part_of(held.header) for held in self._merging)
        config, head = self._shared.config, self._chain.head
        header = VersionHeader(
            run=config.run,
            group=self._group,
            fragment=self._fragment,
            number=event.number,
            parent=head.digest,
            term=event.term,
            syncer=self._shared.me,
            tokens=head.tokens + sum(part.tokens for part in parts),
            state_digest=event.state_digest,
            update_digest=event.update_digest,
            update_bytes=event.update_bytes,
            codec=config.update_codec,
            contributors=parts,
        )
        version = SignedVersion(header, self._shared.sign("version", header))
        token = self._shared.out.persist(
            UpdateRecord(version, event.ticket), self._continuation(version, event.ticket, now)
        )
        self._shared.on_persisted[token] = lambda t: self._published(version, t)
        self._shared.on_persist_failed[token] = lambda t, why: self._not_published(event, t, why)

    def _continuation(self, version: SignedVersion, update: Ticket, now: float) -> tuple[Effect, ...]:
        """What may happen once the version is durable: it becomes ours, and everybody may know."""
        announce = Announce(version)
        sends = tuple(Send(peer, announce) for peer in self._shared.view.members(now))
        return (commit_effect(self._shared, self._chain, self._own, version, update), *sends)

    def _published(self, version: SignedVersion, now: float) -> None:
        self._machine.go(RoundSignal.PUBLISHED)
        self._spare.busy = False
        self._sync_s.add(now - self._closing_since_s)
        for held in self._merging:
            self._inbox.drop(held)
        self._merging = []
        self._chain.extend(version)
        self._own.chain_moved(self._chain.watermark(self._shared.me), now)
        if not self._office.holding:
            self._empty_inbox()
        self._inbox.all_late()
        header = version.header
        self._shared.out.record(
            "publish",
            self._fragment,
            f"version {header.number} with {len(header.contributors)} contributions",
            number=header.number,
            digest=self._chain.head.digest.hex()[:8],
            term=header.term,
            tokens=header.tokens,
        )
        self._office.poll(now)
        self._after_round(now)

    def _after_round(self, now: float) -> None:
        """Contributions that came too late start the next collection."""
        if self._office.holding and self._inbox.ready():
            self._first_in_s = now
            self._machine.go(RoundSignal.CONTRIBUTION)
            self.poll(now)

    def failed(self, event: MergeFailed, now: float) -> None:
        """Every contribution turned out unusable, or the worker failed."""
        self._spare.busy = False
        self._shared.out.put(DropSpare(self._fragment))
        self._shared.out.record("merge", self._fragment, f"failed: {event.reason}", number=event.number)
        if self._is_current(event.term, event.number):
            self._machine.go(RoundSignal.FAILED)
            self._empty_inbox()
            self._office.lay_down(event.reason)

    def _not_published(self, event: Merged, now: float, why: str) -> None:
        self._machine.go(RoundSignal.FAILED)
        self._spare.busy = False
        self._shared.out.put(DropSpare(self._fragment))
        self._shared.out.put(Release(event.ticket))
        self._shared.out.record("publish", self._fragment, f"could not be saved: {why}", number=event.number)
        self._empty_inbox()
        self._office.lay_down(f"cannot save: {why}")

    def _is_current(self, term: int, number: int) -> bool:
        right = self.state is RoundState.MERGING and term == self._term
        return right and number == self._chain.head.number + 1

    def abandon(self, reason: str) -> None:
        """We are no longer the syncer, or the chain moved under us: contributors send again elsewhere."""
        if self._machine.may(RoundSignal.ABANDON):
            if self.state is not RoundState.IDLE:
                self._shared.out.record("round", self._fragment, f"abandoned: {reason}")
            self._machine.go(RoundSignal.ABANDON)
            self._merging = []
            self._empty_inbox()

    def chain_moved(self, now: float) -> None:
        """A version that is not ours arrived while we hold the office: what it did not merge stays in."""
        if not self._machine.may(RoundSignal.ABANDON):
            return
        self._machine.go(RoundSignal.ABANDON)
        self._merging = []
        self._inbox.drop_overlapping()
        self._after_round(now)

    def _empty_inbox(self) -> None:
        self._merging = []
        self._calls.forget()
        self._inbox.clear()


def part_of(header: ContributionHeader) -> Part:
    """A contribution's entry in the version that merges it."""
    return Part(header.learner, header.stamp, header.tokens, header.inner_steps)


def commit_effect(
    shared: Shared, chain: Chain, own: Contributor, version: SignedVersion, update: Ticket | None
) -> CommitVersion:
    """The spare copy becomes the state; the learner hears whether its own contribution is in it."""
    marks = chain.watermarks_after(version.header)
    after = next((m.stamp for m in marks if m.learner == shared.me), chain.watermark(shared.me))
    merged_ticket, overwrite = own.would_merge(after)
    return CommitVersion(version, update, merged_ticket, marks, after, overwrite)
