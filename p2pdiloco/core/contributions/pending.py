"""Work on its way to a syncer: its states, and what is known of it until a chain has it for good.

Rules: docs/protocol/exactly-once.md, section 1.
"""

from __future__ import annotations

from enum import Enum, auto

from p2pdiloco.core.api.events import ContributionReady
from p2pdiloco.core.api.reasons import Then, Verdict
from p2pdiloco.core.api.types import Head, Stamp
from p2pdiloco.core.contributions.kept import KeptPart
from p2pdiloco.core.timing import backoff_s
from p2pdiloco.util import Machine, direct_members


@direct_members
class SendState(Enum):
    """States of the first contribution of the queue."""

    COMBINING = auto()
    WAITING = auto()
    OFFERED = auto()
    HELD = auto()


@direct_members
class SendSignal(Enum):
    """Causes for its state to change."""

    COMBINED = auto()
    OFFER = auto()
    ACCEPT = auto()
    RETRY = auto()


SEND_TABLE = {
    (SendState.COMBINING, SendSignal.COMBINED): SendState.WAITING,
    (SendState.WAITING, SendSignal.OFFER): SendState.OFFERED,
    (SendState.OFFERED, SendSignal.ACCEPT): SendState.HELD,
    (SendState.OFFERED, SendSignal.RETRY): SendState.WAITING,
    (SendState.HELD, SendSignal.RETRY): SendState.WAITING,
}

OTHER_OPINIONS = 3
"""Number of further refusals as unusable until a contribution is given up that a peer took, or may have
taken; of a copy those of so many further versions."""

WORDS = {
    SendState.COMBINING: "being combined",
    SendState.WAITING: "waits for a syncer",
    SendState.OFFERED: "on its way to the syncer",
    SendState.HELD: "held by the syncer",
}


class Underway:
    """Work that a syncer is to merge, and where it is: a contribution, or the partial merge of a group."""

    def __init__(self, start: SendState = SendState.WAITING) -> None:
        self._machine = Machine(SEND_TABLE, start)
        self.peer = ""
        """Peer to which it was offered last."""
        self.attempts = 0
        self.retry_at_s = 0.0
        self.deadline_s = 0.0
        self.offered_s = 0.0
        """Time at which it was offered last."""

    @property
    def state(self) -> SendState:
        """Place where it is."""
        return self._machine.state

    def words(self) -> str:
        """Say for people where it is."""
        return WORDS[self.state]

    def deadline(self, syncer: str | None) -> float | None:
        """Find when to look again, if that peer is in office."""
        if self.state is SendState.WAITING:
            return self.retry_at_s if syncer else None
        return self.deadline_s if self.state is SendState.HELD else None

    def offered(self, peer: str, now: float) -> None:
        """Note that it is on its way to that peer."""
        self._machine.go(SendSignal.OFFER)
        self.peer, self.offered_s = peer, now
        self.attempts += 1

    def accepted(self) -> None:
        """Note that the syncer has it."""
        self._machine.go(SendSignal.ACCEPT)

    def wait_until(self, deadline_s: float) -> None:
        """Expect a version that contains it by then."""
        self.deadline_s = deadline_s

    def forgive(self, lag_s: float) -> None:
        """Expect it later by time in which we did not run: that was not the syncer's slowness."""
        self.deadline_s += lag_s

    def hurry(self, now: float) -> None:
        """Wait out no pause."""
        if self.state is SendState.WAITING:
            self.retry_at_s = now

    def retry(self, now: float, pause_s: float = 0.0) -> None:
        """Send it again: at once, or after a pause that grows with the attempts."""
        if self._machine.may(SendSignal.RETRY):
            self._machine.go(SendSignal.RETRY)
        self.retry_at_s = now + backoff_s(pause_s, self.attempts) if pause_s else now

    def office_changed(self, syncer: str | None, now: float) -> None:
        """Send to another syncer, at once, what the old one holds."""
        if self.state is not SendState.OFFERED or self.peer != syncer:
            self.retry(now)
        self.attempts = 0


