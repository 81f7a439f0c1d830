"""Accusations that this node has heard, and that wait until it has made the merge again for itself.

One for each accuser: nobody can keep us busy. An accusation of a version whose contributions are not to be
had any more costs its author nothing else; so it is not heard again for a while.

Rules: docs/protocol/audits.md, section 3.
"""

from __future__ import annotations

from p2pdiloco.bounded import BoundedDict
from p2pdiloco.core.api.statements import Accusation

MAX_WAITING = 8
"""Number of accusers that are heard at one time."""
WAIT_S = 120.0
"""Time for which an accusation waits for the version to come here, and for its turn."""
PAUSE_S = 600.0
"""Time for which an accuser is not heard after an accusation of which nothing came."""
MAX_PAUSING = 64


class Accusations:
    """Accusations that wait, one for each accuser."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Accusation, float]] = {}
        """Accusations by accuser, and until when they wait."""
        self._pausing_until_s: BoundedDict[str, float] = BoundedDict(MAX_PAUSING)

    def hears(self, accuser: str, now: float) -> bool:
        """Tell whether an accusation of that member would be taken."""
        self._expire(now)
        pausing = now < self._pausing_until_s.get(accuser, 0.0)
        return not pausing and accuser not in self._waiting and len(self._waiting) < MAX_WAITING

    def take(self, accusation: Accusation, now: float) -> bool:
        """Let an accusation wait. Tell whether it is the first one of its subject."""
        digest = accusation.subject.digest()
        first = not self.of(digest)
        self._waiting[accusation.accuser] = accusation, now + WAIT_S
        return first

    def of(self, digest: bytes) -> list[Accusation]:
        """List the accusations of one subject."""
        return [each for each, _ in self._waiting.values() if each.subject.digest() == digest]

    def waiting(self, fragment: int, now: float) -> list[Accusation]:
        """List the accusations that concern a fragment, the oldest first."""
        if not self._waiting:
            return []
        self._expire(now)
        return [each for each, _ in self._waiting.values() if each.subject.fragment == fragment]

    def settled(self, accusation: Accusation) -> None:
        """Let go of an accusation: the merge was made again."""
        self._waiting.pop(accusation.accuser, None)

    def vain(self, accusation: Accusation, now: float) -> None:
        """Let go of an accusation of which nothing follows."""
        self.settled(accusation)
        self._pausing_until_s[accusation.accuser] = now + PAUSE_S

    def _expire(self, now: float) -> None:
        for accusation in [each for each, until_s in self._waiting.values() if until_s <= now]:
            self.vain(accusation, now)
