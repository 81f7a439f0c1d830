"""Distrust of members whose merge this node made again, and found false, or that left its work out, or that
do not give what they merged.

It is this node's own finding, and moves nobody else. But whoever is harmed by a false merge sees that, and
makes it again for itself.

Rules: docs/protocol/audits.md, section 3.
"""

from __future__ import annotations

from p2pdiloco.util import BoundedDict

DISTRUST_S = 3600.0
"""Time for which a member is not counted on, and gets no vote of ours."""
MAX_DISTRUSTED = 256


class Distrust:
    """Members that this node counts on in no office, each for a time."""

    def __init__(self) -> None:
        self._until_s: BoundedDict[str, float] = BoundedDict(MAX_DISTRUSTED)
        self._withheld: BoundedDict[str, None] = BoundedDict(MAX_DISTRUSTED)
        """Members that did not give what they merged when we last audited a merge of theirs."""

    def add(self, peer: str, now: float) -> None:
        """Begin to distrust that peer, or go on."""
        self._until_s[peer] = now + DISTRUST_S

    def withheld(self, peer: str, looks_wrong: bool, now: float) -> None:
        """Note that a syncer which we are connected to did not give what it merged. Once it may have let go
        of that; twice in a row, or where its version `looks_wrong`, it has something to hide."""
        if looks_wrong or peer in self._withheld:
            self.add(peer, now)
        self._withheld[peer] = None

    def gave(self, peer: str) -> None:
        """Note that all was to be had of a merge of that syncer."""
        self._withheld.pop(peer, None)

    def has(self, peer: str, now: float) -> bool:
        """Tell whether that peer is distrusted now."""
        until_s = self._until_s.get(peer)
        return until_s is not None and now < until_s
