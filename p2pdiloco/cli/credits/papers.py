"""Certificates on the command line: written by a keeper or the run's owner, checked by anybody."""

from __future__ import annotations

import time
from pathlib import Path

import click

from p2pdiloco.adapters.data_dir import Files
from p2pdiloco.cli.credits.collecting import RunCredits
from p2pdiloco.cli.credits.view import moment
from p2pdiloco.cli.membership.naming import find_peer
from p2pdiloco.cli.membership.reaching import Reached
from p2pdiloco.config.manifest import check_signature, decode_signed, encode_signed, run_id
from p2pdiloco.config.settings import NodeSettings
from p2pdiloco.config.values import expanded
from p2pdiloco.credits import (
    MAX_CERTIFICATE_BYTES,
    CertifiedHead,
    CreditCertificate,
    is_proven,
    is_signed,
    prove,
    read_certificate,
    signed_certificate,
    text_of,
)
from p2pdiloco.daemon.admission import owns
from p2pdiloco.daemon.display.snapshot import count
from p2pdiloco.errors import RemoteError, UserError, clean
from p2pdiloco.identity import Identity, verify

FALSE = 1
"""Exit status of a check that fails."""
MAX_WORD = 200


def own_key(data_dir: Path | None, name: str = "identity.key") -> Identity:
    """Load a key from a node's folder. Raises: UserError, StorageError."""
    path = expanded(data_dir or NodeSettings().data_dir) / name
    if not path.exists():
        raise UserError(f"there is no key {path}", "name a node's data folder: --data-dir DIR")
    return Identity.load_or_create(path)


def certify(found: RunCredits, wanted: str, out: Path, data_dir: Path | None) -> None:
    """Write a certificate of what was counted here. The run's owner signs with its key, others with their
    node's.

    Raises:
        UserError: no such learner, something is not as it should be, or there is no key here.
        StorageError: the file cannot be written.
    """
    if out.exists():
        raise UserError(
            f"{out} exists already", "name another file: what somebody signed is not written over"
        )
    rows = {row.peer: row for row in found.credits.rows}
    peer = find_peer(wanted, rows, Reached(names=found.names), "`p2pdiloco credits` lists all learners")
    if found.is_disputed or found.credits.doubts:
        raise UserError(
            "nothing is certified of a history with doubts", "`p2pdiloco credits --verify` says which"
        )
    is_owner = owns(expanded(data_dir or NodeSettings().data_dir), found.manifest.owner)
    key = own_key(data_dir, "owner.key" if is_owner else "identity.key")
    row = rows[peer]
    certificate = CreditCertificate(
        run=found.run,
        run_name=found.run_name,
        peer=peer,
        name=found.names.get(peer, ""),
        tokens=row.tokens,
        inner_steps=row.inner_steps,
        contributions=row.contributions,
        run_tokens=found.credits.tokens,
        from_version=max(found.credits.missing.values(), default=1),
        heads=tuple(CertifiedHead(tip.number, tip.digest.hex()) for tip in found.tips),
        issued_s=int(time.time()),
        signer=key.peer_id,
        role="owner" if is_owner else "keeper",
        manifest=encode_signed(found.manifest).hex() if is_owner else "",
    )
    text = text_of(signed_certificate(certificate, key))
    Files().save(out, [text.encode()], durable=False)
    click.echo(f"{out}: {words_of(certificate)}\n{signer_words(certificate)}", err=True)


def words_of(certificate: CreditCertificate) -> str:
    """Word what a certificate says."""
    name = f" ({clean(certificate.name)})" if certificate.name else ""
    since = "" if certificate.from_version <= 1 else f", counted from version {certificate.from_version} on"
    tokens = f"{count(certificate.tokens)} tokens ({certificate.tokens})"
    return (
        f"peer {clean(certificate.peer)}{name} has {tokens}, "
        f"{certificate.inner_steps} inner steps and {certificate.contributions} merged contributions in run "
        f"{clean(certificate.run_name)} {clean(certificate.run[:16])}"
        + f", of {count(certificate.run_tokens)} tokens of the run by then{since}"
    )


def load(path: Path) -> CreditCertificate:
    """Load a certificate. Raises: UserError."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_CERTIFICATE_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    return read_certificate(content)


def check(path: Path, word: str, proof: str) -> int:
    """Say what a certificate says, and who says so. Returns the exit status."""
    certificate = load(path)
    if not is_signed(certificate, verify):
        click.echo("false: its signer did not sign this")
        return FALSE
    try:
        who = signer_words(certificate)
    except RemoteError as error:
        click.echo(f"false: it says that the run's owner signed it, and that is not so ({error})")
        return FALSE
    click.echo(words_of(certificate))
    click.echo(who)
    if not proof:
        return 0
    if not is_proven(certificate, word, proof, verify):
        click.echo("false: the proof is not of this peer's key for this word")
        return FALSE
    click.echo(f'whoever gave the proof has the key of the peer, and signed the word "{clean(word)}"')
    return 0


def signer_words(certificate: CreditCertificate) -> str:
    """Say who signed. Raises: RemoteError (it says owner, and is none)."""
    signer, at = clean(certificate.signer), moment(certificate.issued_s)
    if certificate.role == "keeper" and certificate.signer == certificate.peer:
        return f"signed on {at} by that peer itself: nobody else vouches for it"
    if certificate.role == "keeper":
        return f"signed on {at} by peer {signer}, who counted it from the learners' signatures"
    signed = decode_signed(bytes.fromhex(certificate.manifest))
    check_signature(signed, verify)
    if run_id(signed) != certificate.run or signed.owner != certificate.signer:
        raise RemoteError("not-the-owner", "the manifest is of another run or owner")
    return f"signed on {at} by the run's owner {signer}, who counted it from the learners' signatures"


def proof_for(path: Path, word: str, data_dir: Path | None) -> str:
    """Prove with the key in a folder that a certificate is of this peer. Raises: UserError."""
    if not 0 < len(word) <= MAX_WORD:
        raise UserError(f"the word to sign has 1 to {MAX_WORD} characters")
    certificate = load(path)
    if not is_signed(certificate, verify):
        raise UserError("the certificate's signer did not sign it")
    return prove(certificate, word, own_key(data_dir))
