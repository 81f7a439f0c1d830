"""Follower of a fragment's chain, with its doubts about holders and its checks of what they give.

Rules: docs/protocol/belief.md, sections 3 and 8; docs/protocol/proofs.md, section 3.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from enum import Enum, auto
from functools import partial

from p2pdiloco.core.api.config import CoreConfig
from p2pdiloco.core.api.events import (
    ApplyUpdate,
    CommitVersion,
    CutShort,
    DropSpare,
    FetchFailed,
    FetchState,
    FetchUpdate,
    Release,
    StateFetched,
    UpdateApplied,
    UpdateFetched,
)
from p2pdiloco.core.api.evidence import false_label, two_versions
from p2pdiloco.core.api.papers import Proof
from p2pdiloco.core.api.reasons import FetchFailure, VersionFault
from p2pdiloco.core.api.types import WHOLE_RUN, Head, Stamp, Ticket, Watermark, table_digest
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.core.audits import Auditor
from p2pdiloco.core.base import Shared, earliest
from p2pdiloco.core.chain import numbers_can_be, plan_after, version_fault
from p2pdiloco.core.context import FragmentContext
from p2pdiloco.core.contributions import ContributionQueue, commit_effect
from p2pdiloco.core.distrust import NEVER_NOTED, Cause, Distrust, backoff_s
from p2pdiloco.core.fork_choice import ForkChoice
from p2pdiloco.core.pending import unsigned
from p2pdiloco.core.voting import office_fault
from p2pdiloco.util import BoundedDict, Machine, MovingAverage, direct_members


@direct_members
class FollowState(Enum):
    """Work of a follower that is under way.

    - RESTING: nothing heavier is known
    - UPDATING: one outer update is being pulled or applied
    - COPYING: a whole state is being pulled
    """

    RESTING = auto()
    UPDATING = auto()
    COPYING = auto()


@direct_members
class FollowSignal(Enum):
    """Causes for its state to change."""

    PULL_UPDATE = auto()
    PULL_STATE = auto()
    DONE = auto()


FOLLOW_TABLE = {
    (FollowState.RESTING, FollowSignal.PULL_UPDATE): FollowState.UPDATING,
    (FollowState.RESTING, FollowSignal.PULL_STATE): FollowState.COPYING,
    (FollowState.UPDATING, FollowSignal.DONE): FollowState.RESTING,
    (FollowState.COPYING, FollowSignal.DONE): FollowState.RESTING,
}


class Follower:
    """Keeper of one fragment's chain: hears of a heavier head, gets it, makes the outer step.

    Heads arrive in announcements (at once, from the syncer) and in every heartbeat (soon, from everybody). A
    head that is heavier than ours is a target. If it can be reached by replaying updates, they are pulled one
    by one, each checked against its parent; else the whole state is pulled from a donor. Either way the
    result must have the digest that the version's header states, or it is thrown away and counted.

    Only confirmed members are believed and asked. A newcomer is confirmed once every fragment's head is one
    that a confirmed member holds too (docs/protocol/belief.md, section 5).

    Args:
        on_moved: called once we hold another peer's version.
    """

    def __init__(
        self,
        context: FragmentContext,
        own: ContributionQueue,
        auditor: Auditor,
        on_moved: Callable[[float], None],
    ) -> None:
        self._context = context
        self._shared = context.shared
        self._fragment = context.index
        self._chain = context.chain
        self._own = own
        self._spare = context.spare
        self._machine = Machine(FOLLOW_TABLE, FollowState.RESTING)
        self.heads = ForkChoice(context)
        """Heads that members name, and which of them are followed."""
        self._doubts = Doubts()
        self._has_spare = False
        self.held: tuple[str, SignedVersion, tuple[Watermark, ...]] | None = None
        """State in the spare copy that is to be tried before it is taken: its donor, version and table."""
        mine = hashlib.sha256(f"{context.shared.me}/{context.index}".encode()).digest()
        self._first_asked = int.from_bytes(mine[:4], "big")
        """Place in the order of equal holders at which we begin: else all would ask the same one, and wait
        for it."""
        self._attempts = 0
        self._retry_at_s = self._asked_s = 0.0
        self._asked: tuple[str, int] | None = None
        """Holder of an update that is not here yet, and the token of that effect."""
        self._took_s = MovingAverage()
        """Seconds that updates took lately."""
        self._slow_at_s = math.inf
        """Time from which on the holder takes much longer than is usual."""
        self._need_state = False
        self._asked_at = b""
        """Digest of our head when a holder was asked."""
        self._auditor, self._on_moved = auditor, on_moved

    # --- questions -----------------------------------------------------------------------------------

    @property
    def state(self) -> FollowState:
        """Work that is under way."""
        return self._machine.state

    def words(self) -> str:
        """Say for people what is under way; empty: nothing."""
        if self.state is FollowState.UPDATING:
            return "applying an update"
        if self.held is not None:
            return "trying a state"
        return "copying state" if self.state is FollowState.COPYING else ""

    def deadline(self) -> float | None:
        """Time at which to try again; None: nothing to wait for."""
        if self._asked is not None and self._slow_at_s < math.inf:
            return self._slow_at_s
        if self.state is not FollowState.RESTING or self._spare.busy:
            return None
        first_s = self._doubts.first_s(self.heads.wanted)
        apart_s = self.heads.deadline()
        return earliest((apart_s, None if first_s is None else max(first_s, self._retry_at_s)))

    def behind(self, now: float) -> bool:
        """Tell whether something heavier is known, or on its way here."""
        return self.state is not FollowState.RESTING or self._best(now) is not None

    def _best(self, now: float) -> Head | None:
        """Find the heaviest head to follow of which a holder is not in doubt."""
        wanted = self.heads.look(now)
        above = [(wanted[peer].weight, peer, wanted[peer]) for peer in self._doubts.open(wanted, now)]
        return max(above, key=lambda item: (item[0], item[1]))[2] if above else None

    # --- what happens --------------------------------------------------------------------------------

    def poll(self, now: float) -> None:
        """Start pulling if something heavier is known and nothing is under way."""
        if self._asked is not None:
            self._look_whether_slow(*self._asked, now)
        if self.state is not FollowState.RESTING:
            return
        if self._spare.busy or now < self._retry_at_s:
            return
        target = self._best(now)
        if target is None:
            return
        holders = sorted(self._doubts.open(self.heads.able(target), now))
        # Who cannot be dialled is spared, and perhaps not to be had.
        holders = [p for p in holders if self._shared.view.dialable(p)] or holders
        peer = holders[(self._first_asked + target.number + self._attempts) % len(holders)]
        self._asked_s = now
        distance = target.number - self._chain.head.number
        far = not 0 < distance <= self._shared.config.log_versions
        may_copy = self.heads.may_copy(target, peer, now)
        lighter = target.weight <= self._chain.head.weight
        if may_copy and (far or self._need_state or lighter):
            self._pull_state(peer, target)
        else:
            if peer not in self._doubts:  # of who failed last time the bytes must be here first
                self._take_spare()
            number = min(target.number, self._chain.head.number + 1)
            self._fetch(FollowSignal.PULL_UPDATE, FetchUpdate(self._fragment, number, peer))

    def _look_whether_slow(self, peer: str, token: int, now: float) -> None:
        """Leave a slow holder alone where another one has something, too. In any case nothing else waits for
        it: its bytes must be here first."""
        if now >= self._slow_at_s:
            self._slow_at_s = math.inf
            self._free_spare()
        if self._slow_at_s == math.inf and self._doubts.open(self.heads.look(now), now) - {peer}:
            self._asked = None
            self._shared.out.put(CutShort(token))

    def _unless_supported(self, peer: str, now: float) -> None:
        """Only its state is left of a peer's head: leave that alone, if too few stand on it to copy it."""
        target = self.heads.wanted.get(peer)
        if target is None or self.heads.may_copy(target, peer, now):
            return
        self._doubts.add(peer, self._shared.timing.retry_s, now)
        self._shared.out.record(
            "catchup", self._fragment, f"left alone: {VersionFault.UNSUPPORTED}", peer=peer
        )

    def _fetch(self, signal: FollowSignal, effect: FetchUpdate | FetchState) -> None:
        self._machine.go(signal)
        self._asked_at = self._chain.head.digest
        token = self._shared.out.ask(effect, partial(self._fetched, effect.peer), self._fragment)
        if isinstance(effect, FetchUpdate):
            timing, took_s = self._shared.timing, self._took_s
            slow_s = timing.resume_alone_s if took_s.empty else SLOW_TIMES * took_s.value
            self._slow_at_s = self._asked_s + max(timing.suspect_s, slow_s)
            self._asked = effect.peer, token

    def _take_spare(self) -> None:
        self._spare.take()
        self._has_spare = True

    def _pull_state(self, peer: str, target: Head) -> None:
        self._take_spare()
        self._shared.out.record(
            "catchup",
            self._fragment,
            f"copying version {target.number}",
            peer=peer,
            ours=self._chain.head.number,
        )
        self._fetch(FollowSignal.PULL_STATE, FetchState(self._fragment, target.number, peer))

    def _disappointed(self, peer: str, fault: bool, now: float) -> None:
        """Count the failure of a holder, which is left alone for a while. The next one is asked after a short
        pause, or without one if it was that one's own fault."""
        retry_s = self._shared.timing.retry_s
        self._doubts.add(peer, retry_s, now, math.inf if fault else now - self._asked_s)
        self._done(now, ok=False)
        self._retry_at_s = now if fault else now + retry_s

    def _free_spare(self) -> None:
        if self._has_spare:
            self._spare.free()
        self._has_spare = False

    def _done(self, now: float, ok: bool) -> None:
        self._machine.go(FollowSignal.DONE)
        self._free_spare()
        self._attempts = 0 if ok else self._attempts + 1
        self._retry_at_s = now + backoff_s(self._shared.timing.retry_s, self._attempts)
        if ok:
            self._need_state = False

    def _fetched(self, peer: str, answer: UpdateFetched | StateFetched | FetchFailed, now: float) -> None:
        self._asked = None
        if isinstance(answer, UpdateFetched):
            self._took_s.add(now - self._asked_s)
            self._update_fetched(peer, answer, now)
        elif isinstance(answer, StateFetched):
            self._state_fetched(peer, answer, now)
        else:
            self._fetch_failed(peer, answer, now)

    def _fetch_failed(self, peer: str, answer: FetchFailed, now: float) -> None:
        """Try another holder, or another way: this one did not deliver."""
        failure, words = answer.failure, f"not delivered: {answer.detail or answer.failure}"
        self._shared.out.record("catchup", self._fragment, words, peer=peer)
        if failure is FetchFailure.GONE:
            self._need_state = True
        if failure in (FetchFailure.UNREACHABLE, FetchFailure.NOT_READY):
            self.heads.cannot_give(peer)
        self._disappointed(peer, not failure.innocent, now)

    def _update_fetched(self, peer: str, answer: UpdateFetched, now: float) -> None:
        """Check an update against our chain, then make its outer step."""
        version, header = answer.version, answer.version.header
        self._compare(peer, version)
        fault = self._why_not(version, peer, now)
        if fault is not None:
            self._shared.out.put(Release(answer.ticket))
            kind = "fork" if fault.forked else "refusal"
            self._shared.out.record(kind, self._fragment, str(fault), peer=peer)
            self._not_taken(peer, fault, now)
            return
        self._doubts.drop(peer)
        if not self._has_spare and self._spare.busy:
            self._shared.out.put(Release(answer.ticket))
            self._done(now, ok=False)
            return
        if not self._has_spare:
            self._take_spare()
        steps, own = header.longest_steps(), self._auditor.own_part(header)
        step = ApplyUpdate(
            self._fragment,
            header.number,
            answer.ticket,
            steps,
            header.norm,
            own,
            stated=header.state_digest,
            update_digest=header.update_digest,
        )
        heard = partial(self._update_applied, version, peer, answer.ticket)
        self._shared.out.ask(step, heard, self._fragment)

    def _compare(self, giver: str, version: SignedVersion) -> None:
        """Compare a version that was fetched with ours of that number: both together may be a proof."""
        ours = self._chain.logged(version.header.number)
        self._shared.excluded.found(two_versions(ours, version), giver)
        if version.header.number == self._chain.head.number:
            self.heads.compared(version.header.digest())

    def _not_taken(self, peer: str, fault: VersionFault, now: float) -> None:
        if fault.innocent:
            if fault.forked:
                self._unless_supported(peer, now)
            elif fault is VersionFault.CHAIN_MOVED and self._asked_at == self._chain.head.digest:
                # It is another than was asked for, or a sibling of ours that is no proof.
                self._doubts.add(peer, self._shared.timing.retry_s, now, math.inf)
            self._done(now, ok=False)
            if fault is VersionFault.OTHER_HOLDER:
                self._retry_at_s = now  # others' versions may bind us
        else:
            self._disappointed(peer, True, now)
        self._need_state = self._need_state or fault.forked

    def _why_not(self, version: SignedVersion, giver: str, now: float) -> VersionFault | None:
        header = version.header
        config = self._shared.config
        mine = (config.run, WHOLE_RUN, self._fragment, config.update_codec)
        if (header.run, header.group, header.fragment, header.codec) != mine:
            return VersionFault.WRONG_FRAGMENT
        if not self._shared.signed_by(header.syncer, "version", header, version.signature):
            return VersionFault.SIGNATURE
        if not self.heads.may_follow(giver, header.head(), now):
            return VersionFault.UNSUPPORTED
        if not (self.heads.counts(giver) or self.heads.counts(header.syncer)):
            return VersionFault.UNELECTED
        if not self._chain.is_child(header):
            moved = header.number != self._chain.head.number + 1
            return VersionFault.CHAIN_MOVED if moved else VersionFault.PARENT_DIFFERS
        if self._context.false_states.builds_on(header):
            return VersionFault.FALSE_STATE
        unelected = office_fault(self._context, header, giver, now)
        if unelected is not None:
            return unelected
        if not plausible(header, config):
            return VersionFault.IMPLAUSIBLE_TOKENS
        wrong = version_fault(self._chain, header, config) or self._context.repairs.fault(header)
        if wrong is not None:
            return wrong
        if not all(map(self._shared.papers.signed, header.papers)):
            return VersionFault.FALSE_PAPERS
        before, marks = self._chain.header, self._chain.marks_after(header)
        if header.table != marks.digest:
            return VersionFault.FALSE_TABLE
        if header.finality != self._chain.finality_after(marks):
            return VersionFault.FALSE_FINALITY
        if falsely_labelled(self._shared, version):
            return VersionFault.FALSE_LABEL
        self._context.attested.seen(giver, header.contributors)
        plan = plan_after(before, marks, header.number, config)
        return None if (header.epoch, header.groups) == plan else VersionFault.FALSE_PLAN

    def _update_applied(
        self, version: SignedVersion, giver: str, update: Ticket, answer: UpdateApplied, now: float
    ) -> None:
        """Take the version if its digest is equal. Else refuse it, if that is its syncer's fault, or copy the
        whole state, if it may be ours; and let it be known."""
        header = version.header
        fault = self._context.false_states.judge(answer, version, self.heads.holders, now)
        if fault is not None:
            self._shared.out.put(DropSpare(self._fragment))
            self._shared.out.put(Release(update))
            words, number = str(fault), header.number
            self._shared.out.record("refusal", self._fragment, words, peer=header.syncer, number=number)
            self._not_taken(giver, fault, now)
            return
        self._shared.out.put(commit_effect(self._shared, self._chain, self._own, version, update))
        self._chain.extend(version)
        for paper in header.papers:
            if isinstance(paper, Proof):
                self._shared.excluded.found(paper)
        self._moved("apply", version, now)
        self._auditor.applied(version, answer.cosine, now)

    def _state_fetched(self, donor: str, answer: StateFetched, now: float) -> None:
        """Take a donor's whole fragment from the spare copy, if it is sound and heavier."""
        version, table, shared = answer.version, answer.watermarks, self._shared
        self._compare(donor, version)
        fault = why_no_state(self._context, self.heads, version, table, donor, now)
        if fault is not None:
            shared.out.put(DropSpare(self._fragment))
            shared.out.record("catchup", self._fragment, f"not taken: {fault}", peer=donor)
            self._disappointed(donor, not fault.innocent, now)
            return
        head = version.header.head()
        if self.heads.must_be_tried(head):
            self.held = donor, version, table
            shared.out.record("catchup", self._fragment, f"tries version {head.number}", peer=donor)
            return
        self._take(donor, version, table, now)

    def tried(self, passed: bool, now: float) -> None:
        """Take in whether the state that is held is no worse than ours. Else its donor is left alone for a
        while, longer each time."""
        held, self.held = self.held, None
        assert held is not None
        donor, version, table = held
        if not passed:
            self.heads.refuse(version.header.head())
        fault = why_no_state(self._context, self.heads, version, table, donor, now)
        if fault is None:
            self._take(donor, version, table, now)
            return
        self._shared.out.put(DropSpare(self._fragment))
        self._disappointed(donor, not passed, now)

    def _take(self, donor: str, version: SignedVersion, table: tuple[Watermark, ...], now: float) -> None:
        shared = self._shared
        self._doubts.drop(donor)
        after = next((m.stamp for m in table if m.learner == shared.me), Stamp(0, 0))
        merged_ticket, overwrite = self._own.would_merge(after)
        shared.out.put(CommitVersion(version, None, merged_ticket, table, after, overwrite))
        self._chain.replace(version, table, self.heads.may_replace(version.header.head(), now))
        self._moved("catchup", version, now)

    def _moved(self, kind: str, version: SignedVersion, now: float) -> None:
        self._done(now, ok=True)
        head = self._chain.head
        self._shared.out.record(
            kind,
            self._fragment,
            f"holds version {head.number}",
            number=head.number,
            digest=head.digest.hex()[:8],
            term=head.term,
            tokens=head.tokens,
        )
        self.heads.moved(kind == "catchup", now)
        self._own.chain_moved(self._chain.marks.stamp(self._shared.me), now)
        self._on_moved(now)


