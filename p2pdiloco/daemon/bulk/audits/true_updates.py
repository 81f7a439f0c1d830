"""True updates of versions that we found false, kept until one of ours, or of others, repairs that.

Whatever else wants the memory gets it: then somebody else makes the repair, or nobody.

Rules: docs/protocol/audits.md, section 4.
"""

from __future__ import annotations

from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.daemon.bulk.chain_view import ChainView
from p2pdiloco.tensors.outer_update import Correction

MOST_BYTES = 256 << 20
MOST_KEPT = 16


class TrueUpdates:
    """Updates as they should have been, by the digest of the version. The oldest give way."""

    def __init__(self, chain: ChainView) -> None:
        self._chain = chain
        self._kept: dict[bytes, tuple[bytearray, bytes]] = {}
        """Update, and its digest when it was made."""

    @property
    def held_bytes(self) -> int:
        """Bytes that they take."""
        return sum(len(update) for update, _ in self._kept.values())

    def keep(self, digest: bytes, update: bytearray, update_digest: bytes) -> None:
        """Keep one."""
        self._kept.pop(digest, None)
        self._kept[digest] = update, update_digest
        while len(self._kept) > MOST_KEPT or self.held_bytes > MOST_BYTES:
            del self._kept[next(iter(self._kept))]

    def has(self, digest: bytes) -> bool:
        """Tell whether that one is kept."""
        return digest in self._kept

    def give_up(self) -> None:
        """Let go of all: the memory is wanted for something else."""
        self._kept.clear()

    async def correction(self, repaired: SignedVersion | None) -> Correction | None:
        """Find what makes a version good: its true update and the false one. None: one is not here."""
        if repaired is None:
            return None
        header = repaired.header
        digest = header.digest()
        found = await self._chain.update_of(header.fragment, header.number) if self.has(digest) else None
        kept = self._kept.get(digest)
        if kept is None or found is None or found[0].header.digest() != digest:
            return None
        return Correction(kept[0], found[1], (kept[1], header.update_digest))
