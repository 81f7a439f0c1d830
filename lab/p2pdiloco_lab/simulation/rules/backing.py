"""Rule about support: no full member copies a state that only liars stand on.

Rules: docs/protocol/trust.md, section 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2pdiloco.core.api.effects import CommitVersion
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.fork_choice import FEWEST
from p2pdiloco_lab.simulation.rules.violation import Violation

if TYPE_CHECKING:
    from p2pdiloco_lab.simulation.node.host import Host


class Backing:
    """Watch on who stands on which versions."""

    def __init__(self, liars: frozenset[str]) -> None:
        self._liars = liars
        self._stood: set[bytes] = set()
        """Digests of versions on which somebody honest stood, or stands."""
        self._excused: set[tuple[str, int]] = set()
        """Nodes and fragments of which what comes now is beyond what support does."""
        self.excused = 0
        """States that were copied all the same, though only liars stood on them."""

    def known(self, version: SignedVersion) -> None:
        """Take in a version that was made before the world began."""
        self._stood.add(version.header.digest())

    def arrives(self, host: Host, fragment: int, giver: str) -> None:
        """A state is here, and the core is about to judge it: note whether support has a say."""
        core = host.core.fragments[fragment]
        heads, now = core.follower.heads, host.local_now
        counted = heads.support.counted(now)
        many = any(3 * len(self._liars.intersection(of)) > len(of) for of in counted)
        young = heads.beginning.active or not heads.support.needed
        beyond = young or many or heads.takes_any(giver, now) or len(counted[0]) < FEWEST
        (self._excused.add if beyond else self._excused.discard)((host.peer, fragment))

    def committed(self, host: Host, effect: CommitVersion) -> None:
        """A node makes a version its own."""
        if host.peer in self._liars:
            return
        header = effect.version.header
        digest, where = header.digest(), f"{host.peer} fragment {header.fragment} version {header.number}"
        copied = effect.update is None and digest not in self._stood
        if copied and header.syncer in self._liars:
            if (host.peer, header.fragment) not in self._excused:
                raise Violation("backed", f"{where}: copied of {header.syncer}, and only liars stand on it")
            self.excused += 1
        self._stood.add(digest)
