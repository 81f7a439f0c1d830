"""Identity of a node, an Ed25519 key: the libp2p peer id, and the key behind every signature.

The key file is libp2p's `PrivateKey` protobuf (type 1, seed and public key, 68 bytes), so that p2pd reads
the same file. A peer id of an Ed25519 key contains the whole public key (multihash "identity"), so a
signature can be checked from the peer id alone and no key is ever distributed.
Source: https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
"""

from __future__ import annotations

import os
import secrets
import stat
from functools import lru_cache
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from p2pdiloco.errors import StorageError

SIGNATURE_BYTES = 64
_FILE_PREFIX = b"\x08\x01\x12\x40"  # protobuf: key_type = Ed25519, data = 64 bytes follow
_ID_PREFIX = b"\x00\x24\x08\x01\x12\x20"  # multihash identity, 36 bytes: protobuf of a 32-byte public key
_FILE_BYTES = len(_FILE_PREFIX) + 64


class Identity:
    """Key, Ed25519, and its peer id. Implements `core.api.types.Crypto`."""

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        self._public = key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.peer_id = peer_of(self._public)
        """libp2p peer id, base58 text (12D3Koo…)."""

    @classmethod
    def generate(cls) -> Identity:
        """Make a fresh identity that lives in memory only."""
        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def from_seed(cls, seed: bytes) -> Identity:
        """Make the identity of a seed of 32 bytes."""
        return cls(Ed25519PrivateKey.from_private_bytes(seed))

    @classmethod
    def load_or_create(cls, path: Path) -> Identity:
        """Load the identity in the file `path`; created (mode 0600, atomically) when there is no file.

        Raises:
            StorageError: the file or its folder cannot be used, is readable for others, or is corrupt.
        """
        try:
            if not os.path.lexists(path):
                _create(path, cls.generate())
            return cls._load(path)
        except OSError as error:
            reason = error.strerror or str(error)
            raise StorageError(
                f"The identity file {path} cannot be used: {reason}.",
                "Check the owner and the permissions of the file and of its folder.",
            ) from error

    @classmethod
    def _load(cls, path: Path) -> Identity:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise StorageError(
                f"The identity {path} is not a regular file.", "Move it away, or name another."
            )
        if status.st_mode & 0o077:
            raise StorageError(
                f"The identity file {path} can be read or changed by other users "
                f"(mode {stat.S_IMODE(status.st_mode):04o}).",
                f"Make it private: chmod 600 {path}",
            )
        data = path.read_bytes() if status.st_size == _FILE_BYTES else b""
        if data.startswith(_FILE_PREFIX):
            seed, public = data[4:36], data[36:]
            identity = cls(Ed25519PrivateKey.from_private_bytes(seed))
            if identity._public == public:
                return identity
        raise StorageError(
            f"The identity file {path} is corrupt or not an Ed25519 key of libp2p.",
            "Restore it from a backup, or move it away: the node then gets a new identity.",
        )

    @property
    def seed(self) -> bytes:
        """Seed of the key, 32 bytes. Secret."""
        return self._key.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())

    def encoded(self) -> bytes:
        """Content of the key file, 68 bytes. Secret."""
        return _FILE_PREFIX + self.seed + self._public

    def sign(self, message: bytes) -> bytes:
        """Sign the message; returns the signature of 64 bytes."""
        return self._key.sign(message)

    def verify(self, peer: str, message: bytes, signature: bytes) -> bool:
        """Tell whether `peer` signed the message. False, never an exception, for anything malformed."""
        return verify(peer, message, signature)

    def __repr__(self) -> str:
        return f"Identity({self.peer_id})"  # never the key


def verify(peer: str, message: bytes, signature: bytes) -> bool:
    """Tell whether the Ed25519 peer named `peer` signed the message. False for anything malformed."""
    key = _public_key(peer)
    if key is None or len(signature) != SIGNATURE_BYTES:
        return False
    try:
        key.verify(signature, message)
    except InvalidSignature:
        return False
    return True


def peer_of(public: bytes) -> str:
    """Make the peer id of an Ed25519 public key, 32 bytes."""
    return base58.b58encode(_ID_PREFIX + public).decode()


@lru_cache(maxsize=4096)
def _public_key(peer: str) -> Ed25519PublicKey | None:
    public = public_of(peer)
    return None if public is None else Ed25519PublicKey.from_public_bytes(public)


def public_of(peer: str) -> bytes | None:
    """Read the public key, 32 bytes, off a peer id; None: it is not the id of an Ed25519 key."""
    if not 40 <= len(peer) <= 80:  # before base58, whose cost grows with the square of the length
        return None
    try:
        raw = base58.b58decode(peer.encode("ascii"))
    except ValueError:  # UnicodeEncodeError is one
        return None
    if len(raw) != len(_ID_PREFIX) + 32 or not raw.startswith(_ID_PREFIX):
        return None
    if base58.b58encode(raw).decode() != peer:  # b58decode ignores surrounding white space
        return None
    return raw[len(_ID_PREFIX) :]


def _create(path: Path, identity: Identity) -> None:
    """Write the key file so that it is there whole or not at all; an existing file is left as it is."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(identity.encoded())
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)  # unlike rename, never replaces a key that appeared meanwhile
        except FileExistsError:
            return
    finally:
        temporary.unlink(missing_ok=True)
