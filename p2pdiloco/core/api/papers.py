"""Papers of a run's members: what its owner, or the key of an invite, signs of who has a seat.

A `Grant` lets whoever has its key admit peers, by an `Admission` each. A `Word` of the owner gives or ends
one seat. All are judged by signatures alone: the run id covers the owner's peer id. Versions carry papers
(`core.chain.Marks.after`); doors ask for admissions (`daemon.admission`).

Rules: docs/protocol/seats.md, section 1; docs/protocol/trust.md, section 1.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, structs

from p2pdiloco.core.api.reasons import AdmissionFault
from p2pdiloco.core.api.types import PeerId, RunId, Signature, Verify, Wire, signed_bytes

MAX_USES = 1024
MAX_PAPERS = 64
"""Papers of one version."""
Number = Annotated[int, Meta(ge=1, le=1 << 53)]


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
    """Word of a run's owner on one seat; of several the one with the highest number holds."""

    run: RunId
    peer: PeerId
    """Peer that has the seat; of a word that ends it, also the key of an invite: nobody is seated by that any
    more."""
    number: Number
    seated: bool
    """False: the seat ends."""
    replaces: Annotated[str, Meta(max_length=80)] = ""
    """Peer whose seat ends with this one's beginning; empty: nobody's."""
    signature: Signature = b""


Paper = Admission | Word


def paper_bytes(paper: Wire) -> bytes:
    """Make the bytes that a paper's signature covers: all but its `signature`, in the domain of its type."""
    unsigned: Wire = structs.replace(paper, signature=b"")
    return signed_bytes(type(paper).__name__.lower(), unsigned)


def grant_fault(granted: Grant, run: str, owner: str, verify: Verify) -> AdmissionFault | None:
    """Judge a grant by itself; None: it is sound."""
    if granted.run != run:
        return AdmissionFault.OTHER_RUN
    if not verify(owner, paper_bytes(granted), granted.signature):
        return AdmissionFault.GRANT_SIGNATURE
    return None


def admission_fault(
    shown: Admission, peer: str, run: str, owner: str, verify: Verify
) -> AdmissionFault | None:
    """Judge an admission that `peer` shows by itself; None: it is sound."""
    if shown.peer != peer:
        return AdmissionFault.OTHER_PEER
    fault = grant_fault(shown.grant, run, owner, verify)
    if fault is None and not verify(shown.grant.key, paper_bytes(shown), shown.signature):
        return AdmissionFault.ADMISSION_SIGNATURE
    return fault


def is_sound(paper: Paper, run: str, owner: str, verify: Verify) -> bool:
    """Tell whether a paper is what it says it is; whether it counts is another question."""
    if isinstance(paper, Admission):
        return admission_fault(paper, paper.peer, run, owner, verify) is None
    return paper.run == run and verify(owner, paper_bytes(paper), paper.signature)
