"""Statements of members on versions that they made again: accusations, and what refutes one.

A false merge does not fit into a proof: its contributions are needed. But each has a digest, and the same
merge has the same bits everywhere. So whoever hears an accusation makes the merge again for itself: one of
the two, its syncer or the accuser, has signed something false. So it is with the state that a version states.

Rules: docs/protocol/audits.md, section 3.
"""

from __future__ import annotations

import hashlib
from typing import ClassVar

from p2pdiloco.core.api.partials import PartialLabel
from p2pdiloco.core.api.proofs import Proof, SignedShort, TwoVersions, TwoVotes, Verify
from p2pdiloco.core.api.reasons import CastOutWhy
from p2pdiloco.core.api.types import Count, Digest, PeerId, Signature, Wire, signed_bytes


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
    """Statement of a member that made a merge, or an outer step, itself: what was stated is false."""

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


def cause_of(evidence: Evidence) -> CastOutWhy:
    """Tell why a member may have done that without meaning to. Two lives of one identity sign two of the
    same thing; anything else that is false comes of no copy."""
    signed_two = isinstance(evidence, TwoVersions | TwoVotes)
    return CastOutWhy.TWO_LIVES if signed_two else CastOutWhy.UNSOUND


"""Evidence for which a member is excluded: a proof, or a statement of our own, or of most who vote."""
