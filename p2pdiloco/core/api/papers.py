"""Papers that change seats: words of a run's owner or of its seats, admissions by invite, and proofs of lies.

A `Grant` lets whoever has its key admit peers, by an `Admission` each. A `Word` gives or ends one seat. A
`Proof` shows that a seat lied. All are judged by signatures alone: the run id covers the owner's peer id, and
that of its recovery key. Versions carry papers (`core.chain.Marks.after`); doors ask for admissions
(`daemon.admission`).

Rules: docs/protocol/seats.md, section 1; docs/protocol/belief.md, section 2; docs/protocol/proofs.md,
section 2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, structs

from p2pdiloco.core.api.reasons import AdmissionFault
from p2pdiloco.core.api.types import (
    Attestation,
    Contributor,
    Count,
    Digest,
    HeaderStart,
    PeerId,
    RunId,
    ShortHeader,
    Signature,
    Verify,
    Vote,
    Wire,
    WorkLabel,
    merkle_root_of,
    signed_bytes,
)

MAX_USES = 1024
MAX_PAPERS = 64
"""Limit of the signatures on papers of one version."""
MAX_WAY = 20
"""Limit of steps from a contributor to the root: more than `MAX_CONTRIBUTORS` ask for."""
Number = Annotated[int, Meta(ge=1, le=1 << 53)]
RECOVERY_FROM = 1 << 52
"""Number from which on notices and words are signed with the owner's recovery key, and no others any more."""
LEAP = 1 << 32
"""Limit by which the number of a word is above the highest of a table: more than notices have in centuries,
and so little that a thief of the owner's key does not come to the last number."""
THE_OWNER = ""
"""Author of a word that is the owner's: the key that its number says signed it (`owner_of`)."""


class Grant(Wire, frozen=True):
    """Word of a run's owner: whoever has this key may let so many nodes in, until then."""

    run: RunId
    key: PeerId
    """Peer id of the invite's key; the owner's own: nobody else can use it, and it is never used up."""
    expires: Annotated[int, Meta(ge=0, le=1 << 53)]
    """Unix time in seconds; 0: never. Judged where a peer is seen for the first time, and never again."""
    uses: Annotated[int, Meta(ge=1, le=MAX_USES)]
    signature: Signature


class Admission(Wire, frozen=True, tag="admission"):
    """Grant made out to one peer."""

    grant: Grant
    peer: PeerId
    signature: Signature
    """Signature with the grant's key."""


class Word(Wire, frozen=True, tag="word"):
    """Word on one seat, of the run's owner or of seats; of several the one with the highest number holds."""

    run: RunId
    peer: PeerId
    """Peer that has the seat; of a word that ends it, also the key of an invite: nobody is seated by that any
    more."""
    number: Annotated[int, Meta(ge=0, le=1 << 53)]
    """Number among the owner's words, from 1; of seats' words, that of the owner's newest on this seat."""
    seated: bool
    """False: the seat ends."""
    replaces: Annotated[str, Meta(max_length=80)] = ""
    """Peer whose seat ends with this one's beginning; empty: nobody's. Of an invite's end, its key: the seats
    that it gave stay."""
    turn: Count = 0
    """Number among the words of seats since the owner's newest; 0: it is the owner's."""
    signatures: Annotated[
        tuple[tuple[Annotated[str, Meta(max_length=80)], Signature], ...], Meta(max_length=MAX_PAPERS)
    ] = ()
    """Authors, with their signatures: `THE_OWNER` alone, or seats."""

    @property
    def authors(self) -> frozenset[str]:
        """Peers that say so."""
        return frozenset(author for author, _ in self.signatures)

    @property
    def order(self) -> tuple[int, int]:
        """Order of the words on one seat."""
        return self.number, self.turn


class SignedShort(Wire, frozen=True):
    """Short header of a version with its syncer's signature: what the version's own signature covers."""

    header: ShortHeader
    signature: Signature

    def signed(self, verify: Verify) -> bool:
        """Tell whether its syncer signed it."""
        return verify(self.header.syncer, signed_bytes("version", self.header), self.signature)


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
        same = place_of(one) == place_of(other) and one.run == run and one.digest() != other.digest()
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
    """Way from the contribution to the root in the short header (`core.api.types.merkle_root`)."""

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
        if header.run != run or merkle_root_of(part.named(), self.way) != header.contributors:
            return False
        if not self.version.signed(verify):
            return False
        work = part.work(run, header.fragment)
        return not verify(part.learner, signed_bytes("work", work), part.signature)


class SignedWork(Wire, frozen=True):
    """Label of a learner's work, which may attest milestones, with its signature."""

    label: WorkLabel
    signature: Signature

    def signed(self, verify: Verify) -> bool:
        """Tell whether its learner signed it."""
        return verify(self.label.learner, signed_bytes("work", self.label), self.signature)


