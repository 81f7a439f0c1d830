"""Invites as text: all that a newcomer needs, in one word that survives copying (`daemon.admission.word`)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from p2pdiloco.core.api.types import Wire
from p2pdiloco.daemon.admission.papers import MAX_USES, Admission, Grant, admission
from p2pdiloco.daemon.admission.word import Key, Kind, Peers, pack_peers, unpack_peers
from p2pdiloco.identity import Identity

INVITE = Kind(
    noun="an invite",
    prefix="p2pdiloco1",
    domain=b"p2pdiloco/1/invite\0",
    hint="copy the whole word that `p2pdiloco invite` printed; it begins with p2pdiloco1",
)


class Right(Wire, frozen=True):
    """A grant and its key, without the run."""

    seed: Key
    expires: Annotated[int, Meta(ge=0, le=1 << 53)]
    uses: Annotated[int, Meta(ge=1, le=MAX_USES)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]


class _PackedInvite(Wire, frozen=True):
    """Form in which an invite is written."""

    run: Key
    seed: Key
    expires: Annotated[int, Meta(ge=0, le=1 << 53)]
    uses: Annotated[int, Meta(ge=1, le=MAX_USES)]
    signature: Annotated[bytes, Meta(min_length=64, max_length=64)]
    peers: Peers


class Invite(Struct, frozen=True):
    """Invite to a run. Secret: whoever has it can join."""

    grant: Grant
    key: Identity
    """The grant's key."""
    addresses: tuple[str, ...]
    """Multiaddrs, with /p2p/ID, of peers to join through."""

    @classmethod
    def of(cls, run: str, right: Right, addresses: tuple[str, ...]) -> Invite:
        """Make it of its parts."""
        key = Identity.from_seed(right.seed)
        granted = Grant(run, key.peer_id, right.expires, right.uses, right.signature)
        return cls(granted, key, addresses)

    @property
    def run(self) -> str:
        """Id of the run."""
        return self.grant.run

    @property
    def right(self) -> Right:
        """Grant and key as they are written."""
        granted = self.grant
        return Right(self.key.seed, granted.expires, granted.uses, granted.signature)

    def admit(self, peer: str) -> Admission:
        """Make the admission of a peer."""
        return admission(self.grant, peer, self.key)


def encode_invite(invite: Invite) -> str:
    """Encode an invite as text; of the addresses as many as there is room for. Raises: ConfigError."""
    right = invite.right
    return INVITE.encode(
        _PackedInvite(
            bytes.fromhex(invite.run),
            right.seed,
            right.expires,
            right.uses,
            right.signature,
            pack_peers(invite.addresses, INVITE.noun),
        )
    )


def decode_invite(text: str) -> Invite:
    """Read an invite. Raises: ConfigError (it is none, or damaged)."""
    return INVITE.decode(text, _PackedInvite, _unpacked)


def _unpacked(packed: _PackedInvite) -> Invite:
    right = Right(packed.seed, packed.expires, packed.uses, packed.signature)
    return Invite.of(packed.run.hex(), right, unpack_peers(packed.peers))
