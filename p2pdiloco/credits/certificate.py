"""Certificates: a signed sentence that a peer did so much of a run, and the peer's proof that it is meant.

Whoever signs has counted the history itself. The owner's signature goes with the run's manifest, whose digest
is the run id: so whoever has the file can tell that it is the owner's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Annotated, Literal, Protocol

import msgspec
from msgspec import Meta, Struct

from p2pdiloco.errors import UserError

MAX_CERTIFICATE_BYTES = 2 * 1024 * 1024
_SIGNED, _PROVEN = b"p2pdiloco/1/credits\0", b"p2pdiloco/1/credits-proof\0"
Text = Annotated[str, Meta(max_length=80)]
Natural = Annotated[int, Meta(ge=0, le=1 << 62)]
Hex = Annotated[str, Meta(max_length=256, pattern="^([0-9a-f]{2})*\\Z")]
ManifestHex = Annotated[str, Meta(max_length=1024 * 1024, pattern="^([0-9a-f]{2})*\\Z")]
Role = Literal["owner", "keeper"]
Verify = Callable[[str, bytes, bytes], bool]


class SigningKey(Protocol):
    """Key of whoever signs."""

    peer_id: str

    def sign(self, message: bytes) -> bytes:
        """Sign the message."""


class CertifiedHead(Struct, frozen=True, forbid_unknown_fields=True):
    """Version of a fragment up to which was counted."""

    number: Natural
    digest: Hex


class CreditCertificate(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """CreditCertificate of one peer's work in one run. Field order is what the signature covers."""

    format: Literal["p2pdiloco-credits-1"] = "p2pdiloco-credits-1"
    run: Text
    run_name: Text
    peer: Text
    """Peer that did the work: whoever has its key can prove to be it."""
    name: Text
    """Name that it had chosen; no proof of anything."""
    tokens: Natural
    """Tokens merged into the run, the mean over fragments."""
    inner_steps: Natural
    contributions: Natural
    run_tokens: Natural
    """Tokens of the whole run by then."""
    from_version: Natural
    """Version from which on was counted; 1: the whole run."""
    heads: Annotated[tuple[CertifiedHead, ...], Meta(max_length=1024)]
    """Versions up to which was counted, by fragment."""
    issued_s: Natural
    signer: Text
    role: Role
    manifest: ManifestHex = ""
    """The run's signed manifest, of an owner's certificate."""
    signature: Hex = ""


def _covered(certificate: CreditCertificate) -> bytes:
    return _SIGNED + msgspec.json.encode(msgspec.structs.replace(certificate, signature=""))


def signed_certificate(certificate: CreditCertificate, key: SigningKey) -> CreditCertificate:
    """Sign a certificate."""
    unsigned = msgspec.structs.replace(certificate, signer=key.peer_id)
    return msgspec.structs.replace(unsigned, signature=key.sign(_covered(unsigned)).hex())


def text_of(certificate: CreditCertificate) -> str:
    """Write a certificate down as JSON that people can read."""
    return msgspec.json.format(msgspec.json.encode(certificate), indent=2).decode() + "\n"


def read_certificate(content: bytes) -> CreditCertificate:
    """Read a certificate. Raises: UserError (it is none)."""
    try:
        return msgspec.json.decode(content[:MAX_CERTIFICATE_BYTES], type=CreditCertificate)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"it is no certificate of credits: {str(error)[:120]}") from error


def is_signed(certificate: CreditCertificate, verify: Verify) -> bool:
    """Tell whether its signer signed it as it is."""
    return verify(certificate.signer, _covered(certificate), bytes.fromhex(certificate.signature))


def _proof_of(certificate: CreditCertificate, word: str) -> bytes:
    digest = hashlib.sha256(_covered(certificate)).digest()
    return _PROVEN + digest + word.encode()


def prove(certificate: CreditCertificate, word: str, key: SigningKey) -> str:
    """Sign a word that somebody chose, as the peer that the certificate is of. Raises: UserError."""
    if key.peer_id != certificate.peer:
        raise UserError(
            f"the certificate is of peer {certificate.peer}, and the key in this folder is {key.peer_id}'s",
            "name the data folder of the node that did the work: --data-dir DIR",
        )
    return key.sign(_proof_of(certificate, word)).hex()


def is_proven(certificate: CreditCertificate, word: str, proof: str, verify: Verify) -> bool:
    """Tell whether the peer that the certificate is of has signed the word."""
    try:
        signature = bytes.fromhex(proof)
    except ValueError:
        return False
    return verify(certificate.peer, _proof_of(certificate, word), signature)