class TwoAttestations(Wire, frozen=True, tag=True):
    """Two attestations of one seat that an honest one never makes: two of one height, or one around the
    other."""

    first: SignedWork
    second: SignedWork

    def culprit(self) -> PeerId:
        """Name the member that lied, if the proof holds."""
        return self.first.label.learner

    def words(self) -> str:
        """Say for people what it did."""
        return f"it attested two histories of fragment {self.first.label.fragment}"

    def holds(self, run: str, verify: Verify) -> bool:
        """Tell whether it proves what it says. At most two signatures are checked."""
        one, other = self.first.label, self.second.label
        if (one.run, one.fragment, one.learner) != (run, other.fragment, other.learner) or other.run != run:
            return False
        return excludes(one.attestation, other.attestation) and all(
            work.signed(verify) for work in (self.first, self.second)
        )


def excludes(one: Attestation | None, other: Attestation | None) -> bool:
    """Tell whether no honest seat makes both."""
    if one is None or other is None or one == other:
        return False
    low, high = sorted((one, other), key=lambda each: each.target.number)
    return low.target.number == high.target.number or high.source.number < low.source.number


Proof = TwoVersions | TwoVotes | FalseLabel | TwoAttestations
Paper = Admission | Word | Proof


def place_of(header: HeaderStart) -> tuple[str, str, int, bytes, int, str]:
    """Find what two versions of one honest syncer never share."""
    return header.run, header.group, header.fragment, header.parent, header.term, header.syncer


def _signed_both(first: Vote, second: Vote, verify: Verify) -> bool:
    return all(verify(v.body.voter, signed_bytes("vote", v.body), v.signature) for v in (first, second))


def paper_bytes(paper: Wire) -> bytes:
    """Make the bytes that a paper's signatures cover: all but those, in the domain of its type."""
    nothing = {"signatures": ()} if isinstance(paper, Word) else {"signature": b""}
    unsigned: Wire = structs.replace(paper, **nothing)
    return signed_bytes(type(paper).__name__.lower(), unsigned)


NUMBERS_FROM_S, NUMBERS_PER_H = 1767225600, 1024
"""Unix time from which on the numbers of notices and of their words grow by so many an hour at most. What
members have heard is no measure: whoever was away would never hear the owner again."""


def is_timely(number: int, now_s: float) -> bool:
    """Tell whether a notice, or a word in it, can have this number at that Unix time: numbers end, and a
    thief of the owner's key would else say the last one."""
    return number % RECOVERY_FROM <= NUMBERS_PER_H * max(1.0, (now_s - NUMBERS_FROM_S) / 3600)


def signatures_of(paper: Paper) -> int:
    """Count the signatures by which a paper is judged."""
    return len(paper.signatures) if isinstance(paper, Word) else 1


def owner_of(number: int, owners: Sequence[str]) -> str:
    """Find the key that signs the owner's words and notices of that number; empty: none. `owners`: peer ids
    of the owner's key, and of its recovery key where there is one."""
    return dict(enumerate(owners)).get(int(number >= RECOVERY_FROM), "")


def grant_fault(granted: Grant, run: str, owners: Sequence[str], verify: Verify) -> AdmissionFault | None:
    """Judge a grant by itself; None: it is sound."""
    if granted.run != run:
        return AdmissionFault.OTHER_RUN
    said = paper_bytes(granted)
    if not any(verify(owner, said, granted.signature) for owner in owners):
        return AdmissionFault.GRANT_SIGNATURE
    return None


def admission_fault(
    shown: Admission, peer: str, run: str, owners: Sequence[str], verify: Verify
) -> AdmissionFault | None:
    """Judge an admission that `peer` shows by itself; None: it is sound."""
    if shown.peer != peer:
        return AdmissionFault.OTHER_PEER
    fault = grant_fault(shown.grant, run, owners, verify)
    if fault is None and not verify(shown.grant.key, paper_bytes(shown), shown.signature):
        return AdmissionFault.ADMISSION_SIGNATURE
    return fault


def is_sound(paper: Paper, run: str, owners: Sequence[str], verify: Verify) -> bool:
    """Tell whether a paper is what it says it is; whether it counts is another question. `owners`: see
    `owner_of`."""
    if isinstance(paper, Admission):
        return admission_fault(paper, paper.peer, run, owners, verify) is None
    if not isinstance(paper, Word):
        return paper.holds(run, verify)
    authors, said = paper.authors, paper_bytes(paper)
    if paper.run != run or len(authors) != len(paper.signatures) or not authors:
        return False
    if THE_OWNER in authors if paper.turn else authors != {THE_OWNER}:
        return False
    keys = [(author or owner_of(paper.number, owners), by) for author, by in paper.signatures]
    return all(key and verify(key, said, by) for key, by in keys)
