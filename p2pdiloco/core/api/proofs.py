"""Proofs: records by which anybody can check that a member lied. Each depends on nothing but itself.

Rules: docs/protocol/proofs.md, section 2.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Annotated

from msgspec import Meta

from p2pdiloco.core.api import merkle
from p2pdiloco.core.api.types import (
    Contributor,
    Digest,
    PeerId,
    Signature,
    Vote,
    Wire,
    signed_bytes,
)
from p2pdiloco.core.api.versions import ShortHeader, SignedVersion, VersionHeader

MAX_PROOFS = 256
"""Limit of proofs that a node keeps: one a culprit."""
MAX_WAY = 20
"""Limit of steps from a contributor to the root: more than `MAX_CONTRIBUTORS` ask for."""
Verify = Callable[[PeerId, bytes, bytes], bool]
"""Check of (signer, message, signature), as `Crypto.verify`."""


class SignedShort(Wire, frozen=True):
    """Short header of a version with its syncer's signature: what the version's own signature covers."""

    header: ShortHeader
    signature: Signature

    def signed(self, verify: Verify) -> bool:
        """Tell whether its syncer signed it."""
        return verify(self.header.syncer, signed_bytes("version", self.header), self.signature)


def short_of(version: SignedVersion) -> SignedShort:
    """Make the short form of a signed version."""
    return SignedShort(version.header.short(), version.signature)


class TwoVersions(Wire, frozen=True, tag=True):
    """Two versions that a syncer made of one parent in one term."""

    first: SignedShort
    second: SignedShort

    def culprit(self) -> PeerId:
        """Name the member that lied, if the proof holds."""
        return self.first.header.syncer

    def words(self) -> str:
        """Say for people what it did."""
        header = self.first.header
        return f"it signed two versions {header.number} of fragment {header.fragment}"

    def holds(self, run: str, verify: Verify) -> bool:
        """Tell whether it proves what it says. At most two signatures are checked."""
        one, other = self.first.header, self.second.header
        same = _place(one) == _place(other) and one.run == run and one.digest() != other.digest()
        return same and self.first.signed(verify) and self.second.signed(verify)


class TwoVotes(Wire, frozen=True, tag=True):
    """Two votes of one voter for different candidates, in one term of one group and fragment."""

    first: Vote
    second: Vote

    def culprit(self) -> PeerId:
        """Name the member that lied, if the proof holds."""
        return self.first.body.voter

    def words(self) -> str:
        """Say for people what it did."""
        body = self.first.body
        return f"it voted twice in term {body.term} of fragment {body.fragment}"

    def holds(self, run: str, verify: Verify) -> bool:
        """Tell whether it proves what it says. At most two signatures are checked."""
        one, other = self.first.body, self.second.body
        ballot = one.run, one.group, one.fragment, one.term, one.voter
        same = ballot == (run, other.group, other.fragment, other.term, other.voter) and other.run == run
        return same and one.candidate != other.candidate and _signed_both(self.first, self.second, verify)


class FalseLabel(Wire, frozen=True, tag=True):
    """Version with a contribution that its learner did not sign as it stands there. The syncer made it."""

    version: SignedShort
    part: Contributor
    way: Annotated[tuple[tuple[bool, Digest], ...], Meta(max_length=MAX_WAY)]
    """Way from the contribution to the root in the short header (`core.api.merkle`)."""

    def culprit(self) -> PeerId:
        """Name the member that lied, if the proof holds."""
        return self.version.header.syncer

    def words(self) -> str:
        """Say for people what it did."""
        header = self.version.header
        where = f"version {header.number} of fragment {header.fragment}"
        return f"it put work that its learner did not sign into {where}"

    def holds(self, run: str, verify: Verify) -> bool:
        """Tell whether it proves what it says. At most two signatures are checked."""
        header, part = self.version.header, self.part
        if header.run != run or merkle.root_of(part.named(), self.way) != header.contributors:
            return False
        if not self.version.signed(verify):
            return False
        work = part.work(run, header.fragment)
        return not verify(part.learner, signed_bytes("work", work), part.signature)


Proof = TwoVersions | TwoVotes | FalseLabel


def two_versions(ours: SignedVersion | None, other: SignedVersion | SignedShort) -> TwoVersions | None:
    """Make the proof that these two are, if the same syncer made them of one parent in one term. Whether they
    are signed is not looked at."""
    if ours is None or _place(ours.header) != _place(other.header):
        return None
    if ours.header.digest() == other.header.digest():
        return None
    return TwoVersions(short_of(ours), other if isinstance(other, SignedShort) else short_of(other))


def false_label(version: SignedVersion, index: int) -> FalseLabel:
    """Make the proof that a version's contributor of that index is there without its learner's signature."""
    parts = version.header.contributors
    way = merkle.path([part.named() for part in parts], index)
    return FalseLabel(short_of(version), parts[index], way)


def fingerprint(culprits: frozenset[str] | set[str]) -> int:
    """Compute a number by which two nodes see whether they know of the same culprits; 0: of none."""
    digests = (hashlib.sha256(peer.encode()).digest() for peer in culprits)
    return sum(int.from_bytes(digest[:7], "big") for digest in digests) % (1 << 56)


def _place(header: ShortHeader | VersionHeader) -> tuple[str, str, int, bytes, int, str]:
    return header.run, header.group, header.fragment, header.parent, header.term, header.syncer


def _signed_both(first: Vote, second: Vote, verify: Verify) -> bool:
    return all(verify(v.body.voter, signed_bytes("vote", v.body), v.signature) for v in (first, second))
