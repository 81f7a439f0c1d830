"""Signed manifests: an owner publishes one, its digest names the run, and a newcomer verifies it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Protocol

import msgspec
from msgspec import Meta, Struct

from p2pdiloco.config.loader import DECODING, MAX_MANIFEST_BYTES, canonical_bytes, manifest_from_canonical
from p2pdiloco.config.manifest import Manifest
from p2pdiloco.errors import RemoteError, StorageError
from p2pdiloco.util import clear_folder_at

MAX_SIGNED_BYTES = MAX_MANIFEST_BYTES + 1024
"""Bytes of a manifest with owner, digest and signature: whatever manifest is allowed can be signed."""
Verify = Callable[[str, bytes, bytes], bool]
"""(peer id, message, signature) -> whether that peer signed it; never raises
(`core.api.types.Crypto.verify`)."""


class Signer(Protocol):
    """The half of `core.api.types.Crypto` that an owner needs."""

    def sign(self, message: bytes) -> bytes:
        """Sign the message; returns the signature."""


class SignedManifest(Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A manifest as it travels and as it lies on disk. Field order is wire format."""

    manifest: Annotated[bytes, Meta(max_length=MAX_MANIFEST_BYTES)]
    """Canonical bytes (`config.loader.canonical_bytes`)."""
    owner: Annotated[str, Meta(min_length=1, max_length=80)]
    """The owner's peer id."""
    genesis_digest: Annotated[bytes, Meta(min_length=32, max_length=32)]
    """SHA-256 over all fragments' version-0 state digests, in order."""
    signature: Annotated[bytes, Meta(max_length=128)]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SignedManifest, strict=True)


def genesis_digest_of(state_digests: tuple[bytes, ...]) -> bytes:
    """SHA-256 over the version-0 state digests (32 bytes each) of all fragments, by index."""
    return hashlib.sha256(b"p2pdiloco/1/genesis\0" + b"".join(state_digests)).digest()


def sign_manifest(manifest: Manifest, genesis_digest: bytes, crypto: Signer, owner: str) -> SignedManifest:
    """Sign as the run's owner; `owner` is the peer id of crypto's key."""
    unsigned = SignedManifest(canonical_bytes(manifest), owner, genesis_digest, b"")
    signature = crypto.sign(_covered("manifest", unsigned))
    return msgspec.structs.replace(unsigned, signature=signature)


def run_id(signed: SignedManifest) -> str:
    """The run's name among programs: 64 hex digits over owner, manifest and genesis digest."""
    return hashlib.sha256(_covered("run-id", signed)).hexdigest()


def verify(signed: SignedManifest, crypto_verify: Verify) -> Manifest:
    """The manifest, if its owner signed it and it is valid.

    Raises:
        RemoteError: "manifest-signature", or as `manifest_from_canonical`.
    """
    check_signature(signed, crypto_verify)
    return manifest_from_canonical(signed.manifest)


def check_signature(signed: SignedManifest, crypto_verify: Verify) -> None:
    """Check that the owner signed it; nothing of the manifest is decoded.

    Raises:
        RemoteError: "manifest-signature".
    """
    if not crypto_verify(signed.owner, _covered("manifest", signed), signed.signature):
        raise RemoteError("manifest-signature", f"not signed by {signed.owner}")


def encode_signed(signed: SignedManifest) -> bytes:
    """Encode for the wire (at most `MAX_SIGNED_BYTES`)."""
    return _encoder.encode(signed)


def decode_signed(data: bytes) -> SignedManifest:
    """Decode what a peer sent; `verify` comes next.

    Raises:
        RemoteError: "manifest-oversized" or "manifest-garbage".
    """
    if len(data) > MAX_SIGNED_BYTES:
        raise RemoteError("manifest-oversized", f"{len(data)} bytes")
    try:
        return _decoder.decode(data)
    except DECODING as error:
        raise RemoteError("manifest-garbage", str(error)) from error


def save_signed(path: Path, signed: SignedManifest) -> None:
    """Write atomically: a crash leaves the old file or the new one, whole.

    Raises:
        StorageError: the folder is missing, full or not writable; no temporary file stays.
    """
    # The process id keeps two writers apart; leftovers of a kill have a name that is never read.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with temporary.open("wb") as file:
                file.write(encode_signed(signed))
                file.flush()
                os.fsync(file.fileno())
            clear_folder_at(path)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        raise StorageError(f"{path}: cannot be written: {error.strerror}") from error


def load_signed(path: Path, crypto_verify: Verify) -> tuple[SignedManifest, Manifest]:
    """Read and verify a saved manifest.

    Raises:
        StorageError: missing, unreadable, damaged, or not signed by the owner that it names.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_SIGNED_BYTES + 1)
        signed = decode_signed(data)
        return signed, verify(signed, crypto_verify)
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from error
    except RemoteError as error:
        raise StorageError(f"{path}: is damaged ({error})", hint="delete it; peers give it again") from error


def _covered(domain: str, signed: SignedManifest) -> bytes:
    """Bytes that signature and run id cover: all fields but the signature, under a domain separator."""
    fields = (signed.owner, signed.manifest, signed.genesis_digest)
    return b"p2pdiloco/1/" + domain.encode() + b"\0" + _encoder.encode(fields)
