"""Accusations that this node has heard, and that wait until it has made the merge again for itself.

One for each accuser: nobody can keep us busy. Who accuses a version whose contributions are not to be had is
not heard again for a while. It had them all, and should have given them; if that happens with another version
again soon, it is distrusted.

Rules: docs/protocol/audits.md, section 3.
"""

from __future__ import annotations

from p2pdiloco.core.api.statements import Accusation
from p2pdiloco.util import BoundedDict

MAX_WAITING, OTHERS_WAITING = 8, 4
"""Number of accusers that are heard at one time; one that has no vote only while fewer wait than that."""
WAIT_S = 120.0
"""Time for which an accusation waits for the version to come here, and for its turn."""
PAUSE_S = 600.0
"""Time for which an accuser is not heard after an accusation of which nothing came, and a peer after a false
statement."""
REPEATED_S = 3600.0
"""Time within which a second version whose contributions are not to be had tells against its accuser."""
MAX_PAUSING = 64


class Accusations:
    """Accusations that wait, one for each accuser."""

    def __init__(self) -> None:
        self._waiting: dict[str, tuple[Accusation, float]] = {}
        """Accusations by accuser, and until when they wait."""
        self._pausing_until_s: BoundedDict[str, float] = BoundedDict(MAX_PAUSING)
        self._missing: BoundedDict[str, tuple[bytes, float]] = BoundedDict(MAX_PAUSING)
        """Last version that each accused of which not all contributions were to be had, and when that was."""

        self._ignored_until_s: BoundedDict[str, float] = BoundedDict(MAX_PAUSING)

    def ignores(self, peer: str, now: float) -> bool:
        """Tell whether nothing that this peer tells is heard."""
        return now < self._ignored_until_s.get(peer, 0.0)

    def ignore(self, peer: str, now: float) -> None:
        """Hear nothing that this peer tells for a while: it told what is not signed as it says."""
        self._ignored_until_s[peer] = now + PAUSE_S

    def hears(self, accuser: str, votes: bool, now: float) -> bool:
        """Tell whether an accusation of that member would be taken. `votes`: it has a vote."""
        self._expire(now)
        room = accuser not in self._waiting and len(self._waiting) < (
            MAX_WAITING if votes else OTHERS_WAITING
        )
        return room and now >= self._pausing_until_s.get(accuser, 0.0)

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

    def missing(self, accusation: Accusation, now: float) -> bool:
        """Let go of an accusation of a version whose contributions were not to be had. Tell whether another
        one of that accuser ended so lately."""
        self.vain(accusation, now)
        digest = accusation.subject.digest()
        before, at_s = self._missing.get(accusation.accuser, (digest, now))
        self._missing[accusation.accuser] = digest, now
        return before != digest and now - at_s < REPEATED_S

    def _expire(self, now: float) -> None:
        for accusation in [each for each, until_s in self._waiting.values() if until_s <= now]:
            self.vain(accusation, now)
