"""Answers of peers to our questions: who let several of them go is not waited for, where nothing else tells a
member from a name.

Rules: docs/protocol/trust.md, section 3.
"""

from __future__ import annotations

from collections.abc import Iterable

from p2pdiloco.util import BoundedDict

IN_VAIN = 3
"""Questions in a row that a peer leaves unanswered, before it counts for nothing until it answers one."""
MOST = 512


class Answers:
    """Peers that left questions of ours unanswered."""

    def __init__(self) -> None:
        self._in_vain: BoundedDict[str, int] = BoundedDict(MOST)

    def lacking(self, peers: Iterable[str]) -> None:
        """Note that none came from these, in the time that there was."""
        for peer in peers:
            self._in_vain[peer] = self._in_vain.get(peer, 0) + 1

    def came(self, peer: str) -> None:
        """Note that this peer answered."""
        self._in_vain.pop(peer, None)

    def silent(self, peer: str) -> bool:
        """Tell whether that peer counts for nothing."""
        return self._in_vain.get(peer, 0) >= IN_VAIN
