"""Rota of one office: who was its syncer last. Others come before them.

Nobody can make a member wait for its rank, and by naming a high term it can choose one in which it is the
first. So without this one member could hold every office for ever, and leave whom it likes out of all rounds.

Rules: docs/protocol/election.md, section 8.
"""

from __future__ import annotations

from itertools import islice

from p2pdiloco.util import BoundedDict

MOST = 256


class Rota:
    """Syncers of one chain in the order in which they made its versions, as this member saw."""

    def __init__(self) -> None:
        self._last: BoundedDict[str, int] = BoundedDict(MOST)
        """Number of each one's newest version, the newest last."""
        self._newest = ""
        self._since = 0
        """Number of the first of the newest versions that one syncer made without another between."""

    def made(self, syncer: str, number: int) -> None:
        """Note who made the head of the chain, and its number."""
        if self._last.get(syncer) == number and self._newest == syncer:
            return
        if syncer != self._newest:
            self._newest, self._since = syncer, number
        self._last[syncer] = number

    def lately(self, many: int) -> frozenset[str]:
        """List so many of those who were syncer last."""
        return frozenset(islice(reversed(self._last), many))

    def versions(self, syncer: str) -> int:
        """Count the newest versions that this one made without another between."""
        return self._last[syncer] - self._since + 1 if syncer == self._newest else 0
