"""Another process with this node's identity: its data folder was copied, and both copies run.

Others take the two for lives of one node and listen to whoever began last, if to either: the one that they do
not hear trains alone and cannot know it. Both keep one record on the DHT, in turns, and so find out. The
earlier one ends.
"""

from __future__ import annotations

import logging

from p2pdiloco.errors import UserError

logger = logging.getLogger(__name__)
HINT = "give each node a --data-dir of its own: a copy of another node's folder is that node"
MIN_TURNS = 3


class Twins:
    """Judges the record of our own name, as the DHT has it."""

    def __init__(self, incarnation: int, lifetime_s: float) -> None:
        """`lifetime_s`: of a record that is not renewed. One of an earlier life of ours is gone by then."""
        self._incarnation = incarnation
        self._lifetime_s = lifetime_s
        self._ours = False
        """The last that we saw was ours: what is there now was written after it."""
        self._turns = 0
        self._since_s = 0.0

    def look(self, incarnation: int, name: str, now: float) -> None:
        """Take one look in. Raises: UserError when another process of this identity began after us."""
        if incarnation == self._incarnation:
            self._ours = True
            return
        if not self._ours:
            return
        self._ours = False
        self._turns += 1
        if self._turns == 1:
            self._since_s = now
        if self._turns < MIN_TURNS or now - self._since_s < self._lifetime_s:
            return
        called = f" ({name})" if name else ""
        if incarnation > self._incarnation:
            raise UserError(
                f"another node{called} runs with this node's identity and began later: this one ends", HINT
            )
        self._turns = 0
        logger.warning(
            "another node%s runs with this node's identity, and ends when it notices; %s", called, HINT
        )
