"""Repairs: a false version is taken back by a later one, which adds the true update and subtracts the false.

Outer steps are linear, so in the end it is as if the true update had come in its time, momentum included; and
no contribution is merged again. Whoever found the version false has the true update. It makes the repair in
its next version of that fragment, once most others that vote exclude the same members: else they would not
follow.

Rules: docs/protocol/audits.md, section 4.
"""

from __future__ import annotations

from p2pdiloco.bounded import BoundedDict
from p2pdiloco.core.api.reasons import VersionFault
from p2pdiloco.core.api.statements import Accusation
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.core.chain.chain import Chain
from p2pdiloco.core.shared import Shared

MAX_REMADE = 4
FAR_AHEAD = 2
"""Versions by which a giver is beyond a repair that we cannot judge: others have followed it."""


class Repairs:
    """Repairs of one fragment."""

    def __init__(self, shared: Shared, fragment: int, chain: Chain) -> None:
        self._shared, self._fragment, self._chain = shared, fragment, chain
        self._remade: BoundedDict[bytes, bool] = BoundedDict(MAX_REMADE)
        """Versions that we found false, and whose true update we have."""

    def remade(self, digest: bytes) -> None:
        """Note that the true update of a false version is here."""
        self._remade[digest] = True

    def has(self, digest: bytes | None) -> bool:
        """Tell whether the true update of that version was here."""
        return digest in self._remade

    def next(self, now: float) -> SignedVersion | None:
        """Find a false version that our next one is to repair; None: none, or others do not know yet."""
        for digest in self._remade:
            version = self._chain.find(digest)
            if version is not None and not self._chain.repaired(digest) and self._known(version, now):
                return version
        return None

    def _known(self, version: SignedVersion, now: float) -> bool:
        """Tell whether most that vote, and are here, exclude whom we exclude, its syncer among them. Not all:
        who says something else for ever would keep us from it."""
        shared, voters = self._shared, self._chain.marks.voters
        if version.header.syncer not in shared.excluded:
            return False
        others = [peer for peer in shared.view.confirmed(now) if peer in voters]
        said = [each.proofs for peer in others if (each := shared.view.progress(peer)) is not None]
        return 2 * said.count(shared.excluded.mark) + 1 > len(others)

    def fault(self, header: VersionHeader, giver: str) -> VersionFault | None:
        """Say what is wrong with the repair that a child of our head makes, if it makes one."""
        if header.repairs is None:
            return None
        shared, repaired = self._shared, self._chain.find(header.repairs)
        if not shared.config.audited or self._chain.repaired(header.repairs):
            return VersionFault.FALSE_REPAIR
        if repaired is None:
            return VersionFault.UNKNOWN_REPAIR
        if isinstance(shared.excluded.proof_of(repaired.header.syncer), Accusation):
            return None
        theirs = shared.view.head(giver, self._fragment)
        left_behind = theirs is not None and theirs.number >= header.number + FAR_AHEAD
        waits = shared.confirmed and not left_behind
        return VersionFault.NOT_KNOWN_FALSE if waits else VersionFault.UNKNOWN_REPAIR
