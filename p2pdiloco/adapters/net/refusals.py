"""Refusals between transports: reason and detail as they cross a stream, and as an error at the other end."""

from __future__ import annotations

from p2pdiloco.core.api.reasons import Unheard
from p2pdiloco.errors import RemoteError

MAX_REASON_BYTES = 1024


class RefusedByPeer(RemoteError):
    """Error: the peer refused us, with its reason. Not an offence of the peer: never counted against it."""

    def __init__(self, reason: str, detail: str, unheard: Unheard | None) -> None:
        """`unheard`: why it did not even look at what we asked; None: it found fault with that."""
        super().__init__(reason, detail)
        self.unheard = unheard


_UNHEARD = {why.value: why for why in Unheard}


def refused_by_peer(body: bytes) -> RefusedByPeer:
    """Make the error that a peer's encoded refusal stands for."""
    reason, _, detail = body.decode("utf-8", "replace").partition("\n")
    return RefusedByPeer(reason[:64] or "unknown", detail, _UNHEARD.get(reason))


def encode_refusal(error: RemoteError) -> bytes:
    """Encode reason and detail as they go to the peer, capped."""
    detail = str(error).removeprefix(error.reason).removeprefix(": ")
    text = f"{error.reason}\n{detail}".encode()[:MAX_REASON_BYTES]
    return text.decode("utf-8", "ignore").encode()
