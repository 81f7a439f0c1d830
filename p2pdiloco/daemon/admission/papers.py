"""Papers of a run's members: grants and notices by its owner, admissions by whoever holds a grant's key.

All of them are judged offline: by signatures, and the owner's peer id, which the run id covers. A clock is
asked at the door only (`daemon.admission.register`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Protocol, TypeVar

import msgspec
from msgspec import Meta, structs

from p2pdiloco.core.api.config import MAX_AMENDMENTS, Amendment
from p2pdiloco.core.api.reasons import Reason
from p2pdiloco.core.api.types import PeerId, RunId, Signature, Vouch, Wire, signed_bytes
from p2pdiloco.errors import RemoteError, UserError
from p2pdiloco.util import direct_members

MAX_USES = 1024
MAX_LISTED = 1024
"""Entries of each list of a notice."""
MAX_NOTICE_BYTES = 128 * 1024
MAX_ADMISSION_BYTES = 1024
Verify = Callable[[str, bytes, bytes], bool]
"""(peer id, message, signature) -> whether that peer signed it; never raises (`identity.verify`)."""


@direct_members
class AdmissionFault(Reason):
    """Reasons for which a peer is not admitted."""

    NOT_SHOWN = "admission-not-shown", "this run takes members by invite only"
    NOT_LISTED = "not-on-the-list", "this run's owner has not put this node on its list"
    OTHER_RUN = "admission-other-run", "the invite is of another run"
    OTHER_PEER = "admission-other-peer", "the admission is another node's"
    GRANT_SIGNATURE = "grant-signature", "the invite is not signed by this run's owner"
    ADMISSION_SIGNATURE = "admission-signature", "the admission is not signed with the invite's key"
    EXPIRED = "invite-expired", "the invite has expired"
    USED_UP = "invite-used-up", "as many nodes as the invite is for have used it"
    REVOKED = "invite-revoked", "this run's owner has revoked the invite"
    BANNED = "banned", "this run's owner has banned this node"
    EXCLUDED = "excluded", "there is a proof that this node lied"
    FULL = "register-full", "as many members as a node remembers have been admitted"


class Grant(Wire, frozen=True):
    """Word of a run's owner: whoever has this key may let so many nodes in, until then."""

    run: RunId
    key: PeerId
    """Peer id of the invite's key; the owner's own: nobody else can use it, and it is never used up."""
    expires: Annotated[int, Meta(ge=0, le=1 << 53)]
    """Unix time in seconds; 0: never. Judged where a peer is seen for the first time, and never again."""
    uses: Annotated[int, Meta(ge=1, le=MAX_USES)]
    signature: Signature


class Admission(Wire, frozen=True):
    """Grant made out to one peer."""

    grant: Grant
    peer: PeerId
    signature: Signature
    """Signature with the grant's key."""


class Notice(Wire, frozen=True):
    """Living document of a run's owner; the one with the highest sequence holds."""

    run: RunId
    sequence: Annotated[int, Meta(ge=1, le=1 << 53)]
    banned: Annotated[tuple[PeerId, ...], Meta(max_length=MAX_LISTED)] = ()
    revoked: Annotated[tuple[PeerId, ...], Meta(max_length=MAX_LISTED)] = ()
    """Keys of grants that are void, with all admissions by them."""
    members: Annotated[tuple[PeerId, ...], Meta(max_length=MAX_LISTED)] = ()
    """Peers that are admitted where the manifest says `mode = "list"`."""
    vouch: Annotated[tuple[Vouch, ...], Meta(max_length=MAX_LISTED)] = ()
    """Versions, and members, that newcomers start from."""
    amendments: Annotated[tuple[Amendment, ...], Meta(max_length=MAX_AMENDMENTS)] = ()
    """Changes of the run on its way."""
    signature: Signature = b""


NOTICE_WORDS = (
    "banned %(banned)d, revoked invites %(revoked)d, listed %(listed)d, versions vouched for %(vouched)d, "
    "amendments %(amendments)d"
)


def notice_figures(notice: Notice) -> dict[str, int]:
    """Count what is in a notice, for `NOTICE_WORDS`."""
    return {
        "banned": len(notice.banned),
        "revoked": len(notice.revoked),
        "listed": len(notice.members),
        "vouched": len(notice.vouch),
        "amendments": len(notice.amendments),
    }


class Signs(Protocol):
    """Key that signs (`identity.Identity`)."""

    peer_id: str

    def sign(self, message: bytes) -> bytes:
        """Sign the message."""


P = TypeVar("P", Grant, Admission, Notice)
_DOMAINS: dict[type, str] = {Grant: "grant", Admission: "admission", Notice: "notice"}
_encoder = msgspec.msgpack.Encoder()


def _covered(paper: Grant | Admission | Notice) -> bytes:
    return signed_bytes(_DOMAINS[type(paper)], structs.replace(paper, signature=b""))


def signed(paper: P, key: Signs) -> P:
    """Sign a paper."""
    return structs.replace(paper, signature=key.sign(_covered(paper)))


def grant(run: str, key: str, expires: int, uses: int, owner: Signs) -> Grant:
    """Make a grant, as the run's owner."""
    return signed(Grant(run, key, expires, uses, b""), owner)


def admission(granted: Grant, peer: str, key: Signs) -> Admission:
    """Make an admission with a grant's key."""
    return signed(Admission(granted, peer, b""), key)


def grant_fault(granted: Grant, run: str, owner: str, verify: Verify) -> AdmissionFault | None:
    """Judge a grant by itself; None: it is sound."""
    if granted.run != run:
        return AdmissionFault.OTHER_RUN
    if not verify(owner, _covered(granted), granted.signature):
        return AdmissionFault.GRANT_SIGNATURE
    return None


def admission_fault(
    shown: Admission, peer: str, run: str, owner: str, verify: Verify
) -> AdmissionFault | None:
    """Judge an admission that `peer` shows by itself; None: it is sound."""
    if shown.peer != peer:
        return AdmissionFault.OTHER_PEER
    fault = grant_fault(shown.grant, run, owner, verify)
    if fault is None and not verify(shown.grant.key, _covered(shown), shown.signature):
        return AdmissionFault.ADMISSION_SIGNATURE
    return fault


def is_true_notice(notice: Notice, run: str, owner: str, verify: Verify) -> bool:
    """Tell whether the run's owner made this notice."""
    return notice.run == run and verify(owner, _covered(notice), notice.signature)


def encode_notice(notice: Notice) -> bytes:
    """Encode a notice. Raises: UserError (it is larger than members take)."""
    data = _encoder.encode(notice)
    if len(data) > MAX_NOTICE_BYTES:
        raise UserError(
            f"the notice has {len(data)} bytes, and may have {MAX_NOTICE_BYTES}",
            "take entries out of it that are not needed any more: p2pdiloco unban, or a new run",
        )
    return data


def decode_notice(data: bytes) -> Notice:
    """Decode a notice; who signed it is another question. Raises: RemoteError ("notice-garbage")."""
    if len(data) > MAX_NOTICE_BYTES:
        raise RemoteError("notice-garbage", f"{len(data)} bytes")
    try:
        return msgspec.msgpack.decode(data, type=Notice)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise RemoteError("notice-garbage", str(error)[:120]) from error
