"""False states: versions of one fragment whose headers state another state than their update makes.

Whoever stands on a version knows to the bit which state an update makes of it. A syncer could state the right
update and a false digest, and everybody would copy a state of its choosing. So such a version is refused,
what comes after it by the same syncer is not copied, and the syncer is accused before all.

Rules: docs/protocol/audits.md, section 6.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from p2pdiloco.core.api.events import UpdateApplied
from p2pdiloco.core.api.proofs import short_of
from p2pdiloco.core.api.reasons import VersionFault
from p2pdiloco.core.api.statements import Accusation, FalseState
from p2pdiloco.core.api.versions import SignedVersion, VersionHeader
from p2pdiloco.core.chain.chain import Chain
from p2pdiloco.core.shared import Shared
from p2pdiloco.util import BoundedDict

MAX_FALSE = 16


class Holders(Protocol):
    """Question to what members name (`core.following.heads`)."""

    def holders(self, digest: bytes) -> list[str]:
        """List the members whose head is that version."""


class FalseStates:
    """Versions of a fragment that have a false state, as this node found."""

    def __init__(self, shared: Shared, chain: Chain) -> None:
        self._shared, self._chain = shared, chain
        self._found: BoundedDict[bytes, tuple[str, int]] = BoundedDict(MAX_FALSE)
        """Digest of each false version -> its syncer and number."""

    def __contains__(self, digest: object) -> bool:
        """Tell whether the version of that digest has a false state."""
        return digest in self._found

    def builds_on(self, header: VersionHeader) -> bool:
        """Tell whether a version is false, or may be made by the same syncer of a false one."""
        found = self._found.values()
        return any(syncer == header.syncer and number <= header.number for syncer, number in found)

    def restore(self, subject: FalseState) -> None:
        """Take up what this node found before its restart: others may hold that state still."""
        self._found[subject.version_digest()] = subject.maker(), subject.number

    def made_here(self, subject: FalseState) -> bool:
        """Tell whether we made the outer step of that version ourselves, with the state that it states. Who
        copied a state has not its parent in its log; of a version of our own our word says nothing."""
        here = subject.maker() != self._shared.me and self._chain.knows(
            subject.number, subject.version_digest()
        )
        return here and self._chain.logged(subject.number - 1) is not None

    def judge(
        self, applied: UpdateApplied, version: SignedVersion, heads: Holders, now: float
    ) -> VersionFault | None:
        """Say why a version whose outer step was made here is not taken; None: it is. Accuse who lied."""
        header = version.header
        if applied.unsound:
            return VersionFault.OUT_OF_SCALE
        if applied.state_digest == header.state_digest and self._chain.is_child(header):
            return None
        if not applied.certain or self._accepted_by_most(header, heads.holders(header.digest())):
            return VersionFault.DIGEST_DIFFERS
        self._accuse(version, now)
        return VersionFault.FALSE_STATE

    def _accepted_by_most(self, header: VersionHeader, holders: Iterable[str]) -> bool:
        """Tell whether most who vote, and we, stand on that version, its syncer and who is excluded aside:
        then it is we who are wrong. We count without a vote as well: one member of two that vote may be
        its syncer's friend."""
        shared = self._shared
        voters = self._chain.marks.voters.difference(shared.excluded.peers, (header.syncer,)) | {shared.me}
        return 2 * len(voters.intersection(holders)) > len(voters)

    def _accuse(self, version: SignedVersion, now: float) -> None:
        """Refuse a version from now on, and accuse its syncer, which excludes it here."""
        shared, header, subject = self._shared, version.header, FalseState(short_of(version))
        self._found[header.digest()] = header.syncer, header.number
        for accusation in shared.accusations.of(subject.digest()):
            shared.accusations.settled(accusation)
        shared.distrust.add(header.syncer, now)
        shared.excluded.found(Accusation(subject, shared.me, shared.sign("accusation", subject)))
