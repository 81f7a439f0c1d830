"""Repairs: a false version is taken back by a later one, which adds the true update and subtracts the false.

Outer steps are linear, so in the end it is as if the true update had come in its time, momentum included; and
no contribution is merged again. Whoever found the version false has the true update, and makes the repair in
its next version of that fragment. No update is longer than others for it, so that a false repair does no more
harm than a false merge; and nobody needs to know that a version was false in order to follow its repair.

Rules: docs/protocol/audits.md, section 4.
"""

from __future__ import annotations

from p2pdiloco.core.api.reasons import VersionFault
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.core.chain.chain import Chain
from p2pdiloco.core.shared import Shared
from p2pdiloco.util import BoundedDict

MAX_REMADE = 4
WITHIN_VERSIONS = 8
"""Versions within which a false one is repaired: others have those in their logs, and see that there is such
a one."""


class Repairs:
    """Repairs of one fragment."""

    def __init__(self, shared: Shared, chain: Chain) -> None:
        self._shared, self._chain = shared, chain
        self._remade: BoundedDict[bytes, bool] = BoundedDict(MAX_REMADE)
        """Versions that we found false, and whose true update we have."""

    def remade(self, digest: bytes) -> None:
        """Note that the true update of a false version is here."""
        self._remade[digest] = True

    def has(self, digest: bytes | None) -> bool:
        """Tell whether the true update of that version was here."""
        return digest in self._remade

    def next(self) -> SignedVersion | None:
        """Find a false version that our next one is to repair; None: there is none."""
        oldest = self._chain.head.number + 1 - WITHIN_VERSIONS
        for digest in self._remade:
            version = self._chain.find(digest)
            if version is not None and version.header.number >= oldest and not self._chain.repaired(digest):
                return version
        return None

    def fault(self, header: VersionHeader) -> VersionFault | None:
        """Say what is wrong with the repair that a child of our head states, if it states one."""
        digest, chain = header.repairs, self._chain
        if digest is None:
            return None
        if not self._shared.config.audited or chain.repaired(digest):
            return VersionFault.FALSE_REPAIR
        version = chain.find(digest)
        if version is not None:
            too_old = version.header.number < header.number - WITHIN_VERSIONS
            return VersionFault.FALSE_REPAIR if too_old else None
        # Only whoever has all of them can tell that there is no such version.
        recent = range(max(0, header.number - WITHIN_VERSIONS), header.number)
        has_all = all(chain.logged(number) is not None for number in recent)
        return VersionFault.FALSE_REPAIR if has_all else None
