"""Evidence that a member lied: proofs that anybody can check, and statements of members that made a merge
again.

A proof depends on nothing but itself (docs/protocol/proofs.md, section 2).
"""

from __future__ import annotations

import hashlib
from typing import ClassVar

from p2pdiloco.core.api.papers import (
    FalseLabel,
    Proof,
    SignedShort,
    TwoAttestations,
    TwoVersions,
    TwoVotes,
    place_of,
)
from p2pdiloco.core.api.reasons import CastOutWhy
from p2pdiloco.core.api.types import (
    Count,
    Digest,
    PeerId,
    Signature,
    Verify,
    Wire,
    merkle_path,
    signed_bytes,
)
from p2pdiloco.core.api.versions import PartialLabel, SignedVersion

MAX_PROOFS = 256
"""Limit of proofs that a node keeps: one a culprit."""


def short_of(version: SignedVersion) -> SignedShort:
    """Make the short form of a signed version."""
    return SignedShort(version.header.short(), version.signature)


def two_versions(ours: SignedVersion | None, other: SignedVersion | SignedShort) -> TwoVersions | None:
    """Make the proof that these two are, if the same syncer made them of one parent in one term. Whether they
    are signed is not looked at."""
    if ours is None or place_of(ours.header) != place_of(other.header):
        return None
    if ours.header.digest() == other.header.digest():
        return None
    return TwoVersions(short_of(ours), other if isinstance(other, SignedShort) else short_of(other))


def false_label(version: SignedVersion, index: int) -> FalseLabel:
    """Make the proof that a version's contributor of that index is there without its learner's signature."""
    parts = version.header.contributors
    way = merkle_path([part.named() for part in parts], index)
    return FalseLabel(short_of(version), parts[index], way)


def fingerprint(culprits: frozenset[str] | set[str]) -> int:
    """Compute a number by which two nodes see whether they know of the same culprits; 0: of none."""
    digests = (hashlib.sha256(peer.encode()).digest() for peer in culprits)
    return sum(int.from_bytes(digest[:7], "big") for digest in digests) % (1 << 56)


class FalseVersion(Wire, frozen=True, tag=True):
    """Version whose update is said not to be the merge of what it names: contributions, or partial merges of
    groups."""

    IS_FALSE: ClassVar[str] = "is not the merge of what it names"
    IS_RIGHT: ClassVar[str] = "is the merge of what it names"
    version: SignedShort

    @property
    def run(self) -> str:
        """Run to which it belongs."""
        return self.version.header.run

    @property
    def fragment(self) -> int:
        """Fragment in whose chain it is."""
        return self.version.header.fragment

    @property
    def number(self) -> int:
        """Number of the version."""
        return self.version.header.number

    def version_digest(self) -> bytes:
        """Name the version in which it is: itself."""
        return self.version.header.digest()

    def digest(self) -> bytes:
        """Compute the digest that names what is accused."""
        return self.version.header.digest()

    def maker(self) -> PeerId:
        """Name the member that made it."""
        return self.version.header.syncer

    def signed(self, verify: Verify) -> bool:
        """Tell whether its maker signed it. One signature is checked."""
        return self.version.signed(verify)

    def words(self) -> str:
        """Name it for people."""
        return f"version {self.number} of fragment {self.fragment}"


class FalseState(FalseVersion, frozen=True, tag=True):
    """Version whose state is said not to be what its update makes of its parent's: whoever stands on the
    parent makes that step, too."""

    IS_FALSE: ClassVar[str] = "has another state than its update makes"
    IS_RIGHT: ClassVar[str] = "has the state that its update makes"

    def digest(self) -> bytes:
        """Compute the digest that names what is accused."""
        return hashlib.sha256(b"state" + self.version.header.digest()).digest()


