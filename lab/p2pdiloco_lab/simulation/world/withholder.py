"""A member that does less than its office asks. Nothing that it signs is false, so nothing can be proved.

Two kinds: one makes versions and gives them to nobody, one takes a learner's contributions and leaves them
out of everything that it makes.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from p2pdiloco.core.api.effects import Effect
from p2pdiloco.core.api.messages import Message
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco_lab.simulation.node.lineage import FragmentLineage

if TYPE_CHECKING:
    from p2pdiloco_lab.simulation.node.host import Host
    from p2pdiloco_lab.simulation.world.disk import LoggedUpdate


class Kept(Enum):
    """Things that it keeps from others."""

    VERSIONS = "versions"
    """Updates and states: it names its heads, and is busy whenever it is asked for them."""
    WORK = "work"
    """Contributions of one learner: it says that it has them, and throws them away."""


class Withholder:
    """Member that withholds, from a moment on or from the start."""

    def __init__(self, kind: Kept, victim: str = "", from_s: float = 0.0) -> None:
        self.kind, self.victim, self.from_s = kind, victim, from_s
        self.swallowed = 0
        """Contributions that it threw away."""

    def withholds(self, now: float) -> bool:
        """Tell whether it gives no version now."""
        return self.kind is Kept.VERSIONS and now >= self.from_s

    def swallows(self, sender: str, now: float) -> bool:
        """Tell whether it throws away what came from that learner."""
        swallowed = self.kind is Kept.WORK and sender == self.victim and now >= self.from_s
        self.swallowed += swallowed
        return swallowed

    def sees(self, host: Host, effect: Effect) -> None:
        """Leave its core alone."""

    def says(self, peer: str, message: Message) -> Message:
        """Say what its core says."""
        return message

    def hides(self, found: LoggedUpdate) -> bool:
        """Tell whether it does as if that update were gone: it gives none at all, or all."""
        return False

    def gives(self, peer: str, found: LoggedUpdate) -> LoggedUpdate:
        """Give what there is, if it gives any."""
        return found

    def gives_state(
        self, peer: str, version: SignedVersion, state: FragmentLineage
    ) -> tuple[SignedVersion, FragmentLineage]:
        """Give what there is, if it gives any."""
        return version, state
