"""Siblings: who holds another version of the same number is shown ours. Of two that one syncer made of one
parent, each half of the swarm has one; whoever has both has a proof.

Rules: docs/protocol/proofs.md, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pdiloco.core.api.messages import Sibling
from p2pdiloco.core.api.proofs import SignedShort, short_of, two_versions
from p2pdiloco.core.api.types import Head
from p2pdiloco.core.api.versions import SignedVersion
from p2pdiloco.core.chain.chain import Chain
from p2pdiloco.core.shared import Shared
from p2pdiloco.util import BoundedDict

MOST_SHOWN = 32
"""Peers that were shown a version of ours last, whom it is not shown again at once."""
AGAIN_S = 5.0
MOST_GIVERS = 8
"""Peers that are shown our head at one go, when it turns out to be of another branch than theirs."""


class ShownVersions:
    """Siblings of the versions in one fragment's log."""

    def __init__(self, shared: Shared, chain: Chain) -> None:
        self._shared = shared
        self._chain = chain
        self._shown_s: BoundedDict[tuple[str, bytes], float] = BoundedDict(MOST_SHOWN)

    def heard(self, peer: str, head: Head, now: float) -> None:
        """Show a peer our version of that number and term, if its own is another: the syncer may be one."""
        ours = self._chain.logged(head.number)
        if ours is None or ours.header.term != head.term or self._chain.knows(head.number, head.digest):
            return
        if head.number:
            self._show(peer, ours, now)

    def forked(self, peers: Iterable[str], now: float) -> None:
        """Show these our head: what they follow does not follow from it."""
        if self._chain.head.number:
            for peer in list(peers)[:MOST_GIVERS]:
                self._show(peer, self._chain.signed, now)

    def _show(self, peer: str, ours: SignedVersion, now: float) -> None:
        key = peer, ours.header.digest()
        if now - self._shown_s.get(key, -AGAIN_S) >= AGAIN_S:
            self._shown_s[key] = now
            self._shared.out.send(peer, Sibling(short_of(ours)))

    def seen(self, giver: str, version: SignedVersion | SignedShort) -> None:
        """Compare a version with ours of that number: it was fetched, or shown to us."""
        ours = self._chain.logged(version.header.number)
        self._shared.excluded.found(two_versions(ours, version), giver)