SLOW_TIMES = 4
"""A holder is slow that takes so many times as long as updates took lately."""
WASTED_TIMES = 4
WASTED_S = 120.0
"""Least pause is so many times as long as a holder let us wait for nothing, and at most this; after something
false it is this."""
FORGIVEN = 3
"""First failures in a row of a holder that make no such pause, and of these the first false ones: payloads
may be damaged, and it alone may have its version."""


class Doubts:
    """Doubts about the holders of one fragment that did not deliver: left alone for a while, longer every
    time.

    Without them one member that boasts of a heavy head, and cannot or will not give it, would keep all others
    from the heads that they could have had.

    Rules: docs/protocol/belief.md, section 8.
    """

    def __init__(self) -> None:
        self._distrust = Distrust()
        self._failed = self._distrust.noted[Cause.GAVE_NOTHING]
        self._false: BoundedDict[str, tuple[int, float]] = BoundedDict()
        """Failures that were something false, which may be damage on the way, and when the last one was."""
        self._in_a_row = 0
        self._again_s = -math.inf
        """Time before which nobody is asked who failed last time, whoever that is."""

    def add(self, peer: str, retry_s: float, now: float, waited_s: float = 0.0) -> None:
        """Count a failure of the holder. `waited_s`: how long we waited for it; after something false, for
        ever."""
        times = self._false if waited_s == math.inf else self._failed
        forgiven = times.get(peer, NEVER_NOTED)[0] < FORGIVEN
        least_s = 0.0 if forgiven else min(WASTED_TIMES * waited_s, WASTED_S)
        if times is self._false:
            times[peer] = times.get(peer, NEVER_NOTED)[0] + 1, now
        self._distrust.add(peer, Cause.GAVE_NOTHING, now, least_s)
        self._in_a_row += 1
        self._again_s = now + backoff_s(retry_s, self._in_a_row)

    def __contains__(self, peer: str) -> bool:
        """Tell whether the holder failed last time."""
        return peer in self._failed

    def drop(self, peer: str) -> None:
        """Forget the doubt: the holder delivered."""
        self._failed.pop(peer, None)
        self._false.pop(peer, None)
        self._in_a_row = 0

    def open(self, peers: Iterable[str], now: float) -> set[str]:
        """Choose whom of these to ask now: those that did not fail last time, or else those that were left
        alone for long enough. So nobody's boast comes before what others do have."""
        peers = list(peers)
        clean = {peer for peer in peers if peer not in self}
        return clean or {peer for peer in peers if self._from_s(peer) <= now}

    def first_s(self, peers: Iterable[str]) -> float | None:
        """Find when the first of these may be asked; None: there are none."""
        return min(map(self._from_s, peers), default=None)

    def _from_s(self, peer: str) -> float:
        until_s = self._distrust.until_s(peer, Cause.GAVE_NOTHING)
        return max(until_s, self._again_s) if peer in self else until_s