class FalsePartial(Wire, frozen=True, tag=True):
    """Partial merge of a group whose sums are said not to be those of the contributions that it names.

    Where it is found is the accuser's word: its label names what is accused, and whoever finds that there
    makes it again."""

    IS_FALSE: ClassVar[str] = FalseVersion.IS_FALSE
    IS_RIGHT: ClassVar[str] = FalseVersion.IS_RIGHT
    number: Count
    """Number of the version in which it is."""
    version: Digest
    """Digest of that version."""
    label: PartialLabel
    signature: Signature
    """Signature of the label, as of a `MergedPartial`."""

    @property
    def run(self) -> str:
        """Run to which it belongs."""
        return self.label.run

    @property
    def fragment(self) -> int:
        """Fragment in whose chain it is."""
        return self.label.fragment

    def version_digest(self) -> bytes:
        """Name the version in which it is."""
        return self.version

    def digest(self) -> bytes:
        """Compute the digest that names what is accused."""
        return label_digest(self.label)

    def maker(self) -> PeerId:
        """Name the member that made it."""
        return self.label.syncer

    def signed(self, verify: Verify) -> bool:
        """Tell whether its maker signed it. One signature is checked."""
        return verify(self.label.syncer, signed_bytes("partial", self.label), self.signature)

    def words(self) -> str:
        """Name it for people."""
        return f"the partial merge of group {self.label.group} of fragment {self.fragment}"


def label_digest(label: PartialLabel) -> bytes:
    """Compute the digest that names a partial merge."""
    return hashlib.sha256(b"partial" + label.named()).digest()


Subject = FalseVersion | FalseState | FalsePartial
"""Subject of an accusation."""


class Accusation(Wire, frozen=True, tag=True):
    """Statement of a member that made a merge, or an outer step, itself: what was stated is false.

    A false merge does not fit into a proof: its contributions are needed. But each has a digest, and the same
    merge has the same bits everywhere. So every node that hears an accusation makes the merge again for
    itself: one of the two, its syncer or the accuser, has signed something false. So it is with the state
    that a version states.

    Rules: docs/protocol/audits.md, section 3.
    """

    subject: Subject
    accuser: PeerId
    signature: Signature

    @property
    def accusation(self) -> Accusation:
        """The accusation in question: this one."""
        return self

    def author(self) -> PeerId:
        """Name the member that states it."""
        return self.accuser

    def culprit(self) -> PeerId:
        """Name the member that lied, if it is true."""
        return self.subject.maker()

    def words(self) -> str:
        """Say for people what it did."""
        return f"{self.subject.words()} {self.subject.IS_FALSE}"

    def holds(self, run: str, verify: Verify) -> bool:
        """Tell whether all is signed: not whether it is true. Two signatures are checked."""
        subject = self.subject
        right = subject.run == run and self.accuser != subject.maker()
        signed = right and verify(self.accuser, signed_bytes("accusation", subject), self.signature)
        return signed and subject.signed(verify)


class Refutation(Wire, frozen=True, tag=True):
    """Statement of a member that made it again, too: what is accused is right, and the accuser lied."""

    accusation: Accusation
    witness: PeerId
    signature: Signature

    def author(self) -> PeerId:
        """Name the member that states it."""
        return self.witness

    def culprit(self) -> PeerId:
        """Name the member that lied, if it is true."""
        return self.accusation.accuser

    def words(self) -> str:
        """Say for people what it did."""
        subject = self.accusation.subject
        return f"it accused {subject.words()}, which {subject.IS_RIGHT}"

    def holds(self, run: str, verify: Verify) -> bool:
        """Tell whether all is signed: not whether it is true. Three signatures are checked."""
        right = self.witness != self.accusation.accuser
        signed = right and verify(self.witness, signed_bytes("refutation", self.accusation), self.signature)
        return signed and self.accusation.holds(run, verify)


Statement = Accusation | Refutation
Evidence = Proof | Statement
"""Evidence for which a member is excluded: a proof, or a statement of our own, or of most who vote."""


def cause_of(evidence: Evidence) -> CastOutWhy:
    """Tell why a member may have done that without meaning to. Two lives of one identity sign two of the
    same thing; anything else that is false comes of no copy."""
    signed_two = isinstance(evidence, TwoVersions | TwoVotes | TwoAttestations)
    return CastOutWhy.TWO_LIVES if signed_two else CastOutWhy.UNSOUND