class Pending(Underway):
    """Contribution that is not yet beyond doubt."""

    def __init__(
        self,
        stamp: Stamp,
        after: Stamp,
        ready: ContributionReady,
        base: tuple[int, bytes],
        contains: tuple[Stamp, ...] = (),
        start: SendState = SendState.WAITING,
    ) -> None:
        super().__init__(start)
        self.stamp = stamp
        self.after = after
        self.ready = ready
        self.base_number, self.base_digest = base
        self.attached = True
        self.contains = contains
        """Contributions that were given up, or left behind by an earlier life, and that this copy has as
        well. If a chain has one of them all the same, it must not get this one."""
        self.parts: tuple[KeptPart, ...] = ()
        """Contributions that an abandoned version had merged and that are sent again in this one; its payload
        is ours alone."""
        self.combine_attempt = 0
        self._offered_after = after
        self.sent = False
        """True: all of it went out to another node, once at least, or may have."""
        self.perhaps_held = False
        """True: a peer took it, or may have; it may be in a merge that we have not heard of."""
        self.called_unusable = 0
        self._copy_at = -1
        """Version at which it was refused as a copy."""

    @property
    def relabelled(self) -> bool:
        """True: our chain moved since it was offered, and it follows something else now."""
        return self._offered_after != self.after

    def offered(self, peer: str, now: float) -> None:
        super().offered(peer, now)
        self._offered_after = self.after

    def accepted(self) -> None:
        super().accepted()
        self.perhaps_held = True

    def undelivered(self, now: float, pause_s: float) -> None:
        """Try again after a pause: the stream broke, at one end perhaps only."""
        self.perhaps_held = True
        self.retry(now, pause_s)

    def went_out(self) -> None:
        """Note that all of it went out to another node, or may have."""
        self.sent = True

    def hopeless(self, verdict: Verdict, number: int) -> bool:
        """Tell whether it is to be given up after this verdict; our head is version `number`.

        What was sound for somebody was damaged on the way. And of a copy the one that came first may be the
        thief's: once that has newer work in the chain, ours is taken. What is attached stays in the
        displacement if it is given up; else it would be lost, and waits for some more versions."""
        if verdict.then is not Then.GIVE_UP:
            return False
        if verdict is Verdict.COPY and not self.attached:
            if number == self._copy_at:
                return False
            self._copy_at = number
        elif not self.perhaps_held:
            return True
        self.called_unusable += 1
        return self.called_unusable > OTHER_OPINIONS

    def follow(self, after: Stamp) -> None:
        """Follow another one than before."""
        self.after = after

    def detach(self) -> None:
        """Note that it is no part of the learner's displacement any more."""
        self.attached = False

    def combined(self, ready: ContributionReady) -> None:
        """Take in the sum of its parts, which can be sent."""
        self.ready = ready
        self._machine.go(SendSignal.COMBINED)

    def rebase(self, head: Head) -> None:
        """Measure the displacement from that version."""
        self.base_number, self.base_digest = head.number, head.digest


class Again(Pending):
    """Merged contributions that a heavier chain lacks, sent again as one; first their payloads are added up.

    Args:
        lost: oldest first.
        attempt: number that the answer to the question for their sum bears.
    """

    def __init__(self, lost: tuple[KeptPart, ...], after: Stamp, head: Head, attempt: int) -> None:
        nothing = ContributionReady(lost[-1].ready.fragment, 0, 0, 0, b"", 0, True)
        base = (head.number, head.digest)
        super().__init__(lost[-1].stamp, after, nothing, base, start=SendState.COMBINING)
        self.attached, self.parts = False, lost
        self.perhaps_held = True  # merged once already: whoever finds it unusable got it damaged
        self.combine_attempt = attempt