def why_no_state(
    context: FragmentContext,
    heads: ForkChoice,
    version: SignedVersion,
    table: tuple[Watermark, ...],
    donor: str,
    now: float,
) -> VersionFault | None:
    """Say why a state that a donor gave is not taken; None: it is."""
    shared, header, config = context.shared, version.header, context.shared.config
    right = (header.run, header.group, header.fragment) == (config.run, WHOLE_RUN, context.index)
    if not right or not shared.signed_by(header.syncer, "version", header, version.signature):
        return VersionFault.SIGNATURE
    if not heads.may_replace(header.head(), now):
        return VersionFault.BEHIND
    if context.false_states.builds_on(header):
        return VersionFault.FALSE_STATE
    if not heads.may_copy(header.head(), donor, now):
        return VersionFault.UNSUPPORTED
    if not plausible(header, config):
        return VersionFault.IMPLAUSIBLE_TOKENS
    if table_digest(table) != header.table:
        return VersionFault.FALSE_TABLE
    if not numbers_can_be(header, table, config):
        return VersionFault.OUT_OF_SCALE
    if falsely_labelled(shared, version):
        return VersionFault.FALSE_LABEL
    context.attested.seen(donor, header.contributors)
    return None


def falsely_labelled(shared: Shared, version: SignedVersion) -> bool:
    """Tell whether it names a contribution that its learner did not sign: its syncer lied."""
    index = unsigned(shared, version.header.fragment, version.header.contributors)
    if index is not None:
        shared.excluded.found(false_label(version, index))
    return index is not None


def plausible(header: VersionHeader, config: CoreConfig) -> bool:
    """Tell whether its contributions can be: their steps say how far momentum goes."""
    return header.plausible(config.tokens_per_step, config.inner_steps)
