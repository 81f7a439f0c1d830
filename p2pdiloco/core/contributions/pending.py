"""One contribution under way: its states, and what is known of it until a chain has it for good."""

from __future__ import annotations

from enum import Enum, auto

from p2pdiloco.core.api.events import ContributionReady
from p2pdiloco.core.api.types import Stamp
from p2pdiloco.core.contributions.retained import Part
from p2pdiloco.core.machine import Machine, direct_members


@direct_members
class SendState(Enum):
    """Where the first contribution of the queue is."""

    COMBINING = auto()
    WAITING = auto()
    OFFERED = auto()
    HELD = auto()


@direct_members
class SendSignal(Enum):
    """What moves it."""

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


class Pending:
    """One contribution that is not yet beyond doubt."""

    def __init__(self, stamp: Stamp, after: Stamp, ready: ContributionReady, base: tuple[int, bytes]) -> None:
        self.stamp = stamp
        self.after = after
        self.ready = ready
        self.base_number, self.base_digest = base
        self.attached = True
        self.contains: tuple[Stamp, ...] = ()
        """Contributions that were given up, or left behind by an earlier life, and that this copy has as
        well: if a chain has one of them all the same, it must not get this one."""
        self.parts: tuple[Part, ...] = ()
        """What an abandoned version had merged and is sent again in this one; its payload is ours alone."""
        self.combine_attempt = 0
        self.machine = Machine(SEND_TABLE, SendState.WAITING)
        self.peer = ""
        self.sent_after = after
        self.attempts = 0
        self.retry_at_s = 0.0
        self.deadline_s = 0.0
        self.held_since_s = 0.0
        self.sent = False
        """All of it went out to another node, once at least, or may have."""
        self.perhaps_held = False
        """Somebody took it, or may have: it may be in a merge that we have not heard of."""
        self.called_unusable = 0
